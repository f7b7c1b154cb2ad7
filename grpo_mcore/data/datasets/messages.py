"""Conversations of data files, checked and brought into the form that chat templates expect."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from grpo_mcore.data.interfaces import DataError

ChatMessage = dict[str, Any]
"""{"role", "content"}, and fields such as `tool_calls` that a chat template may know."""

ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation", "tool_response"), "tool"),
    "developer": "system",
}
"""Roles of messages that have other names in published data. The text of a `function_call` is the call, or a list of
calls, as JSON."""


_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content|from|value)\1\s*:""")


def user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}


def as_messages(value: Any, key: str, role: str = "user") -> list[ChatMessage]:
    """Return text as one message with that role, or a conversation, which may be text (a table's cells often are).
    `key` is the field's name, for DataError."""
    if is_chat_as_text(value):
        value = _chat_in_text(value, key)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict) and {"role", "from"} & set(value):  # one message
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{key!r} must be text or a list of messages, got {type(value).__name__}")
    return conversation(value, key)


def is_chat_as_text(value: Any) -> bool:
    """Return whether a value is text that begins as a list of messages."""
    return isinstance(value, str) and _CHAT_AS_TEXT.match(value) is not None


def _chat_in_text(text: str, key: str) -> Any:
    """Return a list of messages that is text, in JSON or as Python writes it."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise DataError(f"{key!r} is text that begins as a list of messages and is neither JSON nor a list of Python")


def conversation(messages: list[Any], key: str) -> list[ChatMessage]:
    """Return the messages with their contents as text. Raises DataError for an empty list and for a bad message."""
    if not messages:
        raise DataError(f"{key!r} has no message in it")
    return [_message(message, f"message {number} of {key!r}") for number, message in enumerate(messages)]


def _message(message: Any, place: str) -> ChatMessage:
    if isinstance(message, dict) and "role" not in message and {"from", "value"} <= set(message):
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": message["from"], "content": message["value"], **others}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f'{place} must have a role and a content, such as {{"role": "user", "content": "..."}}')
    role = message["role"].strip().lower().replace("-", "_")
    if role == "function_call":
        calls = as_json(message.get("content"), f"{place}: the call", "calls", single=True)
        message = {**message, "content": "", "tool_calls": calls}
    if isinstance(message.get("function_call"), dict) and not message.get("tool_calls"):  # OpenAI's older form
        message = {**message, "tool_calls": [message["function_call"]], "function_call": None}
    message = {**message, "role": ROLES.get(role, role if role in ROLES.values() else message["role"])}
    if message["role"] == "tool" and _is_value(message.get("content")):
        message["content"] = json.dumps(message["content"], ensure_ascii=False)
    calls = message.get("tool_calls")
    if message.get("content") is None and not calls:
        raise DataError(f"{place} has no content")
    if calls and not isinstance(calls, list):
        raise DataError(f"{place}: 'tool_calls' must be a list, got {type(calls).__name__}")
    # A template may look at a field's presence alone, so one that is null is none.
    clean = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    calls = [_tool_call(call, place) for call in calls or ()]
    return {**clean, "content": _text(message.get("content"), place), **({"tool_calls": calls} if calls else {})}


def _is_value(content: Any) -> bool:
    """Return whether a tool's result is a value, not text nor parts of it."""
    parts = isinstance(content, list) and all(isinstance(one, str) or "type" in one for one in content if one)
    return content is not None and not isinstance(content, str) and not parts


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


def _tool_call(call: Any, place: str) -> ChatMessage:
    """Return the call with its arguments as an object: the API has JSON text, but chat templates write the JSON
    themselves. Arguments that are not JSON stay what the model wrote."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{place}: a call must have the name of its function")
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except ValueError:
        parsed = arguments
    function = {**function, "arguments": parsed if isinstance(parsed, dict) else arguments}
    return {"type": "function", **(call if "function" in call else {}), "function": function}


def as_json(value: Any, key: str, kind: str, *, single: bool = False) -> Any:
    """Return a list, which a file may hold as JSON text (a table's cells often do). `kind`: of what, for DataError.
    With `single`, one object is a list of it."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{key!r} is text that is not JSON ({error})") from error
    value = [value] if single and isinstance(value, dict) else value
    if value and not isinstance(value, list):
        raise DataError(f"{key!r} must be a list of {kind}, got {type(value).__name__}")
    return value


def tools_of(value: Any, key: str) -> list[ChatMessage]:
    """Return the tools that a conversation may call: a list of objects, each or all of which may be JSON text. A bare
    function gets the form that chat templates expect, {"type": "function", "function": ...}."""
    tools = [as_object(tool, key) for tool in as_json(value, key, "tools") or ()]
    if wrong := [tool for tool in tools if not isinstance(tool, dict)]:
        raise DataError(f"{key!r} must be a list of tools, got a list with {type(wrong[0]).__name__}")
    bare = [isinstance(tool.get("name"), str) and not {"type", "function"} & set(tool) for tool in tools]
    return [
        {"type": "function", "function": tool} if is_bare else tool for tool, is_bare in zip(tools, bare, strict=True)
    ]


def as_object(value: Any, key: str) -> Any:
    """Return an object, which may be JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{key!r} has text that is not JSON ({error})") from error
