"""The interface of an environment: it reads conversations and returns observations, rewards and whether they end."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from grpo_mcore.environments.config import EnvConfig, EnvironmentConfigError
from grpo_mcore.rollout.trajectory import Outcome, Trajectory


class EnvironmentReturn(NamedTuple):
    """The results of one step. Every list has one entry per conversation.

    `observations`: {"role", "content"}, the environment's next message; the role `tool` is kept where the chat
    template has it, any other becomes `user`. `metadata`: passed to the next step; None: unchanged.
    `next_stop_strings`: of the next turn; None: unchanged. `terminateds`: whether the conversation is over.
    `rewards`: of this turn alone, a conversation's turns are added up; None where the environment failed (excluded
    and counted, never 0). `answers`: the extracted answer. `reasons`: why it got that reward. `seconds`: that scoring
    took. `rewards_by_name`: the parts of a reward that has several. `tracebacks`: text for the run's console, such as
    the first traceback of a function that raises.
    """

    observations: list[dict[str, str]]
    metadata: list[dict[str, Any] | None]
    next_stop_strings: list[list[str] | None]
    rewards: list[float | None]
    terminateds: list[bool]
    answers: list[str | None]
    reasons: list[str]
    seconds: list[float] | None = None
    rewards_by_name: list[dict[str, float]] | None = None
    tracebacks: Sequence[str | None] | None = None


def single_turn_return(
    metadata: Sequence[dict[str, Any]],
    rewards: Sequence[float | None],
    reasons: Sequence[str],
    seconds: Sequence[float],
    *,
    answers: Sequence[str | None] | None = None,
    stop_strings: list[str] | None = None,
    rewards_by_name: list[dict[str, float]] | None = None,
    tracebacks: Sequence[str | None] | None = None,
) -> EnvironmentReturn:
    """Return the results of a step that ends every conversation. The observation is the reason."""
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": f"Environment: {reason}"} for reason in reasons],
        metadata=list(metadata),
        next_stop_strings=[stop_strings] * len(rewards),
        rewards=list(rewards),
        terminateds=[True] * len(rewards),
        answers=[None] * len(rewards) if answers is None else list(answers),
        reasons=list(reasons),
        seconds=list(seconds),
        rewards_by_name=rewards_by_name,
        tracebacks=tracebacks,
    )


class EnvironmentBase:
    """The base of all environments, built from a recipe's section `env.<name>`. Several threads may use an instance."""

    needs: ClassVar[dict[str, float]] = {"cpus": 1.0, "gpus": 0.0}
    """Processors and accelerators that one instance needs."""
    concurrent_calls: ClassVar[int] = 1
    """Maximum concurrent calls of one instance, each in a thread, where the instance is a cluster worker."""
    config_class: ClassVar[type[EnvConfig] | None] = None
    """The type of `config`. None: a dict with any keys."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: Any = self.read_config(config or {})

    @classmethod
    def play_timeout_s(cls, config: Mapping[str, Any]) -> float | None:
        """Return the longest time, in seconds, that an environment may work on a sample that it plays itself, as a NeMo
        Gym does. None: the environment scores turns of our own rollouts."""
        return None

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Any:
        """Return a recipe's section in the form of `config`. Raises EnvironmentConfigError that names the key."""
        return dict(config) if cls.config_class is None else cls.config_class.read(config)

    @classmethod
    def resources(cls, config: Mapping[str, Any]) -> dict[str, float]:
        """Return what an instance with this section needs of the cluster: {"cpus", "gpus"}. Raises
        EnvironmentConfigError where the section is wrong, before anything is started."""
        cls.read_config(config)
        return dict(cls.needs)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        """Raise EnvironmentConfigError where an instance with this section could not be built. Quick: called before
        anything is started."""
        cls.read_config(config)

    @classmethod
    def check_row(cls, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Raise EnvironmentConfigError where answers to a prompt with the fields `info`, its `extra_env_info`, could
        not be scored. Called as `check` is, with the first row of a dataset."""

    @classmethod
    def remote(cls, config: Mapping[str, Any] | None = None) -> RemoteEnvironment:
        """Return this environment as an actor of the run's cluster, for `task_to_env`."""
        return RemoteEnvironment(cls, config or {})

    @property
    def solved_at(self) -> float | None:
        """Reward from which on a sample counts as solved: the key `solved_at` of the section. None: not set."""
        config = getattr(self, "config", None)  # a class that does not call our constructor has none
        return config.solved_at if isinstance(config, EnvConfig) else (config or {}).get("solved_at")

    def shutdown(self) -> None:
        """Free what the environment holds. It is not used afterwards."""


class RemoteEnvironment:
    """An environment that runs as an actor of the run's cluster. It is started when a loop first uses it; a wrong
    configuration is an EnvironmentConfigError at once."""

    def __init__(self, cls: type[EnvironmentBase], config: Mapping[str, Any]) -> None:
        cls.check(config)
        if cls.play_timeout_s(config) is not None:
            raise EnvironmentConfigError(
                f"{cls.__name__} plays whole samples itself: name it in the recipe's section env"
            )
        self.cls, self.config = cls, dict(config)
        self.workers: dict[int, Any] = {}
        """The worker on each cluster that it was started on, by the cluster's id."""


class EnvironmentInterface(EnvironmentBase, ABC):
    """Scores the samples that the engines generate, turn by turn."""

    @abstractmethod
    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        """Return the environment's answer to each conversation. `message_log_batch[i]`: the messages {"role",
        "content"} so far; `metadata[i]`: the prompt's `extra_env_info`, or what the last step returned for it."""

    def advance(self, metadata: Sequence[dict[str, Any]], *trajectories: Trajectory) -> list[Outcome]:
        """Call `step` on these trajectories and return the outcomes of their last turns, in order. Trajectories are
        separate arguments so that the cluster resolves object references in their place."""
        if len(metadata) != len(trajectories):
            raise ValueError(f"advance: {len(metadata)} metadata for {len(trajectories)} trajectories")
        start = time.perf_counter()
        result = self.step([conversation(trajectory) for trajectory in trajectories], metadata)
        if len(result.rewards) != len(trajectories):
            raise ValueError(f"step returned {len(result.rewards)} rewards for {len(trajectories)} conversations")
        mean_seconds = (time.perf_counter() - start) / max(len(trajectories), 1)
        seconds = result.seconds or [mean_seconds] * len(trajectories)
        by_name = result.rewards_by_name or [{} for _ in trajectories]
        checked = [_checked(*one) for one in zip(result.rewards, by_name, result.reasons, strict=True)]
        return [
            Outcome(
                reward=reward,
                answer=answer,
                reason=reason,
                seconds=taken,
                rewards_by_name=parts,
                terminated=bool(terminated),
                solved_at=self.solved_at,
                observation=_text_or_none(message.get("content"), "an observation's content"),
                role=message.get("role", "user"),
                stop_strings=None if stops is None else tuple(stops),
                metadata=state,
                traceback=traceback,
            )
            for (reward, parts, reason), answer, taken, terminated, message, stops, state, traceback in zip(
                checked,
                result.answers,
                seconds,
                result.terminateds,
                result.observations,
                result.next_stop_strings,
                result.metadata,
                result.tracebacks or [None] * len(trajectories),
                strict=True,
            )
        ]

    def global_post_process_and_metrics(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return metrics over a whole batch of samples. `batch` has the columns `rewards` and `uid`."""
        return {}


def _checked(reward: Any, parts: Mapping[str, Any], reason: str) -> tuple[float | None, dict[str, float], str]:
    """Return a reward, its parts and its reason; no reward where one of the numbers is not finite, or not a number."""
    try:
        total = None if reward is None else _finite(reward)
        return total, {name: _finite(value) for name, value in parts.items()}, reason
    except (TypeError, ValueError, ArithmeticError) as error:
        return None, {}, f"the environment's reward is not a finite number: {error}"


def _finite(value: Any) -> float:
    if isinstance(value, str | bytes) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80}")
    return float(value)


def _text_or_none(value: Any, what: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{what} must be text or None, and is {type(value).__name__}")


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return a trajectory as messages. `generated` marks those that the policy wrote, which have their `token_ids`;
    `tokens` is the number of tokens of each; the last one has the sample's `finish_reason`."""
    messages: list[dict[str, Any]] = [
        {"role": turn.role, "content": turn.text, "generated": turn.loss_mask, "tokens": len(turn)}
        for turn in trajectory.turns
    ]
    for message, turn in zip(messages, trajectory.turns, strict=True):
        if turn.loss_mask:
            message["token_ids"] = turn.token_ids.tolist()
    if messages:
        messages[-1]["finish_reason"] = trajectory.finish_reason
    return messages


def response_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the policy's text: of the generated messages where they are marked, else of those of the assistant."""
    marked = [message for message in messages if message.get("generated")]
    chosen = marked or [message for message in messages if message["role"] == "assistant"]
    return "".join(message["content"] for message in chosen)
