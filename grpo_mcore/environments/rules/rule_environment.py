"""Rewards by rules, without any model: several named components, each in `rewards_by_name`, summed by their weights.

A component that does not apply to a sample is left out of its reward. Where one crashes or returns no finite number,
the sample has no reward: it is excluded and counted. An answer on which a component hangs gets `timeout_reward`. The
calls of `async` functions, such as judges, wait together, and failed ones are repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from grpo_mcore.environments.config import AnswerConfig
from grpo_mcore.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    response_text,
    single_turn_return,
)
from grpo_mcore.environments.math.truths import truth_problems
from grpo_mcore.environments.math.verifiers import shorten
from grpo_mcore.environments.rules.async_rewards import AsyncPool
from grpo_mcore.environments.rules.reward_functions import Sample
from grpo_mcore.environments.rules.rules import Component, FunctionComponent, VerifierComponent
from grpo_mcore.environments.verifier_pool import Result, VerifierPool, WorkerSpec

_SMALL_CALL = 4  # samples


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
        components = self.config.components
        judges = [name for name, part in components.items() if isinstance(part, FunctionComponent) and part.is_async]
        self._pools: list[VerifierPool] = []  # an answer that fails in one is not shown to the next
        if rules := [name for name in components if name not in judges]:
            spec = self._spec(rules, "make_rules")
            self._pools.append(VerifierPool(spec))
        if judges:
            self._pools.append(AsyncPool(self._spec(judges, "make_judges")))

    def _spec(self, names: Sequence[str], loader: str) -> WorkerSpec:
        parts = {name: self.config.components[name] for name in names}
        return WorkerSpec(
            what=f"env.rules.components ({', '.join(names)})",
            loader=f"grpo_mcore.environments.rules.rules:{loader}",
            arguments=({name: part.model_dump() for name, part in parts.items()},),
            num_workers=self.config.num_workers,
            timeout_s=self.config.timeout_s,
            memory_gb=self.config.memory_gb,
            preload=(
                "grpo_mcore.environments.rules.rules",
                *(module for part in parts.values() for module in part.modules()),
            ),
        )

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        for part in RuleEnvConfig.read(config).components.values():
            part.rule()  # imports what it names
            if isinstance(part, FunctionComponent):
                part.check()

    @classmethod
    def call_limits(cls, config: Mapping[str, Any]) -> tuple[int, int]:
        """Return enough small calls for the async function with the highest concurrency, if there is one: no sample
        waits long inside a call, where its time counts."""
        functions = [part for part in RuleEnvConfig.read(config).components.values() if part.type == "function"]
        most = max((part.concurrency for part in functions if part.is_async), default=0)
        return (most + cls.concurrent_calls, _SMALL_CALL) if most else super().call_limits(config)

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
        functions = [part for part in section.components.values() if isinstance(part, FunctionComponent)]
        return [
            problem or next(filter(None, (part.row_problem(row) for part in functions)), None)
            for problem, row in zip(problems, rows, strict=True)
        ]

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[dict[str, Any]]
    ) -> EnvironmentReturn:
        responses = [response_text(messages) for messages in message_log_batch]
        turns = zip(message_log_batch, metadata, responses, strict=True)
        thoughts = self.config.thoughts
        samples = [Sample.of(messages, info, response, thoughts) for messages, info, response in turns]
        scored = [_Scored() for _ in samples]
        for pool in self._pools:
            left = [(sample, score) for sample, score in zip(samples, scored, strict=True) if not score.over]
            for (_, score), result in zip(left, pool.run([(sample,) for sample, _ in left]), strict=True):
                self._add(score, result)
        verdicts = [self._verdict(score) for score in scored]
        return single_turn_return(
            metadata,
            rewards=[reward for reward, *_ in verdicts],
            reasons=[reason for _, _, reason in verdicts],
            seconds=[score.seconds for score in scored],
            stop_strings=self.config.stop_strings,
            rewards_by_name=[values for _, values, _ in verdicts],
            tracebacks=[score.traceback for score in scored],
            failures=[score.failures for score in scored],
        )

    def shutdown(self) -> None:
        for pool in self._pools:
            pool.close()

    def _add(self, score: _Scored, result: Result) -> None:
        """Add what one pool said of a sample."""
        score.seconds += result.seconds
        if result.timed_out and (reward := self.config.timeout_reward) is not None:
            score.reward, score.why = reward, result.failure
            score.values = dict.fromkeys(self.config.components, reward)
        elif result.failure is not None:
            score.why = result.failure
            score.failures.append(result.failure)
        else:
            score.failures += result.value.get("failures", ())
            if "failed" in result.value:
                score.why, score.traceback = self._lose(result.value)
                score.failures = score.failures or [
                    f"{result.value['failed']}: {result.value['why'].partition(':')[0]}"
                ]
            else:
                score.values |= result.value["values"]
                score.notes += result.value["notes"]

    def _verdict(self, score: _Scored) -> tuple[float | None, dict[str, float], str]:
        """Return the reward, its parts, and the reason."""
        if score.why is not None:
            return score.reward, score.values if score.reward is not None else {}, score.why
        values = {name: score.values[name] for name in self.config.components if name in score.values}
        if not values:
            return (
                None,
                {},
                f"no component applies to this sample, all returned None: {', '.join(self.config.components)}",
            )
        reward = sum(self.config.components[name].weight * value for name, value in values.items())
        return reward, values, ", ".join([*(f"{name} {value:g}" for name, value in values.items()), *score.notes])

    def _lose(self, result: Mapping[str, Any]) -> tuple[str, str | None]:
        """Count a sample that a component cost. Return the reason, and the traceback of the first one."""
        failed = result["failed"]
        self._lost[failed] += 1
        count = self._lost[failed]
        lost = f", {count} answers lost" if count > 1 else ""
        reason = f"component {failed!r} crashed: {shorten(result['why'])}{result.get('where', '')}{lost}"
        return reason, result.get("traceback") if count == 1 else None


@dataclass
class _Scored:
    """The components' results for a sample so far. `why`: why it is over, with its `reward` if it has one."""

    reward: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    why: str | None = None
    traceback: str | None = None
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        return self.why is not None
