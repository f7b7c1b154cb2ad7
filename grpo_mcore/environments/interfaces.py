"""What an environment is: it reads conversations and gives observations, rewards and an end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from grpo_mcore.environments.config import EnvConfig
from grpo_mcore.rollout.trajectory import Outcome, Trajectory


class EnvironmentReturn(NamedTuple):
    """One entry a conversation in every list.

    `observations`: {"role", "content"}, what the world says next; the role `tool` is kept where the chat template
    has it, any other becomes `user`. `metadata`: what the next step gets, None: the same again.
    `next_stop_strings`: of the next turn, None: the same again. `terminateds`: the conversation is over.
    `rewards`: of this turn alone, those of a conversation are added up; None where the environment failed
    (excluded and counted, never 0). `answers`: what was taken for the answer. `reasons`: why it got that reward.
    `rewards_by_name`: the parts of a reward that has several.
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


class EnvironmentBase:
    """Built from its section of the recipe, `env.<name>`. Several threads may use one instance."""

    needs: ClassVar[dict[str, float]] = {"cpus": 1.0, "gpus": 0.0}
    """What one instance asks of the cluster."""
    concurrent_calls: ClassVar[int] = 1
    """Calls that may run at a time, in threads, where it is a worker of its own."""
    config_class: ClassVar[type[EnvConfig] | None] = None
    """What `config` becomes. None: it stays a dict, with any keys."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: Any = self.read_config(config or {})

    @classmethod
    def patience_s(cls, config: Mapping[str, Any]) -> float | None:
        """Of one that plays whole samples itself, as a NeMo Gym does: the longest that it works on them, in seconds.
        None: it scores turns of the rollouts here."""
        return None

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Any:
        """A section of the recipe as instances have it. Raises EnvironmentConfigError that names the key."""
        return dict(config) if cls.config_class is None else cls.config_class.read(config)

    @classmethod
    def resources(cls, config: Mapping[str, Any]) -> dict[str, float]:
        """What an instance with this section of the recipe asks of the cluster: {"cpus", "gpus"}. Raises
        EnvironmentConfigError where the section is wrong, before anything is started."""
        cls.read_config(config)
        return dict(cls.needs)

    def shutdown(self) -> None:
        """Frees what the environment holds; it is not used afterwards."""


class EnvironmentInterface(EnvironmentBase, ABC):
    """Scores the samples that the engines generate, turn by turn."""

    @abstractmethod
    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        """The world's answer to each conversation. `message_log_batch[i]`: messages {"role", "content"} so
        far; `metadata[i]`: the prompt's `extra_env_info`, or what the last step returned for it."""

    def advance(self, metadata: Sequence[dict[str, Any]], *trajectories: Trajectory) -> list[Outcome]:
        """`step` on these trajectories, in order: the verdicts on their last turns. They come as separate arguments
        so that object references in their place are resolved by the cluster."""
        if len(metadata) != len(trajectories):
            raise ValueError(f"advance: {len(metadata)} metadata for {len(trajectories)} trajectories")
        start = time.perf_counter()
        result = self.step([conversation(trajectory) for trajectory in trajectories], metadata)
        mean_seconds = (time.perf_counter() - start) / max(len(trajectories), 1)
        seconds = result.seconds or [mean_seconds] * len(trajectories)
        by_name = result.rewards_by_name or [{} for _ in trajectories]
        return [
            Outcome(
                reward=reward,
                answer=answer,
                reason=reason,
                seconds=taken,
                rewards_by_name=named,
                terminated=bool(terminated),
                observation=said.get("content"),
                role=said.get("role", "user"),
                stop_strings=None if stops is None else tuple(stops),
                metadata=state,
            )
            for reward, answer, reason, taken, named, terminated, said, stops, state in zip(
                result.rewards,
                result.answers,
                result.reasons,
                seconds,
                by_name,
                result.terminateds,
                result.observations,
                result.next_stop_strings,
                result.metadata,
                strict=True,
            )
        ]

    def global_post_process_and_metrics(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Metrics over a whole batch of samples; `batch` has the columns `rewards` and `uid`."""
        return {}


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """A trajectory as messages; `generated` tells the policy's words from those of a prompt."""
    return [{"role": turn.role, "content": turn.text, "generated": turn.loss_mask} for turn in trajectory.turns]


def response_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the policy said: the generated messages where they are marked, else those of the assistant."""
    marked = [message for message in messages if message.get("generated")]
    said = marked or [message for message in messages if message["role"] == "assistant"]
    return "".join(message["content"] for message in said)
