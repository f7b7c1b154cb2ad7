"""Rewards by rules, without any model: several named components, each in `rewards_by_name`, summed by their weights.

A component that does not apply to a sample is left out of its reward. If one crashes or returns no finite number, the
sample has no reward: it is excluded and counted. An answer on which a component hangs gets `timeout_reward`. The
calls of `async` functions, such as models that judge answers, wait together, and failed ones are repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field, model_validator

from grpo_mcore.base.text import shorten
from grpo_mcore.environments.config import AnswerConfig
from grpo_mcore.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    response_text,
    single_turn_return,
)
from grpo_mcore.environments.math.ground_truths import ground_truth_problems
from grpo_mcore.environments.rules.async_rewards import AsyncPool
from grpo_mcore.environments.rules.reward_functions import Sample
from grpo_mcore.environments.rules.rules import Component, FunctionComponent, VerifierComponent
from grpo_mcore.environments.verifier_pool import Result, VerifierPool, WorkerSpec

_SMALL_CALL = 4  # samples


class RuleEnvConfig(AnswerConfig):
    """The recipe's section `env.rules`."""

    section: ClassVar[str] = "env.rules"

    components: dict[str, Component] = Field(min_length=1)
    """Name -> {type: regex | length | contains | verifier | format | exact_alnum | math_expr | bbox_giou | geo3k |
    function, weight, and the keys of that type}."""
    reward_functions: list[dict[str, Any]] = Field(default_factory=list)
    """In place of components, as recipes of NeMo RL write them: {name, weight, kwargs} each. Their weights are shares:
    they are divided by their sum."""
    num_workers: int = Field(4, ge=1)
    """Number of worker processes."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds of wall-clock time for all components of one sample together."""
    timeout_reward: float | None = 0.0
    """Reward (total and per component) of an answer whose scoring times out, so that hanging a rule never pays. null:
    exclude the sample."""
    memory_gb: float = Field(2.0, gt=0)
    """GiB that one process may use."""

    @model_validator(mode="before")
    @classmethod
    def _named_functions(cls, section: dict[str, Any]) -> dict[str, Any]:
        functions = section.get("reward_functions")
        if not functions or not all(isinstance(part, dict) and "name" in part for part in functions):
            return section
        if section.get("components"):
            raise ValueError("give components or reward_functions, not both")
        if twice := [name for name, count in Counter(part["name"] for part in functions).items() if count > 1]:
            raise ValueError(f"reward_functions has a name twice: {twice[0]}; in components each has a name of its own")
        weights = [part.get("weight", 1.0) for part in functions]
        if not all(isinstance(weight, int | float) and weight >= 0 for weight in weights) or not sum(weights):
            raise ValueError(f"the weights of reward_functions must be shares from 0, got {weights}")
        components = {
            part["name"]: {**part, "type": part["name"], "weight": weight / sum(weights)}
            for part, weight in zip(functions, weights, strict=True)
        }
        for part in components.values():
            del part["name"]
        return {**section, "components": components}


class RuleEnvironment(EnvironmentInterface):
    """Single-turn. The rules see the policy's answer, all of its text, and the conversation's metadata."""

    concurrent_calls = 32
    config_class = RuleEnvConfig
    config: RuleEnvConfig

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._lost: Counter[str] = Counter()  # samples without a reward, by component that raised
        components = self.config.components
        waiting = [name for name, part in components.items() if isinstance(part, FunctionComponent) and part.is_async]
        self._pools: list[VerifierPool] = []  # an answer that fails in one is not shown to the next
        if rules := [name for name in components if name not in waiting]:
            self._pools.append(VerifierPool(self._spec(rules, "make_rules")))
        if waiting:
            self._pools.append(AsyncPool(self._spec(waiting, "make_async_rules")))

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
        """Return enough small calls for the async function with the highest concurrency, if there is one, because the
        time that a sample waits inside a call counts as scoring time."""
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
            more = ground_truth_problems(name, rows, "rules", section.timeout_s)
            problems = [problem or other for problem, other in zip(problems, more, strict=True)]
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
        states = [_Scoring() for _ in samples]
        for pool in self._pools:
            left = [(sample, state) for sample, state in zip(samples, states, strict=True) if state.reason is None]
            for (_, state), result in zip(left, pool.run([(sample,) for sample, _ in left]), strict=True):
                self._add(state, result)
        for state in states:
            if state.reason is None:
                self._sum_up(state)
        return single_turn_return(
            metadata,
            rewards=[state.reward for state in states],
            reasons=[state.reason or "" for state in states],
            seconds=[state.seconds for state in states],
            rewards_by_name=[state.values for state in states],
            tracebacks=[state.traceback for state in states],
            failures=[state.failures for state in states],
        )

    def shutdown(self) -> None:
        for pool in self._pools:
            pool.close()

    def _add(self, state: _Scoring, result: Result) -> None:
        """Add the result of one pool's components for a sample."""
        state.seconds += result.seconds
        if result.failure is not None:
            reward = self.config.timeout_reward if result.timed_out else None
            values = {} if reward is None else dict.fromkeys(self.config.components, reward)
            state.reward, state.values, state.reason = reward, values, result.failure
            state.failures += [result.failure] if reward is None else []
            return
        state.failures += result.value.get("failures", ())
        if "failed" in result.value:
            state.values = {}
            state.reason, state.traceback = self._lose(result.value)
            kind = result.value["error"].partition(":")[0]
            state.failures = state.failures or [f"{result.value['failed']}: {kind}"]
        else:
            state.values |= result.value["values"]
            state.notes += result.value["notes"]

    def _sum_up(self, state: _Scoring) -> None:
        """Compute the reward and the reason of a sample whose components have all run."""
        parts = self.config.components
        state.values = {name: state.values[name] for name in parts if name in state.values}
        if not state.values:
            state.reason = f"no component applies to this sample, all returned None: {', '.join(parts)}"
            return
        state.reward = sum(parts[name].weight * value for name, value in state.values.items())
        state.reason = ", ".join([*(f"{name} {value:g}" for name, value in state.values.items()), *state.notes])

    def _lose(self, result: Mapping[str, Any]) -> tuple[str, str | None]:
        """Count a sample that a component cost. Return the reason, and the traceback of the first one."""
        failed = result["failed"]
        self._lost[failed] += 1
        count = self._lost[failed]
        lost = f", {count} answers lost" if count > 1 else ""
        reason = f"component {failed!r} crashed: {shorten(result['error'])}{result.get('where', '')}{lost}"
        return reason, result.get("traceback") if count == 1 else None


@dataclass
class _Scoring:
    """The state of a sample's scoring. `reason`: set once the result is final; None while components are left."""

    reward: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reason: str | None = None
    traceback: str | None = None
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
