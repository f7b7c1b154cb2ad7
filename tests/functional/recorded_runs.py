"""Runs of this process that record what their engines say and what their optimizer steps report."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.driver.rollouts.rollouts import Rollouts
from grpo_mcore.rollout.group import Group


@dataclass
class Inside:
    """Record of a run in this process. `samples`: (weight version, prompt, generation) -> tokens, log-probs.
    `optimizer_steps`: the metrics of each."""

    samples: dict[tuple[int, str, int], tuple[list[int], list[float]]] = field(default_factory=dict)
    optimizer_steps: list[dict[str, float]] = field(default_factory=list)


@contextmanager
def looking_inside() -> Iterator[Inside]:
    inside, generate, train_step = Inside(), EngineWorker.generate_together, PolicyWorker.train_step

    @functools.wraps(generate)  # a call goes by the name of the method
    def recorded_generate(self: EngineWorker, *args: Any) -> Iterator[Any]:
        for trajectories in generate(self, *args):
            for trajectory in trajectories:
                turn = trajectory.turns[-1]
                key = (trajectory.weight_version, trajectory.uid, trajectory.generation_index)
                inside.samples[key] = (turn.token_ids.tolist(), turn.logprobs.tolist())
            yield trajectories

    @functools.wraps(train_step)
    def recorded_train_step(self: PolicyWorker, *args: Any, **options: Any) -> Any:
        report = train_step(self, *args, **options)
        inside.optimizer_steps.append(report.metrics)
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineWorker, "generate_together", recorded_generate)
        patch.setattr(PolicyWorker, "train_step", recorded_train_step)
        yield inside


@contextmanager
def recording_groups(before: Callable[[list[Group]], object] = len) -> Iterator[list[Group]]:
    """Give the list of the groups that come back. `before` is called with it when the next one is asked for."""
    groups, next_group = list[Group](), Rollouts.next_group

    def recorded(self: Rollouts, *args: Any) -> Group:
        before(groups)
        groups.append(next_group(self, *args))
        return groups[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollouts, "next_group", recorded)
        yield groups
