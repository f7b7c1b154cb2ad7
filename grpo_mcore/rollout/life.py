"""The life of a sample, as one function that reads top to bottom: `life_of`. Pure.

    queued --> generating --> scoring --> done      the environment ended it, or no turn or room is left
      ^                          |
      |                          +------> failed    no reward: the environment failed, or the engine aborted it
      |                          |
      +--------------------------+                  the environment has answered: the next turn

    running --> done, or failed                     agents of its environment take all turns and score them

It yields what the sample waits for, and is resumed with the result. How waits become calls, and what is asked again
because an engine or an environment failed, is the business of the queues in `driver/rollouts/`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.trajectory import (
    AgentRequest,
    GenerationRequest,
    Outcome,
    Sampling,
    Score,
    TrajectoryRef,
    Turn,
    sample_seed,
)


@dataclass(frozen=True)
class TurnLimits:
    """`max_turns`: generated turns of a sample. `max_model_len`: tokens of the context, all turns together.
    `together`: the samples of one step on one engine take their turns together, and groups are scored whole; otherwise
    no sample waits for another one."""

    max_turns: int
    max_model_len: int
    together: bool = False


@dataclass(frozen=True)
class Rules:
    """Settings that all lives share. `seed`: grpo.seed. `as_turn`: makes an environment's message into a turn, from
    (prompt, text or parts, role, token that ended the turn before), with references to its images by digest; None where
    samples have one turn."""

    limits: TurnLimits
    seed: int
    as_turn: Callable[[DatumSpec, Any, str, int | None], tuple[Turn, Mapping[str, Any]]] | None = None


@dataclass(eq=False, slots=True)
class ScoreTurn:
    """Wait for the Outcome of a trajectory's last turn. `metadata`: what the environment gets with it. `is_last`: no
    turn can follow."""

    trajectory: TrajectoryRef
    metadata: dict[str, Any]
    is_last: bool


Wait = GenerationRequest | ScoreTurn | AgentRequest
"""Request that a life yields and waits for. That of a GenerationRequest results in the TrajectoryRef of all turns, that
of an AgentRequest in the sample and its score."""
Life = Generator[Wait, Any, tuple[TrajectoryRef, Score]]


def life_of(group: OpenGroup, index: int) -> Life:
    """Yield what sample `index` of a group waits for, one after the other; return the finished sample and its score."""
    uid, prompt, limits = group.uid, group.prompt, group.rules.limits
    seed = sample_seed(group.rules.seed, group.step, uid, index)
    if group.has_agents:
        task = prompt["extra_env_info"].get("agent_task")
        return (yield AgentRequest(uid, index, task, prompt["idx"], seed))
    metadata, stop_strings = prompt["extra_env_info"], tuple(prompt.get("stop_strings") or ())
    if limits.max_turns > 1:  # an environment may keep each sample's state in its metadata
        metadata = copy.deepcopy(metadata)
    score: Score | None = None
    images = group.images
    request = GenerationRequest(uid, index, group.turns, seed, stop_strings, images=images)
    while True:
        trajectory: TrajectoryRef = yield request  # queued, then generating
        if images:
            trajectory = replace(trajectory, images=images)
        outcome: Outcome = yield ScoreTurn(trajectory, metadata, trajectory.turns == limits.max_turns)  # scoring
        outcome = _checked(trajectory, outcome)
        no_turn_left = trajectory.truncated or trajectory.turns >= limits.max_turns
        over = outcome.terminated or outcome.reward is None or no_turn_left
        if not over and outcome.observation is None:
            silence = f"after turn {trajectory.turns} the environment neither ended the conversation nor said anything"
            reason = f"{silence}; return terminated, or an observation with its content"
            outcome, over = replace(outcome, reward=None, reason=reason), True
        score = _with_turn(score, outcome)
        if over:
            return trajectory, score  # done, or failed
        if outcome.metadata is not None:
            metadata = outcome.metadata
        if outcome.stop_strings is not None:
            stop_strings = outcome.stop_strings
        assert group.rules.as_turn is not None and outcome.observation is not None
        try:
            answer, further = group.rules.as_turn(prompt, outcome.observation, outcome.role, trajectory.stop_token)
        except ValueError as error:  # an image in it that the model cannot read
            return trajectory, replace(score, reward=None, reason=f"the environment's answer: {error}")
        images = {**images, **further}
        if trajectory.length + len(answer) >= limits.max_model_len:
            return replace(trajectory, truncated=True, finish_reason="length"), score
        seed = sample_seed(group.rules.seed, group.step, uid, index, trajectory.turns)
        request = GenerationRequest(uid, index, (answer,), seed, stop_strings, continues=trajectory.ref, images=images)


def _checked(trajectory: TrajectoryRef, outcome: Outcome) -> Outcome:
    """Return the outcome, without its reward if the sample was aborted or the reward is not a finite number."""
    if trajectory.finish_reason == "abort":
        return replace(outcome, reward=None, reason="the engine aborted the sample")
    if outcome.reward is not None and not math.isfinite(outcome.reward):
        return replace(outcome, reward=None, reason=f"the environment's reward is {outcome.reward}")
    return outcome


def _with_turn(before: Score | None, outcome: Outcome) -> Score:
    """Add a turn's score to the sample's. A turn without a reward leaves the whole sample without one."""
    reward, by_name, seconds = outcome.reward, dict(outcome.rewards_by_name), outcome.seconds
    failures, turn_rewards, states = outcome.failures, outcome.turn_rewards, outcome.turn_states
    rewards: tuple[float, ...] = (0.0 if reward is None else reward,)
    if before is not None:
        seconds, failures = seconds + before.seconds, before.failures + failures
        states, rewards = before.turn_states + states, before.step_rewards + rewards
        pairs = zip_longest(before.turn_rewards, turn_rewards)  # a later call may score earlier turns
        turn_rewards = tuple(old if new is None else new for old, new in pairs)
        for name, value in before.rewards_by_name.items():
            by_name[name] = by_name.get(name, 0.0) + value
        if reward is not None and before.reward is not None:
            reward += before.reward
    return Score(
        reward, outcome.answer, outcome.reason, seconds, by_name, outcome.terminated, outcome.solved_at, failures,
        turn_rewards, states, rewards,
    )  # fmt: skip


@dataclass(eq=False)
class OpenGroup:
    """The samples of a prompt while they live, and what they share. `images`: references to the files of the prompt's
    images in the object store, by digest. `has_agents`: agents of the environment take all turns; otherwise `engine`
    generates them. `unfinished`: samples that are neither finished nor dropped."""

    prompt: DatumSpec
    step: int
    sampling: Sampling
    rules: Rules
    size: int
    images: dict[str, Any] = field(default_factory=dict)
    has_agents: bool = False
    engine: int = 0

    def __post_init__(self) -> None:
        self.uid, self.unfinished, prompt = self.prompt["uid"], self.size, self.prompt
        self.turns = tuple(
            Turn(message["role"], message["token_ids"], text=message["content"], images=message.get("images", ()))
            for message in prompt["message_log"]
        )
        self.load = self.size * (
            prompt["length"] + self.sampling.max_new_tokens
        )  # at most so many tokens in their first turns
        self.samples = [OpenSample(self, index) for index in range(self.size)]

    def close(self) -> list[OpenSample]:
        """Return the samples, and refer to them no more: they would be part of a cycle."""
        samples, self.samples = self.samples, []
        return samples


class OpenSample:
    """A sample under way: the same object in every queue. `wait`: what it waits for; None once it is finished or
    dropped, so that no result reaches it any more. `result`: the finished sample, its score, and when it was over."""

    __slots__ = ("group", "index", "key", "life", "result", "wait")

    def __init__(self, group: OpenGroup, index: int) -> None:
        self.group, self.index, self.key = group, index, (group.uid, index)
        self.result: tuple[TrajectoryRef, Score, float] | None = None
        self.begin()

    def begin(self) -> None:
        """Begin its life, or begin it again."""
        self.life = life_of(self.group, self.index)
        self.wait: Wait | None = next(self.life)

    def drop(self) -> None:
        """End its life before its time."""
        self.life.close()
        self.wait = None
