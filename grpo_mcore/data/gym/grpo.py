"""Conversion of rollouts to prompts for GRPO: {"input", "output", "ground_truth"}."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_mcore.data.gym.rollout import (
    ROUNDING,
    Filtered,
    Item,
    Params,
    Rollout,
    encode,
    final_text,
    input_items,
    is_plain,
    last_user_text,
    output_items,
)
from grpo_mcore.data.gym.run import transformation
from grpo_mcore.data.gym.summary import Summary
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.rollout.messages import ItemReader, read_tools, with_instructions

_PARAMS = "responses_create_params"
USUAL_PLACES = (
    f"{_PARAMS}.ground_truth",
    f"{_PARAMS}.metadata.ground_truth",
    f"{_PARAMS}.metadata.answer",
    f"{_PARAMS}.metadata.expected_answer",
    "ground_truth",
    "expected_answer",
    "verifier_metadata.ground_truth",
    "verifier_metadata.expected_answer",
    "reference_answer",
)
"""Places of the ground truth, in the order in which they are searched. Fields that may hold the policy's answer
(`answer`, `extracted_answer`) are not among them."""
NO_TRUTH_AT_ALL = "no row has a ground truth to score answers by; --ground_truth_key names its field"
NO_QUESTION = "no text of a user in the input"
NO_ANSWER = "no text in the agent's last message"
CONTEXT_LEFT_OUT = "the input has more than the user's last text (--prompt_format messages keeps all of it)"


def gym_to_grpo(
    source: Path,
    target: Path,
    *,
    reward_threshold: float = 0.0,
    ground_truth: bool = True,
    ground_truth_keys: Sequence[str] = (),
    prompt_format: str = "text",
    strict: bool = False,
) -> Summary:
    """Convert the rollouts with a reward of at least `reward_threshold`; 0 keeps all, negative rewards included. A
    rollout without a reward counts as 0. `ground_truth_keys` are searched before USUAL_PLACES.
    `prompt_format` is that of `prompt_of`. Nothing is written where no row is kept. Raises DataError."""
    places = [*map(_place, dict.fromkeys((*ground_truth_keys, *USUAL_PLACES)))] if ground_truth else []
    too_low = f"reward below {reward_threshold:g}"
    with transformation(source, target, strict=strict) as run:
        summary = run.summary
        summary.without_ground_truth = 0 if ground_truth else None
        prompt = prompt_of(prompt_format, "input")

        def handle(rollout: Rollout, reward: float | None) -> bytes:
            if reward_threshold != 0 and (reward or 0.0) < reward_threshold - ROUNDING:
                raise Filtered(too_low)
            answer = final_text(output_items(rollout))
            truth = _find(rollout.row, places)
            if not answer.strip() and truth is None:
                raise Filtered(NO_ANSWER + ", and no ground truth")
            params = rollout.responses_create_params
            row, whole = prompt(params, input_items(params))
            row["output"] = answer
            if truth is not None:
                row["ground_truth"] = truth[0]
            line = encode(row)
            if truth is not None:
                summary.ground_truth_from[truth[1]] += 1
            elif summary.without_ground_truth is not None:
                summary.without_ground_truth += 1
            if not whole:
                summary.notes[CONTEXT_LEFT_OUT] += 1
            return line

        run.each(handle)
        if ground_truth and 0 < summary.kept == summary.without_ground_truth:
            summary.notes[NO_TRUTH_AT_ALL] = summary.kept
    return summary


def _place(name: str) -> tuple[str, list[str]]:
    """Return a dotted path and its keys. Raises DataError where it cannot name a ground truth."""
    keys = name.split(".")
    if not all(keys) or keys == [_PARAMS]:
        raise DataError(f"the ground truth's key {name!r} is not a path such as expected_answer or metadata.answer")
    if keys[0] in ("response", "output", "reward"):
        raise DataError(f"the ground truth's key {name!r} is part of what the policy did, not of the task")
    return name, keys


def _find(row: dict[str, Any], places: Sequence[tuple[str, list[str]]]) -> tuple[Any, str] | None:
    """Return (ground truth, name of its place), or None where no place holds one. Null and blank text do not count as a
    ground truth; 0 and false do."""
    for name, keys in places:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and value == value and not (isinstance(value, str) and not value.strip()):
            return value, name
    return None


def prompt_of(prompt_format: str, key: str) -> Callable[[Params, list[Item]], tuple[dict[str, Any], bool]]:
    """Return a function (a rollout's parameters, its input) -> ({key: prompt}, whether that is the whole input). The
    prompt is the user's last text ("text"), or the whole input as chat messages with its `tools` ("messages"). The
    function raises Filtered where there is no question."""

    def text(params: Params, items: list[Item]) -> tuple[dict[str, Any], bool]:
        question = last_user_text(items)
        if not question.strip():
            raise Filtered(NO_QUESTION)
        return {key: question}, is_plain(items) and not params.instructions

    def messages(params: Params, items: list[Item]) -> tuple[dict[str, Any], bool]:
        chat = with_instructions(ItemReader().read(items), params.instructions)
        if not any(message["role"] == "user" and message["content"] for message in chat):
            raise Filtered(NO_QUESTION)
        row: dict[str, Any] = {key: chat}
        if tools := read_tools(params.tools, "tools"):
            row["tools"] = tools
        return row, True

    return text if prompt_format == "text" else messages
