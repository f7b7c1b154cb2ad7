"""Reads the result of a NeMo Gym rollout as a trajectory, with the exact tokens that the policy's engines generated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_mcore.environments.gym.gym_penalties import THOUGHT_MARKS, TOOL_CALL_MARKS, RewardPenalties, flag_of, text_of
from grpo_mcore.rollout.trajectory import Score, Trajectory, Turn, fingerprint

FAILURE, NOT_KEPT, TERMINAL = "_ng_failure_class", "_ng_no_persist", "_ng_failure_terminal"


class GymFailure(Exception):
    """A rollout that gives no reward to learn from. `again`: another attempt may succeed, after `wait_s` at the
    earliest."""

    def __init__(self, reason: str, again: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.again, self.wait_s = again, wait_s


@dataclass(frozen=True)
class ModelCall:
    """One call of the policy, from an item of the output: the whole prompt, and the generated tokens."""

    prompt: list[int]
    generated: list[int]
    logprobs: list[float]
    text: str
    flag: str = ""
    """Fault of its messages: one of rollout.trajectory.FLAGS, or ""."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    def continues(self, other: ModelCall) -> bool:
        """Return whether its prompt begins with all tokens of the other call."""
        return self.prompt[: len(other.tokens)] == other.tokens


@dataclass(frozen=True)
class GymRollout:
    """The calls of a rollout and its score. `branches`: in each, the prompt of a call begins with all tokens of the
    call before it. `cut_calls`: number of further calls, which are left out."""

    branches: tuple[tuple[ModelCall, ...], ...]
    cut_calls: int
    truncated: bool
    score: Score
    prompt_text: str

    def fingerprints(self) -> list[str]:
        """Return the fingerprint of each call's tokens, by which the endpoint that generated them knows them."""
        return [fingerprint(call.tokens) for branch in self.branches for call in branch]

    def trajectory(
        self, uid: str, generation_index: int, weight_versions: Sequence[Sequence[Sequence[int]]]
    ) -> Trajectory:
        """Build the trajectory. `weight_versions`: spans of (version, first, last) for each call, from the endpoint."""
        turns: list[Turn] = []
        spans: list[tuple[int, int, int]] = []
        branches: list[int] = []  # tokens of each so far
        calls = [(call, not number) for branch in self.branches for number, call in enumerate(branch)]
        for (call, opens), versions in zip(calls, weight_versions, strict=True):
            if opens:
                branches.append(0)
            start, length = sum(branches[:-1]), branches[-1]
            added = torch.tensor(call.prompt[length:], dtype=torch.int64)
            turns.append(Turn("environment" if length else "user", added, text="" if turns else self.prompt_text))
            turns.append(
                Turn(
                    "assistant",
                    torch.tensor(call.generated, dtype=torch.int64),
                    torch.tensor(call.logprobs, dtype=torch.float32),
                    loss_mask=True,
                    text=call.text,
                    flag=call.flag,
                )
            )
            for version, first, last in versions:
                if max(first, length) >= last:
                    continue
                begin = spans.pop()[1] if spans and spans[-1][0] == version else start + max(first, length)
                spans.append((version, begin, start + last))
            branches[-1] = len(call.tokens)
        return Trajectory(
            uid=uid,
            generation_index=generation_index,
            turns=tuple(turn for turn in turns if len(turn)),
            weight_versions=tuple(spans),
            finish_reason="length" if self.truncated else "stop",
            truncated=self.truncated,
            branches=tuple(branches) if len(branches) > 1 else (),
        )


@dataclass(frozen=True)
class FormRules:
    """Checks of the form of a rollout: marks of tool calls and reasoning in its messages, and the faults that make its
    reward 0."""

    tool_marks: Sequence[str] = TOOL_CALL_MARKS
    thought_marks: Sequence[str] = THOUGHT_MARKS
    penalties: RewardPenalties = field(default_factory=RewardPenalties)


