"""The parser of a rollouts file's lines, as NeMo Gym writes them (`response.output`) or with `output` at the top. It
reads the fields that are needed and ignores all others."""

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from grpo_mcore.rollout.messages import Item, content_text, kind_of, read_content

ROUNDING = 1e-9
"""Tolerance of comparisons of rewards: 0.9999999999999998 counts as 1, and 0.7 - 0.5 as 0.2."""


MASKED = "mask_sample: the environment itself says not to train on it"
FAILED = "the Gym says that the rollout failed (failure_reason), so its answer is not the agent's last word"
CUT_OFF = "cut off at a length limit (response.status incomplete)"


class BadRow(ValueError):
    """A line that is not a rollout. The text says why."""


class Filtered(Exception):
    """A rollout that is not used. The text is the reason, identical for all such rows, which are counted by it."""


class Params(Struct, gc=False):
    """The request of a rollout."""

    input: str | list[Item] | None
    instructions: Any = None
    tools: Any = None


Output = str | list[Item] | None | UnsetType


class Response(Struct, gc=False):
    output: Output = UNSET
    status: Any = None
    incomplete_details: Any = None


class Rollout(Struct, gc=False):
    """The fields of a line that are needed. `row` is the whole line as parsed."""

    responses_create_params: Params
    output: Output = UNSET
    response: Response | None = None
    reward: Any = None
    task_index: int | str | None = field(name="_ng_task_index", default=None)
    mask_sample: Any = None
    failure: Any = field(name="_ng_failure_class", default=None)
    not_kept: Any = field(name="_ng_no_persist", default=None)
    failure_reason: Any = None
    row: Any = None


def parse_rollout(line: bytes) -> Rollout:
    """Parse a line. Raises BadRow."""
    row = _parse_json(line)
    try:
        try:
            rollout = msgspec.convert(row, Rollout)
        except msgspec.ValidationError:
            rollout = msgspec.convert(_tidy(row) if isinstance(row, dict) else row, Rollout)
    except msgspec.ValidationError as error:
        raise BadRow(str(error)) from error
    rollout.row = row
    return rollout


def _parse_json(line: bytes) -> Any:
    """Parse a line with msgspec, which is fast, or else with Python's parser, which accepts NaN and infinities in
    fields that are not needed (the log-probs), half surrogate pairs and numbers of any length."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4300 else float(digits))
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise BadRow("not usable JSON (nested too deeply)") from error


def _tidy(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without a verifier's own `output` or `response` beside the one that counts, and with items that
    are nested by turn in one list."""
    row = dict(row)
    response, params = row.get("response"), row.get("responses_create_params")
    if isinstance(response, dict) and response.get("output") is not None:
        row |= {"output": None, "response": {**response, "output": _flat(response["output"])}}
    elif "output" in row:
        row |= {"output": _flat(row["output"]), "response": response if isinstance(response, dict) else None}
    if isinstance(params, dict) and "input" in params:
        row["responses_create_params"] = {**params, "input": _flat(params["input"])}
    return row


def _flat(items: Any) -> Any:
    """Flatten a list of items; some agents nest the items of a turn in a list."""
    if not isinstance(items, list) or not any(isinstance(item, list) for item in items):
        return items
    return [inner for item in items for inner in (item if isinstance(item, list) else [item])]


def check_usable(rollout: Rollout) -> None:
    """Raise Filtered for a rollout whose answer is no example, neither a good nor a bad one: its environment masks it,
    it failed, or it was cut off."""
    if rollout.mask_sample is True:
        raise Filtered(MASKED)
    if rollout.failure is not None or rollout.not_kept or rollout.failure_reason:
        raise Filtered(FAILED)
    response = rollout.response
    if response is not None and (response.status == "incomplete" or response.incomplete_details):
        raise Filtered(CUT_OFF)


def input_items(params: Params) -> list[Item]:
    """Return the input items of a rollout's `responses_create_params`."""
    return _as_items(params.input, "user")


def output_items(rollout: Rollout) -> list[Item]:
    """Return the items of `response.output`, else of `output`, which may be a field of the verifier. Null is an empty
    output. Raises BadRow where there is neither."""
    response = rollout.response
    if response is not None and response.output is not UNSET and response.output is not None:
        return _as_items(response.output, "assistant")
    if rollout.output is UNSET:
        if response is None or response.output is UNSET:
            raise BadRow("it has neither 'response.output' nor 'output'")
        return []
    return _as_items(rollout.output, "assistant")


def _as_items(items: Any, role: str) -> list[Item]:
    if type(items) is list:
        return items
    return [Item(type="message", role=role, content=items)] if isinstance(items, str) else []


def reward_of(rollout: Rollout) -> float | None:
    """Return the reward; None where there is none. Raises BadRow for anything but a finite number."""
    reward = rollout.reward
    if reward is None:
        return None
    if not isinstance(reward, (int, float)):
        raise BadRow(f"the reward must be a number, got {kind_of(reward)}")
    try:
        reward = float(reward)
    except OverflowError as error:
        raise BadRow("the reward is too large a number") from error
    if not math.isfinite(reward):
        raise BadRow(f"the reward is {reward}, not a finite number")
    return reward


def text_in(content: Any) -> str:
    """Return the text of a message's content, without reasoning, images and files. Raises MessageError."""
    if isinstance(content, str):
        return content
    return content_text(read_content(content, "a message", keeps_media=True).value)


def last_user_text(items: Sequence[Item]) -> str:
    """Return the user's last text; empty where there is no user's message."""
    for item in reversed(items):
        if item.role == "user" and item.is_message:
            return text_in(item.content)
    return ""


def final_text(items: Sequence[Item]) -> str:
    """Return the text of the agent's last message."""
    for item in reversed(items):
        kind, role = item.type, item.role
        if (kind == "message" and role in ("assistant", None)) or (kind is None and role == "assistant"):
            return text_in(item.content)
    return ""


def is_plain(items: Sequence[Item]) -> bool:
    """Return whether the items are one message with text parts only, so that its text loses nothing."""
    if len(items) != 1 or not items[0].is_message:
        return False
    if isinstance(items[0].content, str):
        return True
    read = read_content(items[0].content, "a message", keeps_media=True)
    return not read.reasoning and all(isinstance(part, str) for part in read.parts)


_encode = msgspec.json.Encoder().encode


def encode(row: Any) -> bytes:
    """Encode as JSON in UTF-8. Raises BadRow where a text is not valid Unicode."""
    try:
        return _encode(row)
    except UnicodeEncodeError as error:
        raise BadRow(f"a text that is not Unicode: half a surrogate pair at character {error.start}") from error
    except RecursionError as error:
        raise BadRow("nested too deeply") from error
