"""Rewards by rules, without any model: several named components, each in `rewards_by_name`, summed by their weights.

A component that does not apply to a sample is left out of its reward. Where one crashes or returns no finite number,
the sample has no reward: it is excluded and counted. An answer on which a component hangs gets `timeout_reward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from grpo_mcore.environments.config import AnswerConfig
from grpo_mcore.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    response_text,
    single_turn_return,
)
from grpo_mcore.environments.reward_functions import Sample
from grpo_mcore.environments.rules import Component, VerifierComponent
from grpo_mcore.environments.truths import truth_problems
from grpo_mcore.environments.verifier_pool import Result, VerifierPool, WorkerSpec
from grpo_mcore.environments.verifiers import shorten


class RuleEnvConfig(AnswerConfig):
    """The recipe's section `env.rules`."""

    section: ClassVar[str] = "env.rules"

    components: dict[str, Component] = Field(min_length=1)
    """Name -> {type: regex | length | contains | verifier | function, weight, and the keys of that type}."""
    num_workers: int = Field(4, ge=1)
    """Number of worker processes."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds of wall-clock time for all components of one sample together."""
    timeout_reward: float | None = 0.0
    """Reward, and value of each part, of an answer that takes longer: hanging a rule is no way out. null: it has none,
    and is left out."""
    memory_gb: float = Field(2.0, gt=0)
    """GiB that one process may use."""
    stop_strings: list[str] | None = None
    """Strings that end a generation for this environment."""


class RuleEnvironment(EnvironmentInterface):
    """Single-turn. The rules see the policy's answer, all of its text, and the conversation's metadata."""

    concurrent_calls = 32
    config_class = RuleEnvConfig
    config: RuleEnvConfig

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._lost: Counter[str] = Counter()  # samples without a reward, by component that raised
        self._weights = {name: part.weight for name, part in self.config.components.items()}
        components = {name: part.model_dump() for name, part in self.config.components.items()}
        self._pool = VerifierPool(
            WorkerSpec(
                what=f"env.rules.components ({', '.join(components)})",
                loader="grpo_mcore.environments.rules:make_rules",
                arguments=(components,),
                num_workers=self.config.num_workers,
                timeout_s=self.config.timeout_s,
                memory_gb=self.config.memory_gb,
                preload=(
                    "grpo_mcore.environments.rules",
                    *(module for part in self.config.components.values() if (module := part.module()) is not None),
                ),
            )
        )

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        for part in RuleEnvConfig.read(config).components.values():
            part.rule()  # imports what it names

    @classmethod
    def check_row(cls, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        for part in RuleEnvConfig.read(config).components.values():
            part.check_row(info)

    @classmethod
    def check_truths(cls, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        section = RuleEnvConfig.read(config)
        problems: list[str | None] = [None] * len(rows)
        for name in {part.verifier for part in section.components.values() if isinstance(part, VerifierComponent)}:
            more = truth_problems(name, rows, "rules", section.timeout_s)
            problems = [one or other for one, other in zip(problems, more, strict=True)]
        return problems

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        responses = [response_text(messages) for messages in message_log_batch]
        turns = zip(message_log_batch, metadata, responses, strict=True)
        thoughts = self.config.thoughts
        results = self._pool.run(
            [(Sample.of(messages, info, response, thoughts),) for messages, info, response in turns]
        )
        verdicts = [self._verdict(result) for result in results]
        return single_turn_return(
            metadata,
            rewards=[reward for reward, *_ in verdicts],
            reasons=[reason for _, _, reason, _ in verdicts],
            seconds=[result.seconds for result in results],
            stop_strings=self.config.stop_strings,
            rewards_by_name=[values for _, values, *_ in verdicts],
            tracebacks=[traceback for *_, traceback in verdicts],
        )

    def shutdown(self) -> None:
        self._pool.close()

    def _verdict(self, result: Result) -> tuple[float | None, dict[str, float], str, str | None]:
        """Return the reward, its parts, the reason, and the traceback where a component raised for the first time."""
        if result.timed_out and (reward := self.config.timeout_reward) is not None:
            return reward, dict.fromkeys(self._weights, reward), result.failure or "", None
        if result.failure is not None:
            return None, {}, result.failure, None
        if "failed" in result.value:
            return None, {}, *self._lose(**result.value)
        values = result.value["values"]
        if not values:
            return None, {}, f"no component applies to this sample: {', '.join(self._weights)}", None
        reward = sum(self._weights[name] * value for name, value in values.items())
        said = [f"{name} {value:g}" for name, value in values.items()] + result.value["notes"]
        return reward, values, ", ".join(said), None

    def _lose(self, failed: str, why: str, where: str = "", traceback: str | None = None) -> tuple[str, str | None]:
        """Count a sample that a component cost. Return the reason, and the traceback of the first one."""
        self._lost[failed] += 1
        count = self._lost[failed]
        lost = f", {count} answers lost" if count > 1 else ""
        return f"component {failed!r} crashed: {shorten(why)}{where}{lost}", traceback if count == 1 else None
