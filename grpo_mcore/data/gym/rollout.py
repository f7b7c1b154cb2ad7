"""The parser of a rollouts file's lines, as NeMo Gym writes them (`response.output`) or with `output` at the top. It
reads the fields that are needed and ignores all others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

ROUNDING = 1e-9
"""Tolerance of comparisons of rewards: 0.9999999999999998 counts as 1, and 0.7 - 0.5 as 0.2."""


class BadRow(ValueError):
    """A line that is not a rollout. The text says why."""


class Filtered(Exception):
    """A rollout that is not used. The text is the reason, identical for all such rows, which are counted by it."""


class TextItem(Struct, gc=False):
    """The fields of an item that the text of a conversation needs."""

    type: str | None = None
    role: str | None = None
    content: Any = None


class Item(Struct, omit_defaults=True, gc=False):
    """One item of a conversation in the Responses API: a message, a call, the result of a call, or a thought."""

    type: str | None = None
    role: str | None = None
    content: Any = None
    name: Any = None
    arguments: Any = None
    call_id: Any = None
    output: Any = None
    summary: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning_content: Any = None

    @property
    def is_message(self) -> bool:
        return self.type == "message" or (self.type is None and self.role is not None)


AnyItem = Item | TextItem


# JSON name -> attribute, of `responses_create_params` and of the whole rollout.
_PARAMS = {"input": "input", "instructions": "instructions", "tools": "tools"}
_ROLLOUT = {
    "responses_create_params": "responses_create_params",
    "output": "output",
    "response": "response",
    "reward": "reward",
    "_ng_task_index": "task_index",
    "mask_sample": "mask_sample",
}
_OPTIONAL = (Any, None)
_TASK = (int | str | None, None)


def attribute_of(field: str, in_params: bool) -> str:
    """Return the attribute of a parsed rollout, or of its `responses_create_params`, for a field of any name."""
    return (_PARAMS if in_params else _ROLLOUT).get(field) or "field_" + field.encode().hex()


class RolloutParser:
    """Parses lines to rollouts: objects with `responses_create_params` (`input`, `instructions`, `tools`), `output`,
    `response`, `reward`, `task_index`, `mask_sample`, and the `more` fields: (name, whether it is one of
    responses_create_params).

    `output` is the type of the output's items. With `raw_params`, `responses_create_params` stays JSON, to be parsed
    by `params`.
    """

    def __init__(
        self,
        more: Iterable[tuple[str, bool]] = (),
        *,
        output: type[AnyItem] = Item,
        raw_params: bool = False,
    ) -> None:
        params, top = dict(_PARAMS), dict(_ROLLOUT)
        for field, in_params in more:
            (params if in_params else top)[field] = attribute_of(field, in_params)
        outputs = (str | list[output] | None | UnsetType, UNSET)  # type: ignore[valid-type]
        params_type = _struct("Params", params, {"input": (str | list[Item] | None,)})
        response_type = _struct("Response", {"output": "output"}, {"output": outputs})
        types = {
            "responses_create_params": (msgspec.Raw if raw_params else params_type,),
            "output": outputs,
            "response": (response_type | None, None),
            "task_index": _TASK,
        }
        self._type = _struct("Rollout", top, types)
        self._decode = msgspec.json.Decoder(self._type).decode
        self._decode_params = msgspec.json.Decoder(params_type).decode
        self._raw_params = raw_params

    def __call__(self, line: bytes) -> Any:
        """Parse a line. Raises BadRow."""
        try:
            if not line.isascii():
                line.decode()  # the decoder does not check fields that it skips
            return self._decode(line)
        except UnicodeDecodeError as error:
            raise BadRow(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
        except (msgspec.DecodeError, RecursionError):
            return self._parse_leniently(line)

    def params(self, raw: bytes) -> Any:
        """Parse `responses_create_params` that was left as JSON. Raises BadRow."""
        try:
            return self._decode_params(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRow(f"responses_create_params: {error}") from error

    def _parse_leniently(self, line: bytes) -> Any:
        """Parse a line that the strict parser rejects but that may be usable: NaN and infinities in fields that are not
        needed (the log-probs), a verifier's own `output` or `response` beside the one that counts, items nested by
        turn."""
        try:
            row = json.loads(line.decode())
        except json.JSONDecodeError as error:
            raise BadRow(f"not JSON ({error.msg}, column {error.colno})") from error
        except RecursionError as error:
            raise BadRow("not usable JSON (nested too deeply)") from error
        except ValueError as error:
            raise BadRow(f"not usable JSON ({str(error).partition(';')[0]})") from error
        try:
            return msgspec.convert(self._tidy(row) if isinstance(row, dict) else row, self._type)
        except msgspec.ValidationError as error:
            raise BadRow(str(error)) from error
        except RecursionError as error:
            raise BadRow("not usable JSON (nested too deeply)") from error

    def _tidy(self, row: dict[str, Any]) -> dict[str, Any]:
        response = row.get("response")
        if isinstance(response, dict) and response.get("output") is not None:
            row = {**row, "output": None, "response": {**response, "output": _flat(response["output"])}}
        elif "output" in row:
            row = {**row, "output": _flat(row["output"]), "response": response if isinstance(response, dict) else None}
        params = row.get("responses_create_params")
        if isinstance(params, dict) and "input" in params:
            params = {**params, "input": _flat(params["input"])}
        if "responses_create_params" in row:
            row["responses_create_params"] = msgspec.Raw(encode(params)) if self._raw_params else params
        return row


def _struct(name: str, fields: dict[str, str], types: dict[str, tuple[Any, ...]]) -> type[Struct]:
    """Define a type with the attributes `fields` (by JSON name). Each is optional and of any type unless in `types`."""
    attributes = [(attribute, *types.get(attribute, _OPTIONAL)) for attribute in fields.values()]
    return msgspec.defstruct(name, attributes, rename={name: field for field, name in fields.items()}, gc=False)


def _flat(items: Any) -> Any:
    """Flatten a list of items; some agents nest the items of a turn in a list."""
    if not isinstance(items, list) or not any(isinstance(item, list) for item in items):
        return items
    return [one for item in items for one in (item if isinstance(item, list) else [item])]


def input_items(params: Any) -> list[Item]:
    """Return the input items of a rollout's `responses_create_params`."""
    return _as_items(params.input, "user")


