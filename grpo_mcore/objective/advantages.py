"""Advantages relative to the group: one value per sample, computed in float64.

Groups are identified by an id, not by equal prompts. A failed sample is left out of its group.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

EPS = 1e-6
"""Added to a standard deviation before rewards are divided by it."""

EQUAL_REWARDS_TOLERANCE = 1e-6
"""Rewards of a group that differ by less than this share of the largest are equal: that is float32 rounding."""

ROUNDING_SCALE = 0.1
"""Rewards below this are compared as if they were this large: a 0 computed as 0.3 - 0.1 - 0.2 is off by 1e-8."""


@dataclass(frozen=True)
class GroupStats:
    """Statistics of rewards by group: N samples, K groups. Failed samples (not valid) are ignored."""

    index: Tensor
    """int64 [N]: the group of each sample, 0 .. K - 1, in the order of the sorted ids."""
    valid: Tensor
    """bool [N]: samples that did not fail."""
    deviation: Tensor
    """float64 [N]: reward - mean of the group; exactly 0 for failed samples and in groups with equal rewards."""
    size: Tensor
    """int64 [K]: number of valid samples."""
    mean: Tensor
    """float64 [K]: 0 for a group without a valid sample."""
    std: Tensor
    """float64 [K]: over the whole group, with n - 1; exactly 0 if all rewards are equal or n < 2."""

    @property
    def informative(self) -> Tensor:
        """bool [K]: groups whose rewards differ. Only these give a gradient."""
        return self.std > 0


@dataclass(frozen=True)
class AdvantageTerm:
    """A part of the advantages, with which a person can compute them: weight * (rewards - baseline) / scale."""

    rewards: Tensor
    """float64 [N]: as the estimator got them: scaled and shaped, with the KL where it is in the reward."""
    baseline: Tensor
    """float64 [N]"""
    scale: Tensor
    """float64 [N]: the standard deviation with its eps; 1 where there is none."""
    weight: float = 1.0


@dataclass(frozen=True)
class AdvantageEstimate:
    """Advantages of N samples: token t of sample i trains with advantages[i] - kl_weight * kl_to_go[i, t]."""

    advantages: Tensor
    """float64 [N]; 0 for failed samples."""
    groups: GroupStats
    """Statistics of the rewards from which the advantages were computed."""
    kl_weight: float = 0.0
    """Above 0 only if the KL is subtracted from the advantage token by token."""
    terms: Mapping[str, AdvantageTerm] = field(default_factory=dict)
    """By name of the reward, "" for the only one: advantages = sum of the terms / scale. Empty: a custom estimator."""
    scale: float = 1.0
    """Divisor of the sum, the same for all samples of the step."""


def group_index(keys: Sequence[Hashable]) -> Tensor:
    """Return int64 [N]: group ids for any keys, such as prompt uids, numbered by first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of one group, of which none failed, differ by more than rounding: `informative` of
    `group_stats`, without a tensor."""
    if len(rewards) < 2:
        return False
    low, high = min(rewards), max(rewards)
    return high - low > EQUAL_REWARDS_TOLERANCE * max(abs(low), abs(high), ROUNDING_SCALE)


def group_stats(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> GroupStats:
    """Return two-pass statistics of each group.

    rewards [N] (any float; NaN is allowed for failed samples), group_ids int [N], valid bool [N] (None: all).
    Raises ValueError if shapes differ or a valid reward is not finite.
    """
    if rewards.ndim != 1 or group_ids.shape != rewards.shape or (valid is not None and valid.shape != rewards.shape):
        shapes = [tuple(t.shape) for t in (rewards, group_ids, valid) if t is not None]
        raise ValueError(f"rewards, group_ids and valid must be 1-d and of one length, not {shapes}")
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.to(torch.bool)
    bad = (valid & ~torch.isfinite(rewards)).nonzero().reshape(-1).tolist()
    if bad:
        raise ValueError(f"rewards of samples {bad[:8]} are not finite; mark failed samples as not valid")
    values = torch.where(valid, rewards.to(torch.float64), 0.0)
    index = torch.unique(group_ids, return_inverse=True)[1]
    count = int(index.max()) + 1 if index.numel() else 0

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(count).index_add(0, index, x)

    def extreme(fill: float, reduce: str) -> Tensor:
        start = values.new_full((count,), fill)
        return start.scatter_reduce(0, index, torch.where(valid, values, fill), reduce=reduce)

    size = total(valid.to(torch.int64))
    mean = total(values) / size.clamp(min=1)
    low, high = extreme(torch.inf, "amin"), extreme(-torch.inf, "amax")
    largest = torch.maximum(low.abs(), high.abs()).clamp(min=ROUNDING_SCALE)
    equal = (size < 2) | (high - low <= EQUAL_REWARDS_TOLERANCE * largest)
    deviation = torch.where(valid & ~equal[index], values - mean[index], 0.0)
    std = (total(deviation.square()) / (size - 1).clamp(min=1)).sqrt()
    return GroupStats(index, valid, deviation, size, mean, std)


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor | None = None,
    *,
    normalize: bool = True,
    leave_one_out: bool = True,
    eps: float = EPS,
) -> AdvantageEstimate:
    """Return A = r - baseline, divided by (std + eps) of the whole group if `normalize`.

    The baseline is the group's mean or, with leave_one_out, the mean of its other samples: then
    A = (r - mean) * n / (n - 1). A group with equal rewards, or with one sample, gives exactly 0.
    Arguments as for `group_stats`. GRPO: arXiv 2402.03300, section 4.1.2.
    """
    groups = group_stats(rewards, group_ids, valid)
    advantages = groups.deviation
    if leave_one_out:
        size = groups.size[groups.index].to(torch.float64)
        advantages = advantages * size / (size - 1).clamp(min=1)
    term = advantage_term(rewards, advantages)
    if normalize:
        std = groups.std[groups.index]
        advantages = torch.where(std > 0, advantages / (std + eps), advantages)
        term = replace(term, scale=torch.where(std > 0, std + eps, 1.0))
    return AdvantageEstimate(advantages, groups, terms={"": term})


def advantage_term(rewards: Tensor, difference: Tensor) -> AdvantageTerm:
    """Return the term of rewards whose differences to their baselines are known, [N] each, without a scale."""
    rewards = rewards.to(torch.float64)
    return AdvantageTerm(rewards, rewards - difference, torch.ones_like(rewards))


def clip_advantages(advantages: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Return the advantages clamped to [low, high]; None leaves a side open. Raises ValueError if low > high."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"advantage_clip_low={low} is above advantage_clip_high={high}")
    return advantages if low is None and high is None else advantages.clamp(low, high)
