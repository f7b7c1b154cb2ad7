"""The tokenizer, with the recipe's chat template and its arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_mcore.data.interfaces import DataError


def load_tokenizer(
    name: str, chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Load a Hugging Face tokenizer by name or folder and make sure that it has an end and a padding token.

    `chat_template` is Jinja text, or a file with it, that replaces the tokenizer's own. `chat_template_kwargs` are
    added to every `apply_chat_template` call, also to those of the user's processors. Raises DataError.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # else it would ask in a terminal
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the tokenizer {name!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {name!r} has no end-of-sequence token, so no answer could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    if tokenizer.chat_template is None:
        raise DataError(f"the tokenizer {name!r} has no chat template; set policy.tokenizer.chat_template")
    if chat_template_kwargs:
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **chat_template_kwargs)
    return tokenizer


def template_text(chat_template: str) -> str:
    """Return the text of a chat template, given the text or the file that holds it. Raises DataError."""
    if "{" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"chat_template {chat_template}: {error.strerror or error}") from error
