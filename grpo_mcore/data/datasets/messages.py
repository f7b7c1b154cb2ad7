"""Conversations in the cells of data files: text, a list of messages, or such a list as text."""

import ast
import json
import re
from typing import Any

from grpo_mcore.data.interfaces import DataError
from grpo_mcore.rollout.images import given_image
from grpo_mcore.rollout.messages import Message, kind_of, read_messages

_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content|from|value)\1\s*:""")


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def as_messages(value: Any, key: str, role: str = "user") -> list[Message]:
    """Return text as one message with that role, or a conversation, which may be text (a table's cells often are).
    `key` is the field's name, for errors."""
    if is_chat_as_text(value):
        value = parsed(value)
        if isinstance(value, str):
            raise DataError(
                f"{key!r} is text that begins as a list of messages and is neither JSON nor a list of Python"
            )
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict) and {"role", "from"} & set(value):  # one message
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{key!r} must be text or a list of messages, got {kind_of(value)}")
    return read_messages(value, key, given_image)


def is_chat_as_text(value: Any) -> bool:
    """Return whether a value is text that begins as a list of messages."""
    return isinstance(value, str) and _CHAT_AS_TEXT.match(value) is not None


def parsed(value: Any) -> Any:
    """Return a list or mapping that a table holds as text, in JSON or as Python writes it; another value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value
