"""Conversations as they come in files, made what chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from grpo_mcore.data.interfaces import DataError

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def as_messages(value: Any, key: str, role: str = "user") -> list[Message]:
    """Text as one message of that role, or a conversation. `key`: the field it stood in, for messages of DataError."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise DataError(f"{key!r} must be text or a list of messages, got {type(value).__name__}")
    return conversation(value, key)


def conversation(messages: list[Any], key: str) -> list[Message]:
    """The messages with their contents as text. Raises DataError for an empty list and for what is no message."""
    if not messages:
        raise DataError(f"{key!r} has no message in it")
    return [_message(message, f"message {number} of {key!r}") for number, message in enumerate(messages)]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f'{place} must have a role and a content, such as {{"role": "user", "content": "..."}}')
    calls = message.get("tool_calls")
    if message.get("content") is None and not calls:
        raise DataError(f"{place} has no content")
    clean = {**message, "content": _text(message.get("content"), place)}
    if calls:
        clean["tool_calls"] = [_tool_call(call) for call in calls]
    return clean


def _text(content: Any, place: str) -> str:
    """Text, or the joined text parts of a content given in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{place}: the content must be text or a list of parts, got {type(content).__name__}")
    texts = [part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | dict)]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place} has a part that is no text; images, audio and video are not supported")
    return "".join(texts)


def _tool_call(call: Any) -> Any:
    """Arguments as an object: the API writes them as JSON text, chat templates write the JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # the model wrote something else: it stays as it was written
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def without_nulls(value: Any) -> Any:
    """`value` without fields that are null. A table has the fields of every row in every row, null where a row had
    none; a chat template would show them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
