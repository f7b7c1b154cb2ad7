"""One sample's turns: its score so far, whether it goes on, and its next request. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Score, TrajectoryRef, Turn

_SAID_NOTHING = (
    "after turn {} the environment neither ended the conversation nor said anything; return terminated, or an "
    "observation with its content"
)


@dataclass(frozen=True)
class TurnLimits:
    """`max_turns`: generated turns of a sample. `max_model_len`: tokens of the context, all turns together.
    `max_tokens`: limit of all branches of a sample together, so that a training bin has room for it; None: no limit.
    `together`: the samples of one step on one engine take their turns together, and groups are scored whole; otherwise
    no sample waits for another one."""

    max_turns: int
    max_model_len: int
    max_tokens: int | None = None
    together: bool = False


@dataclass(slots=True)
class Conversation:
    """A sample under way. Its turn is generated and scored; then it is `over`, or its next turn is requested.

    `metadata` and `stop_strings` belong to the turn under way. `sample`: up to the last generated turn. `score`: over
    the turns scored so far, rewards added up. `ended_at`: when it was over, by the cluster's clock.
    """

    metadata: dict[str, Any]
    stop_strings: tuple[str, ...]
    sample: TrajectoryRef | None = None
    score: Score | None = None
    over: bool = False
    ended_at: float = 0.0

    def judged(self, outcome: Outcome, limits: TurnLimits) -> bool:
        """Add the score of the last turn. Return whether the sample goes on.

        It does not where the environment ended it or failed, the engine aborted it or cut it at a length limit, or no
        turn is left. Where it would and the environment says nothing, the environment has failed.
        """
        sample = self.sample
        assert sample is not None and not self.over, "a turn is scored once, after it was generated"
        checked = _checked(sample, outcome)
        self.over = checked.terminated or checked.reward is None or sample.truncated or sample.turns >= limits.max_turns
        if not self.over and outcome.observation is None:
            checked, self.over = replace(checked, reward=None, reason=_SAID_NOTHING.format(sample.turns)), True
        self.score = _added(self.score, checked)
        if self.over:
            return False
        if outcome.metadata is not None:
            self.metadata = outcome.metadata
        if outcome.stop_strings is not None:
            self.stop_strings = outcome.stop_strings
        return True

    def next_request(self, answer: Turn, seed: int, limits: TurnLimits) -> GenerationRequest | None:
        """Return the request for the next turn, after the environment's message `answer`. None if the context has no
        room for it: the sample is then over, and truncated."""
        sample = self.sample
        assert sample is not None and not self.over
        if sample.length + len(answer) >= limits.max_model_len:
            self.over = True
            self.sample = replace(sample, truncated=True, finish_reason="length")
            return None
        return GenerationRequest(
            sample.uid, sample.generation_index, (answer,), seed, self.stop_strings, continues=sample.ref
        )


def _checked(sample: TrajectoryRef, outcome: Outcome) -> Outcome:
    """Return the outcome, without its reward if the sample was aborted or the reward is not a finite number."""
    if sample.finish_reason == "abort":
        return replace(outcome, reward=None, reason="the engine aborted the sample")
    if outcome.reward is not None and not math.isfinite(outcome.reward):
        return replace(outcome, reward=None, reason=f"the environment's reward is {outcome.reward}")
    return outcome


def _added(before: Score | None, outcome: Outcome) -> Score:
    """Add a turn's score to the sample's. A turn without a reward leaves the whole sample without one."""
    reward, by_name, seconds = outcome.reward, dict(outcome.rewards_by_name), outcome.seconds
    failures = outcome.failures
    if before is not None:
        seconds, failures = seconds + before.seconds, before.failures + failures
        for name, value in before.rewards_by_name.items():
            by_name[name] = by_name.get(name, 0.0) + value
        if reward is not None and before.reward is not None:
            reward += before.reward
    return Score(
        reward, outcome.answer, outcome.reason, seconds, by_name, outcome.terminated, outcome.solved_at, failures
    )
