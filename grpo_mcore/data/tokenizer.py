"""The tokenizer, with the recipe's chat template and the arguments that the template always gets."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_mcore.data.interfaces import DataError


def load_tokenizer(
    name: str, chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """A Hugging Face tokenizer from a name or folder, sure to have an end and a padding token.

    `chat_template`: Jinja text or a file that holds it, in place of the tokenizer's own.
    `chat_template_kwargs`: extra arguments of every `apply_chat_template` call, so that processors of one's
    own get them too.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the tokenizer {name!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {name!r} has no end-of-sequence token; no answer could ever end")
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
    """The text of a chat template: itself, or that of the file it names. Raises DataError."""
    if "{" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"chat_template {chat_template}: {error.strerror or error}") from error
