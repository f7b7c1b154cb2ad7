"""The tokenizer, with the recipe's chat template and its arguments."""

import functools
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_mcore.data.interfaces import DataError, read_text
from grpo_mcore.rollout.tokenizer_file import load_hf_tokenizer

logger = logging.getLogger(__name__)

MULTIMODAL = re.compile("image|img|vision|audio|video|sound|speech", re.IGNORECASE)
"""Parts of tokens that stand for something other than text."""


def load_tokenizer(
    name: str, chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Load a Hugging Face tokenizer by name or folder and make sure that it has an end and a padding token.

    `chat_template` is Jinja text, or a file with it, that replaces the tokenizer's own. `chat_template_kwargs` are
    added to every `apply_chat_template` call, also to those of the user's processors. Raises DataError.
    """
    try:
        tokenizer = load_hf_tokenizer(name)
    except Exception as error:  # its library raises many kinds for files that are cut off or another program's
        raise DataError(f"cannot load the tokenizer {name!r}: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {name!r} has no end-of-sequence token, so no answer could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    if tokenizer.chat_template is None:
        raise DataError(f"the tokenizer {name!r} has no chat template; set policy.tokenizer.chat_template")
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")  # of a file that Windows wrote
    _try_template(tokenizer, name)
    for key in chat_template_kwargs or ():
        if key not in str(tokenizer.chat_template):
            logger.warning("policy.tokenizer.chat_template_kwargs.%s: the chat template does not use it", key)
    if chat_template_kwargs:
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **chat_template_kwargs)
    return tokenizer


def _try_template(tokenizer: Any, name: str) -> None:
    """Render a short conversation. Raise DataError for a template that does not show the question, and warn about one
    without a generation prompt. Other errors are reported where the text is needed: a template may want other messages.
    """
    question = [{"role": "user", "content": "question"}]
    try:
        shown = tokenizer.apply_chat_template(question, tokenize=False)
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*question, {"role": "assistant", "content": "answer"}], tokenize=False)
        header = whole.removeprefix(prompt).partition("answer")[0].strip()
    except Exception:  # a template is code of the model's author
        return
    if shown == prompt and whole.startswith(prompt) and header:
        logger.warning(
            "the chat template of %r has no generation prompt: the policy has to write %r before each answer",
            name,
            header,
        )
    if "question" not in shown:
        raise DataError(f"the chat template of {name!r} does not show a question; set policy.tokenizer.chat_template")


def check_token_ids(tokenizer: Any, name: str, vocab_size: int, model: str) -> None:
    """Raise DataError if the tokenizer has tokens that the model has no embedding for: they would be trained on as
    zeros where the vocabulary is split and padded, and end the run where it is not. `vocab_size` is config.json's.

    Placeholders of images, sound and video may be missing in a text-only model, whose data has none.
    """
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= vocab_size}
    wrong = {token: number for token, number in beyond.items() if not MULTIMODAL.search(token)}
    special = {tokenizer.eos_token_id: "eos", tokenizer.pad_token_id: "pad", tokenizer.bos_token_id: "bos"}
    wrong |= {token: number for token, number in beyond.items() if number in special}
    if wrong:
        token = max(wrong, key=wrong.__getitem__)
        raise DataError(
            f"policy.tokenizer.name: the largest token of {name!r} is {token!r} with number {wrong[token]}, but the "
            f"model {model!r} has {vocab_size} tokens (vocab_size of its config.json), numbers 0 to {vocab_size - 1}; "
            f"{len(wrong)} tokens have no embedding: use the model's own tokenizer, or resize its embeddings"
        )


def check_same_tokens(tokenizer: Any, teacher: Any, name: str) -> None:
    """Raise DataError if a token of `tokenizer` has another number, or none, in the teacher's: a teacher scores the
    student's token ids. The teacher may have further tokens. `name` is the teacher's, for the message."""
    vocab, teacher_vocab = tokenizer.get_vocab(), teacher.get_vocab()
    odd = [token for token, number in vocab.items() if teacher_vocab.get(token) != number]
    if odd:
        token = min(odd, key=vocab.__getitem__)
        other = f"number {teacher_vocab[token]}" if token in teacher_vocab else "no token"
        raise DataError(
            f"the teacher {name!r} has another tokenizer than the policy: {token!r} is number {vocab[token]} here and "
            f"{other} there ({len(odd)} of {len(vocab)} tokens differ). A teacher scores the policy's token ids: "
            "choose one with the policy's tokenizer"
        )


def say_other_ends(tokenizer: Any, folder: Path) -> None:
    """Warn if the model's config or generation settings name other end-of-sequence or padding tokens than the
    tokenizer: answers end with any of the former; the tokenizer's padding is used."""
    for file in ("config.json", "generation_config.json"):
        if not (folder / file).is_file():
            continue
        settings = _settings(folder / file)
        for key in ("eos_token_id", "pad_token_id"):
            value, own_id = settings.get(key, settings.get("text_config", {}).get(key)), getattr(tokenizer, key)
            numbers = value if isinstance(value, list) else [] if value is None else [value]
            if numbers and own_id not in numbers:
                logger.warning(
                    "%s of %s is %s, that of the tokenizer %s (%r): %s",
                    *(key, folder / file, value, own_id, tokenizer.convert_ids_to_tokens(own_id)),
                    "answers end with any of them" if key == "eos_token_id" else "the tokenizer's is used",
                )


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}); copy or download the model again") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} must hold an object, got {type(settings).__name__}")
    return settings


def template_text(chat_template: str) -> str:
    """Return the text of a chat template, given the text or the file that holds it. Raises DataError."""
    return chat_template if "{" in chat_template else read_text(chat_template, "chat_template")
