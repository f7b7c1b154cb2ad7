"""Reads the result of a NeMo Gym rollout as a trajectory, with the exact tokens that the policy's engines generated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_mcore.environments.agents.samples import AgentFailure, AgentSample, ModelCall, branches_of
from grpo_mcore.environments.gym.gym_penalties import THOUGHT_MARKS, TOOL_CALL_MARKS, RewardPenalties, flag_of, text_of
from grpo_mcore.environments.interfaces import turn_rewards
from grpo_mcore.rollout.messages import MessageError
from grpo_mcore.rollout.trajectory import FIRST_CONTENT, Score, fingerprint

FAILURE, NOT_KEPT, TERMINAL = "_ng_failure_class", "_ng_no_persist", "_ng_failure_terminal"


@dataclass(frozen=True)
class FormRules:
    """Checks of the form of a rollout: marks of tool calls and reasoning in its messages, and the faults that make its
    reward 0."""

    tool_marks: Sequence[str] = TOOL_CALL_MARKS
    thought_marks: Sequence[str] = THOUGHT_MARKS
    penalties: RewardPenalties = field(default_factory=RewardPenalties)


def read_result(result: Any, seconds: float, form: FormRules = FormRules()) -> AgentSample:
    """Read the reply of the agent's /run. Raises AgentFailure."""
    if not isinstance(result, dict):
        raise AgentFailure(f"the Gym's result is not an object, but {type(result).__name__}")
    if result.get(FAILURE) is not None:
        final = bool(result.get(TERMINAL))
        raise AgentFailure(f"the Gym says {result[FAILURE]!r}", again=not final)
    if result.get(NOT_KEPT):
        raise AgentFailure("the Gym says that the rollout was killed", again=True)
    if reason := result.get("failure_reason"):
        raise AgentFailure(f"the Gym says {reason!r:.200} (failure_reason)")
    if result.get("mask_sample"):
        raise AgentFailure("the Gym says that it must not be trained on (mask_sample)")
    response = result.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(response, dict) or not isinstance(output, list):
        raise AgentFailure("the Gym's result has no response.output")
    reward = _number(result.get("reward"))
    if reward is None:
        raise AgentFailure(f"the Gym's reward is {result.get('reward')!r}")
    try:
        calls, prompt_text = _calls(output, form), _prompt_text(result)
        broken = form.penalties.broken(output, [(call.prompt, call.generated) for call in calls], form.thought_marks)
    except MessageError as error:
        raise AgentFailure(f"the Gym's result is malformed: {error}") from error
    if not calls:
        raise AgentFailure(
            "no item of the output has generation_token_ids: set return_token_id_information for the Gym's model server"
        )
    branches = branches_of(calls)
    truncated = response.get("status") == "incomplete" or bool(response.get("incomplete_details"))
    turns = f"{len(calls)} turns" + (f" in {len(branches)} branches" if len(branches) > 1 else "")
    if broken:
        turns, reward = f"{turns}; penalised: {', '.join(broken)}; its reward was {reward:g}", 0.0
    try:
        by_turn = turn_rewards(result.get("turn_rewards"), len(calls))
    except (TypeError, ValueError) as error:
        raise AgentFailure(f"the Gym's result has {error}") from error
    states = ("", *(fingerprint(call.prompt) for call in calls[1:]))
    score = Score(reward, calls[-1].text, turns, seconds, _parts(result), turn_rewards=by_turn, turn_states=states)
    return AgentSample(tuple(map(tuple, branches)), truncated, score, prompt_text)


def _calls(output: Sequence[Any], form: FormRules) -> list[ModelCall]:
    calls: list[ModelCall] = []
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
            raise AgentFailure(f"generation_log_probs must have one entry for each of the {len(generated)} tokens")
        numbers = [_number(value) for value in logprobs]
        if None in numbers:
            raise AgentFailure(f"a log-prob is {logprobs[numbers.index(None)]!r}")
        flag = flag_of(messages, form.tool_marks, form.thought_marks)
        known = [value for value in numbers if value is not None]
        calls.append(ModelCall(prompt, generated, known, text, flag, len(calls)))
        text, messages = "", []
    return calls


def _ids(item: Mapping[str, Any], name: str) -> list[int]:
    ids, least = item.get(name), FIRST_CONTENT if name == "prompt_token_ids" else 0
    if not isinstance(ids, list) or not ids or not all(type(token) is int and least <= token < 2**31 for token in ids):
        raise AgentFailure(f"{name} is not a list of token ids")
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
