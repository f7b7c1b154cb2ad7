"""Rows of the user's own files as conversations: one function per layout."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from grpo_mcore.data.datasets.mapped import Row
from grpo_mcore.data.datasets.messages import as_messages, assistant, conversation, without_nulls
from grpo_mcore.data.datasets.source import missing
from grpo_mcore.data.gym.conversation import Chat, chat_tools, with_instructions
from grpo_mcore.data.gym.rollout import BadRow, Filtered, Item
from grpo_mcore.data.interfaces import RESERVED_KEYS, DataError


def question_and_answer(row: Row, *, question: str, answer: str) -> Row:
    """Convert a question (text or a conversation) and its answer. The row's other fields are kept; a field
    `ground_truth` may replace the answer. An answer that is a list or an object is the ground truth and no message."""
    messages = as_messages(_required(row, question), question)
    extra = _other_fields(row, question, answer)
    found = row.get(answer)
    if isinstance(found, list | dict):
        extra.setdefault("ground_truth", found)
    elif found is not None:
        messages.append(assistant(str(found)))
    elif row.get("ground_truth") is None:  # GRPO needs no answer beside it
        raise missing(row, answer)
    return {**extra, "messages": messages}


def openai_row(
    row: Row, *, chat: str, tools: str, system_key: str | None, system_prompt: str | None, from_table: bool
) -> Row:
    """Convert a whole conversation and the tools that it may call."""
    value = _required(row, chat)
    if not isinstance(value, list):
        raise DataError(f"{chat!r} must be a list of messages, got {type(value).__name__}")
    messages = conversation(without_nulls(value) if from_table else value, chat)
    system = (row.get(system_key) if system_key else None) or system_prompt
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    found = _tools(row.get(tools), tools)
    return {
        **_other_fields(row, chat, tools),
        "messages": messages,
        **({"tools": without_nulls(found) if from_table else found} if found else {}),
    }


def gym_task(row: Row) -> Row:
    """Convert a task of NeMo Gym, which its agent gets unchanged. The messages only measure the prompt; a task may
    leave them to the environment."""
    params = _required(row, "responses_create_params")
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
        "messages": as_messages(_required(row, prompt), prompt),
        "chosen": as_messages(_required(row, chosen), chosen, role="assistant"),
        "rejected": as_messages(_required(row, rejected), rejected, role="assistant"),
    }


def _required(row: Row, key: str) -> Any:
    if row.get(key) is None:
        raise missing(row, key)
    return row[key]


def _other_fields(row: Row, *used: str) -> Row:
    return {key: value for key, value in row.items() if key not in (*used, *RESERVED_KEYS)}


def _tools(value: Any, key: str) -> Any:
    """Return a list of tools, which a file may hold as JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{key!r} is text that is not JSON ({error})") from error
    if value and not isinstance(value, list):
        raise DataError(f"{key!r} must be a list of tools, got {type(value).__name__}")
    return value
