"""Conversations of data files, checked and brought into the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from grpo_mcore.data.interfaces import DataError

ChatMessage = dict[str, Any]
"""{"role", "content"}, and fields such as `tool_calls` that a chat template may know."""


def user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}


def as_messages(value: Any, key: str, role: str = "user") -> list[ChatMessage]:
    """Return text as one message with that role, or a conversation. `key` is the field's name, for DataError."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise DataError(f"{key!r} must be text or a list of messages, got {type(value).__name__}")
    return conversation(value, key)


def conversation(messages: list[Any], key: str) -> list[ChatMessage]:
    """Return the messages with their contents as text. Raises DataError for an empty list and for a bad message."""
    if not messages:
        raise DataError(f"{key!r} has no message in it")
    return [_message(message, f"message {number} of {key!r}") for number, message in enumerate(messages)]


def _message(message: Any, place: str) -> ChatMessage:
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
    """Return the content as text; text parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{place}: the content must be text or a list of parts, got {type(content).__name__}")
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise DataError(f"{place} has a part that is not text; images, audio and video are not supported")
    return "".join(texts)


def _tool_call(call: Any) -> Any:
    """Return the call with its arguments as an object: the API has JSON text, but chat templates write the JSON
    themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # not JSON: keep what the model wrote
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def without_nulls(value: Any) -> Any:
    """Return `value` without fields that are null. In a table every row has the fields of all rows, null where it had
    none itself; a chat template would show them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
