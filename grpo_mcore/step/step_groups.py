"""Scored groups that wait for their training step, and dynamic sampling's rule for which of them train."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_mcore.objective import rewards_differ
from grpo_mcore.recipe import (
    MasterConfig,
    RewardWeights,
    has_greedy_baseline,
    prompts_per_generation_batch,
    reward_weights,
    weights_by_name,
)
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.schedule import Train
from grpo_mcore.rollout.trajectory import Score, accuracy

TAIL = (1, 5, 10)
"""Percentages of a step's samples, the last ones to end, whose wait is measured."""
LAST_SAMPLES = 5
"""Number of a step's last samples that are named."""


def tail(groups: Sequence[Group]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return (metrics, last samples) of the long tail of a step. `tail/last_5_percent`: seconds from when all but the
    last 5 % of its samples had ended until the last one had. The last samples: uid, generation, turns, tokens
    (generated), and the seconds after which each ended once 90 % of them had."""
    ends = sorted(
        (end, group.uid, sample.generation_index, sample.turns, sample.generated_length)
        for group in groups
        for sample, end in zip(group.samples, group.ended_at, strict=False)
    )
    before = {percent: len(ends) - math.ceil(len(ends) * percent / 100) - 1 for percent in TAIL}
    if not ends or before[TAIL[-1]] < 0:
        return {}, []
    metrics = {f"tail/last_{percent}_percent": ends[-1][0] - ends[index][0] for percent, index in before.items()}
    names = ("uid", "generation", "turns", "tokens")
    start = ends[before[TAIL[-1]]][0]
    last = [dict(zip(names, rest, strict=True)) | {"seconds": round(end - start, 3)} for end, *rest in ends[::-1]]
    return metrics, last[:LAST_SAMPLES]


class StepGroups:
    """Holds finished groups until they train. With dynamic sampling a group that is not informative is dropped at once
    with its trajectories; its rewards are kept for the metrics of the step."""

    def __init__(self, config: MasterConfig) -> None:
        estimator = config.grpo.adv_estimator
        self._first = int(has_greedy_baseline(config))  # the first sample of each group that is drawn
        self._filters, self._ahead = config.grpo.use_dynamic_sampling, config.grpo.async_grpo.max_age > 0
        self._by_name, self._weights = estimator.name == "gdpo", reward_weights(config)
        self._min_range = config.grpo.dynamic_sampling_min_range
        self._batch = prompts_per_generation_batch(config)
        self._groups: dict[str, Group] = {}
        self._scores: list[Score] = []  # of all samples drawn since the last step
        self._baselines: list[Score] = []  # of those decoded greedily
        self._dropped: Counter[str] = Counter()  # groups since the last step, by reason

    def add(self, group: Group) -> bool:
        """Take in a group that is scored or has failed. Return whether a step may train on it."""
        if self._filters:
            self._scores += group.scores[self._first :]
            self._baselines += group.scores[: self._first]
        if group.failure is not None:  # no sample has a reward
            self._dropped["failed"] += 1
        elif self._filters and not self._informs(group):
            self._dropped["equal_rewards"] += 1
        else:
            self._groups[group.uid] = group
        return group.uid in self._groups

    def _informs(self, group: Group) -> bool:
        if self._first and group.scores[0].reward is None:
            return False  # nothing to compare the others with
        return is_informative(group, by_name=self._by_name, weights=self._weights, min_range=self._min_range)

    def waiting(self) -> list[Group]:
        """Return the groups that no step has taken yet."""
        return list(self._groups.values())

    def take(self, command: Train, version: int) -> tuple[list[Group], list[Group], dict[str, float]]:
        """Return (the groups to train on under weight version `version`, those surplus groups that have finished,
        metrics). Surplus groups are dropped.

        The metrics are those of dynamic sampling and of the groups that wait for later steps, if there are such."""
        trained = [self._groups.pop(uid) for uid in command.groups]
        finished = [group for uid in command.surplus if (group := self._groups.pop(uid, None)) is not None]
        self._dropped["too_old_finished"] += len(finished)
        self._dropped["too_old_under_way"] += len(command.surplus) - len(finished)
        metrics = self._sampling_metrics(trained, command) if self._filters else {}
        if self._ahead:
            metrics |= self._buffer_metrics(version)
        self._scores.clear()
        self._baselines.clear()
        self._dropped.clear()
        return trained, finished, metrics

    def _sampling_metrics(self, trained: list[Group], command: Train) -> dict[str, float]:
        rewards = [score.reward for score in self._scores if score.reward is not None]
        kept = [score.reward for group in trained for score in group.scores[self._first :] if score.reward is not None]
        scores = self._scores + self._baselines
        of_all: dict[str, float] = {}
        if rewards:  # with generation ahead, all groups may have finished before the last step
            of_all["reward"] = sum(rewards) / len(rewards)
        if (correct := accuracy(self._scores)) is not None:
            of_all["accuracy"] = correct
        generated = len(trained) + len(command.surplus) + command.filtered
        return of_all | {
            "filtered_reward": sum(kept) / max(1, len(kept)),
            "num_failed_samples": float(sum(score.reward is None for score in scores)),
            "num_generated_samples": float(len(scores)),
            "num_filtered_prompts": float(command.filtered),
            "num_surplus_prompts": float(len(command.surplus)),
            "num_gen_batches": float(-(-generated // self._batch)),
        }

    def _buffer_metrics(self, version: int) -> dict[str, float]:
        """Return metrics of the groups that wait for later steps, and of those dropped since the last step."""
        waiting = list(self._groups.values())
        ages = [version - group.weight_version for group in waiting]
        reasons = ("failed", "too_old_finished", "too_old_under_way", "equal_rewards")
        return {
            "buffer/groups": float(len(waiting)),
            "buffer/bytes": float(sum(group.nbytes for group in waiting)),
            "buffer/age_mean": sum(ages) / len(ages) if ages else 0.0,
            "buffer/age_max": float(max(ages, default=0)),
            **{f"buffer/dropped_{reason}": float(self._dropped[reason]) for reason in reasons},
        }


def is_informative(
    group: Group, *, by_name: bool = False, weights: RewardWeights | None = None, min_range: float = 0.0
) -> bool:
    """Return whether the rewards of the scored samples differ by more than rounding, and by more than `min_range`.

    `by_name`: whether any of their named rewards differs, for an estimator that learns from each separately; rewards
    with weight 0 in `weights` do not count. Raises ValueError if the weights do not fit the names.
    """
    scores = [score for score in group.scores if score.reward is not None]
    columns: list[list[Any]] = [[score.reward for score in scores]]
    if by_name and scores:
        names = sorted({name for score in scores for name in score.rewards_by_name})
        weight_of = weights_by_name(names, weights)
        columns = [[score.rewards_by_name.get(name, 0.0) for score in scores] for name in names if weight_of[name]]
    return any(rewards_differ(column) and max(column) - min(column) > min_range for column in columns)
