"""Rows of the user's own files as conversations: one function per layout."""

from __future__ import annotations

from typing import Any

import msgspec

from grpo_mcore.data.datasets.mapped import Row
from grpo_mcore.data.datasets.messages import as_json, as_messages, assistant, conversation, tools_of
from grpo_mcore.data.datasets.source import field_of, missing, required
from grpo_mcore.data.gym.conversation import Chat, chat_tools, with_instructions
from grpo_mcore.data.gym.rollout import BadRow, Filtered, Item
from grpo_mcore.data.interfaces import RESERVED_KEYS, DataError


def question_and_answer(row: Row, *, question: str, answer: str) -> Row:
    """Convert a question (text or a conversation) and its answer. The row's other fields are kept; a field
    `ground_truth` may replace the answer. An answer that is a list or an object is the ground truth and no message."""
    messages = as_messages(_wanted(row, question), question)
    extra = _other_fields(row, question, answer) | _tools(row, "tools")
    truth = field_of(row, answer)
    if isinstance(truth, list | dict):
        extra.setdefault("ground_truth", truth)
    elif truth is not None:
        messages.append(assistant(str(truth)))
    elif row.get("ground_truth") is None:  # GRPO needs no answer beside it
        raise missing(row, answer)
    return {**extra, "messages": messages}


def _wanted(row: Row, key: str) -> Any:
    """Return the field that makes a row one of this layout. Raises DataError without it, and says how the row's own
    layout is read, if that is known."""
    if field_of(row, key) is not None:
        return field_of(row, key)
    error = missing(row, key)
    if key not in row and (how := _layout(row)):
        raise DataError(f"{error}. {how}")
    raise error


def _layout(row: Row) -> str | None:
    if isinstance(row.get("responses_create_params"), dict):
        return "This is a task of NeMo Gym: dataset_name: NemoGymDataset"
    if {"chosen", "rejected"} <= set(row):
        return "These are pairs of answers, which `grpo-mcore dpo` takes: dataset_name: BinaryPreferenceDataset"
    if chat := next((key for key in ("messages", "conversations", "conversation") if _is_chat(row.get(key))), None):
        other = "" if chat == "messages" else f", chat_key: {chat}"
        return f"{chat!r} is a whole conversation: dataset_name: openai_format{other}"
    if known := next(
        (key for key in ("input", "question", "problem", "prompt", "query", "instruction") if row.get(key)), None
    ):
        return f"If {known!r} is the question: dataset_name: ResponseDataset, input_key: {known}"
    return None


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and bool({"role", "from"} & set(value[0]))
    )


def openai_row(
    row: Row, *, chat: str, tools: str = "tools", system_key: str | None = None, system_prompt: str | None = None
) -> Row:
    """Convert a whole conversation and the tools that it may call."""
    value = _wanted(row, chat)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        raise DataError(f"{chat!r} must be a list of messages, got str")
    messages = conversation(as_json(value, chat, "messages"), chat)
    system = (field_of(row, system_key) if system_key else None) or system_prompt
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return {**_other_fields(row, chat, tools), "messages": messages, **_tools(row, tools)}


def gym_task(row: Row) -> Row:
    """Convert a task of NeMo Gym, which its agent gets unchanged. The messages only measure the prompt; a task may
    leave them to the environment."""
    params = _wanted(row, "responses_create_params")
    if not isinstance(params, dict):
        raise DataError(f"'responses_create_params' must be an object, got {type(params).__name__}")
    asked = params.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    try:
        messages = Chat().take(msgspec.convert(items or [], list[Item]))
        tools = chat_tools(params.get("tools"))
        messages = with_instructions(messages, params.get("instructions"))
    except (BadRow, Filtered, msgspec.ValidationError) as error:
        raise DataError(f"'responses_create_params': {error}") from error
    return {"messages": messages, "gym_task": row, **({"tools": tools} if tools else {})}


def preference_pair(row: Row, *, prompt: str, chosen: str, rejected: str) -> Row:
    """Convert a prompt with a better and a worse answer, each text or a list of messages."""
    return {
        **_other_fields(row, prompt, chosen, rejected),
        **_tools(row, "tools"),
        "messages": as_messages(required(row, prompt), prompt),
        "chosen": as_messages(required(row, chosen), chosen, role="assistant"),
        "rejected": as_messages(required(row, rejected), rejected, role="assistant"),
    }


def _other_fields(row: Row, *used: str) -> Row:
    return {key: value for key, value in row.items() if key not in (*used, *RESERVED_KEYS)}


def _tools(row: Row, key: str) -> Row:
    """Return {"tools": ...}, or nothing for a row without tools."""
    tools = tools_of(field_of(row, key), key)
    return {"tools": tools} if tools else {}