def output_items(rollout: Any) -> list[Any]:
    """Return the items, of the parser's output type, of `response.output`, else of `output`, which may be a field
    of the verifier. Null is an empty output. Raises BadRow where there is neither."""
    response = rollout.response
    if response is not None and response.output is not UNSET and response.output is not None:
        return _as_items(response.output, "assistant")
    if rollout.output is UNSET:
        if response is None or response.output is UNSET:
            raise BadRow("it has neither 'response.output' nor 'output'")
        return []
    return _as_items(rollout.output, "assistant")


def _as_items(items: Any, role: str) -> list[Any]:
    if type(items) is list:
        return items
    return [Item(type="message", role=role, content=items)] if isinstance(items, str) else []


def reward_of(rollout: Any) -> float | None:
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


def kind_of(value: Any) -> str:
    """Return the name of a value's JSON type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def text_of(content: Any) -> str:
    """Return the text of all parts of a message's content; images and files have none. Raises BadRow."""
    if type(content) is str:
        return content
    if content is None:
        return ""
    if type(content) is not list:
        raise BadRow(f"a message's content must be text or a list of parts, got {kind_of(content)}")
    return part_text(content[0]) if len(content) == 1 else "".join([part_text(part) for part in content])


def part_text(part: Any) -> str:
    """Return the text of one part. Raises BadRow."""
    if type(part) is str:
        return part
    if type(part) is not dict:
        raise BadRow(f"a part of a message's content must be text or an object, got {kind_of(part)}")
    text = part.get("text")
    if text is None:
        text = part.get("refusal")
    if type(text) is str:
        return text
    if text is not None:
        raise BadRow(f"the text of a part must be text, got {kind_of(text)}")
    return ""


def last_user_text(items: Sequence[Item]) -> str:
    """Return the user's last text; empty where there is no user's message."""
    for item in reversed(items):
        if item.role == "user" and item.is_message:
            return text_of(item.content)
    return ""


def final_text(items: Sequence[AnyItem]) -> str:
    """Return the text of the agent's last message."""
    for item in reversed(items):
        kind, role = item.type, item.role
        if (kind == "message" and role in ("assistant", None)) or (kind is None and role == "assistant"):
            return text_of(item.content)
    return ""


def is_plain(items: Sequence[AnyItem]) -> bool:
    """Return whether the items are one message with text parts only, so that its text loses nothing."""
    if len(items) != 1:
        return False
    content = items[0].content
    if not isinstance(content, list):
        return True
    return all(isinstance(part, str) or "text" in part or "refusal" in part for part in content)


_encode = msgspec.json.Encoder().encode


def encode(row: Any) -> bytes:
    """Encode as JSON in UTF-8. Raises BadRow where a text is not valid Unicode."""
    try:
        return _encode(row)
    except UnicodeEncodeError as error:
        raise BadRow(f"a text that is not Unicode: half a surrogate pair at character {error.start}") from error
    except RecursionError as error:
        raise BadRow("nested too deeply") from error
