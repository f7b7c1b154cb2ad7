"""Scored groups between their verdict and their step, and dynamic sampling's rule for which of them train."""

from __future__ import annotations

from typing import Any

import torch

from grpo_mcore.data import DatumSpec
from grpo_mcore.objective import RIGHT, group_stats
from grpo_mcore.recipe import MasterConfig, prompts_per_generation_batch
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.schedule import Train


class StepGroups:
    """Holds the groups of the step under way. With dynamic sampling, one that is not informative is dropped at once,
    and with it its trajectories; only its rewards are remembered, for the metrics of the step."""

    def __init__(self, config: MasterConfig) -> None:
        self._filters = config.grpo.use_dynamic_sampling
        self._by_name = config.grpo.adv_estimator.name == "gdpo"
        self._batch = prompts_per_generation_batch(config)
        self._groups: dict[str, Group] = {}
        self._rewards: list[float | None] = []  # of all samples generated since the last step

    def add(self, group: Group) -> bool:
        """Takes a scored group in. Returns whether a step may train on it."""
        if not self._filters:
            self._groups[group.uid] = group
            return True
        self._rewards += [score.reward for score in group.scores]
        if not is_informative(group, by_name=self._by_name):
            return False
        self._groups[group.uid] = group
        return True

    def waiting(self) -> list[Group]:
        """Those that no step has taken yet."""
        return list(self._groups.values())

    def fail(self, group: Group) -> None:
        """Counts the samples of a group of which not one has a reward; its prompt is replaced."""
        if self._filters:
            self._rewards += [score.reward for score in group.scores]

    def take(self, command: Train) -> tuple[list[Group], list[DatumSpec], dict[str, float]]:
        """(groups to train on, prompts to hand back, metrics of dynamic sampling: none without it)."""
        trained = [self._groups.pop(uid) for uid in command.groups]
        surplus = [self._groups.pop(uid).prompt for uid in command.surplus]
        if not self._filters:
            return trained, surplus, {}
        generated = len(trained) + len(surplus) + command.filtered
        rewards = [reward for reward in self._rewards if reward is not None]
        kept = [score.reward for group in trained for score in group.scores if score.reward is not None]
        metrics = {
            "reward": sum(rewards) / len(rewards),
            "accuracy": sum(reward >= RIGHT for reward in rewards) / len(rewards),
            "filtered_reward": sum(kept) / len(kept),
            "num_failed_samples": float(len(self._rewards) - len(rewards)),
            "num_generated_samples": float(len(self._rewards)),
            "num_filtered_prompts": float(command.filtered),
            "num_surplus_prompts": float(len(surplus)),
            "num_gen_batches": float(-(-generated // self._batch)),
        }
        self._rewards.clear()
        return trained, surplus, metrics


def is_informative(group: Group, *, by_name: bool = False) -> bool:
    """Whether the environment's rewards of the scored samples differ, by more than rounding.

    `by_name`: or any of their named rewards, for an estimator that learns from each by itself.
    """
    scores = [score for score in group.scores if score.reward is not None]
    columns: list[list[Any]] = [[score.reward for score in scores]]
    if by_name:
        names = {name for score in scores for name in score.rewards_by_name}
        columns += [[score.rewards_by_name.get(name, 0.0) for score in scores] for name in names]
    one_group = torch.zeros(len(scores), dtype=torch.int64)
    return any(
        bool(group_stats(torch.tensor(column, dtype=torch.float64), one_group).informative.any()) for column in columns
    )