def read_result(
    result: Any, seconds: float, max_tokens: int | None = None, form: FormRules = FormRules()
) -> GymRollout:
    """Read the reply of the agent's /run, up to `max_tokens` tokens of all branches. Raises GymFailure."""
    if not isinstance(result, dict):
        raise GymFailure(f"the Gym's result is not an object, but {type(result).__name__}")
    if FAILURE in result:
        final = bool(result.get(TERMINAL))
        raise GymFailure(f"the Gym says {result[FAILURE]!r}", again=not final)
    if result.get(NOT_KEPT):
        raise GymFailure("the Gym says that the rollout was killed", again=True)
    if result.get("mask_sample"):
        raise GymFailure("the Gym says that it must not be trained on (mask_sample)")
    response = result.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(response, dict) or not isinstance(output, list):
        raise GymFailure("the Gym's result has no response.output")
    reward = _number(result.get("reward"))
    if reward is None:
        raise GymFailure(f"the Gym's reward is {result.get('reward')!r}")
    calls = _calls(output, form)
    if not calls:
        raise GymFailure(
            "no item of the output has generation_token_ids: set return_token_id_information for the Gym's model server"
        )
    branches, kept = _branches(calls, max_tokens)
    details = response.get("incomplete_details")
    stopped_by = details.get("reason") if isinstance(details, dict) else None
    cut = len(calls) - kept
    turns = f"{kept} turns" + (f" in {len(branches)} branches" if len(branches) > 1 else "")
    turns += f", {cut} more for which there is no room are cut off" if cut else ""
    if broken := form.penalties.broken(output, [(call.prompt, call.generated) for call in calls], form.thought_marks):
        turns, reward = f"{turns}; penalised: {', '.join(broken)}; its reward was {reward:g}", 0.0
    score = Score(reward, calls[kept - 1].text, turns, seconds, _parts(result))
    return GymRollout(
        tuple(map(tuple, branches)), cut, stopped_by == "max_output_tokens" and not cut, score, _prompt_text(result)
    )


def _calls(output: Sequence[Any], form: FormRules) -> list[ModelCall]:
    calls = []
    messages: list[str] = []  # those since the last call
    text = ""
    for item in (part for entry in output for part in (entry if isinstance(entry, list) else [entry])):
        if not isinstance(item, dict):
            continue
        text += _text(item)
        if item.get("type", "message") == "message" and item.get("role") == "assistant":
            messages.append(text_of(item.get("content")))
        if not item.get("generation_token_ids"):
            continue
        prompt = _ids(item, "prompt_token_ids")
        generated = _ids(item, "generation_token_ids")
        logprobs = item.get("generation_log_probs")
        if not isinstance(logprobs, list) or len(logprobs) != len(generated):
            raise GymFailure(f"generation_log_probs must have one entry for each of the {len(generated)} tokens")
        numbers = [_number(value) for value in logprobs]
        if None in numbers:
            raise GymFailure(f"a log-prob is {logprobs[numbers.index(None)]!r}")
        flag = flag_of(messages, form.tool_marks, form.thought_marks)
        calls.append(ModelCall(prompt, generated, [value for value in numbers if value is not None], text, flag))
        text, messages = "", []
    return calls


def _branches(calls: Sequence[ModelCall], max_tokens: int | None) -> tuple[list[list[ModelCall]], int]:
    """Return the branches, and the number of calls in them. Calls are taken in order while there is room for all
    tokens. A call continues the newest branch that its prompt begins with, or else opens a new one."""
    branches: list[list[ModelCall]] = []
    tokens = 0
    for number, call in enumerate(calls):
        branch = next((branch for branch in reversed(branches) if call.continues(branch[-1])), [])
        tokens += len(call.tokens) - (len(branch[-1].tokens) if branch else 0)
        if number and max_tokens is not None and tokens > max_tokens:
            return branches, number
        if not branch:
            branches.append(branch)
        branch.append(call)
    return branches, len(calls)


def _ids(item: Mapping[str, Any], name: str) -> list[int]:
    ids = item.get(name)
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise GymFailure(f"{name} is not a list of token ids")
    return ids


def _number(value: Any) -> float | None:
    """Return a finite number as a float, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that is larger than all floats
        return None


def _parts(result: Mapping[str, Any]) -> dict[str, float]:
    """Return those `reward_components` that are numbers."""
    parts = result.get("reward_components")
    numbers = {str(name): _number(value) for name, value in parts.items()} if isinstance(parts, dict) else {}
    return {name: value for name, value in numbers.items() if value is not None}


def _text(item: Mapping[str, Any]) -> str:
    """Return the policy's text of an item, for people to read."""
    if item.get("type") == "function_call":
        return f"{item.get('name')}({item.get('arguments')})"
    if item.get("role") != "assistant":
        return ""
    return text_of(item.get("content"))


def _prompt_text(result: Mapping[str, Any]) -> str:
    params = result.get("responses_create_params")
    prompt = params.get("input") if isinstance(params, dict) else None
    if isinstance(prompt, list):
        return "\n".join(text_of(item.get("content")) for item in prompt if isinstance(item, dict))
    return prompt if isinstance(prompt, str) else ""
