"""A sample that an environment's agent generates: what is asked for, the policy's calls in it, and the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_mcore.rollout.trajectory import Score, Trajectory, Turn, fingerprint


@dataclass(frozen=True)
class AgentOutcome:
    """The outcome of one rollout. `trajectory`: None if it failed; `score` says why. `result`: the agent's reply, if
    `keep_results` was set."""

    uid: str
    generation_index: int
    trajectory: Trajectory | None
    score: Score
    result: Any = None


class AgentFailure(Exception):
    """A rollout that gives no reward to learn from. `again`: another attempt may succeed, after `wait_s` at the
    earliest. `kind`: "STAGE: KIND", as it is counted."""

    def __init__(self, reason: str, again: bool = False, wait_s: float = 0.0, kind: str = "") -> None:
        super().__init__(reason)
        self.again, self.wait_s, self.kind = again, wait_s, kind


@dataclass(frozen=True)
class ModelCall:
    """One call of the policy, from an item of the output: the whole prompt, and the generated tokens."""

    prompt: list[int]
    generated: list[int]
    logprobs: list[float]
    text: str
    flag: str = ""
    """Fault of its messages: one of rollout.trajectory.FLAGS, or ""."""
    number: int = 0
    """Number of the call in the rollout."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    def continues(self, other: ModelCall) -> bool:
        """Return whether its prompt begins with all tokens of the other call."""
        return self.prompt[: len(other.tokens)] == other.tokens


@dataclass(frozen=True)
class AgentSample:
    """The calls of a rollout and its score. `branches`: in each, the prompt of a call begins with all tokens of the
    call before it."""

    branches: tuple[tuple[ModelCall, ...], ...]
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
            turn_numbers=tuple(call.number for call, _ in calls) if len(branches) > 1 else (),
        )


def branches_of(calls: Sequence[ModelCall]) -> list[list[ModelCall]]:
    """Return the branches. A call continues the newest one that its prompt begins with, or else opens a new one."""
    branches: list[list[ModelCall]] = []
    for call in calls:
        branch = next((branch for branch in reversed(branches) if call.continues(branch[-1])), [])
        if not branch:
            branches.append(branch)
        branch.append(call)
    return branches
