"""Reward scaling and shaping, sample masks, and advantages relative to the group: one value per sample, in float64.

Groups are identified by an id, not by equal prompts. A failed sample is left out of its group.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def scale_reward_values(
    rewards: Tensor,
    *,
    source_min: float = 0.0,
    source_max: float = 1.0,
    target_min: float = 0.0,
    target_max: float = 1.0,
) -> Tensor:
    """Return rewards clamped to [source_min, source_max] and mapped linearly to [target_min, target_max], same dtype.

    NaN (a failed sample) stays NaN. Raises ValueError if the source range is empty.
    """
    if source_max <= source_min:
        raise ValueError(f"reward_scaling.source_max={source_max} must exceed source_min={source_min}")
    share = (rewards.to(torch.float64).clamp(source_min, source_max) - source_min) / (source_max - source_min)
    # This form, unlike a + share * (b - a), hits both ends of the target range exactly.
    return (target_min * (1 - share) + target_max * share).to(rewards.dtype)


def shape_rewards(
    rewards: Tensor,
    *,
    generated_lengths: Tensor,
    truncated: Tensor,
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_buffer_penalty: float = 1.0,
    stop_properly_penalty_coef: float | None = None,
) -> Tensor:
    """Return rewards [N] with a penalty on answers that are too long, same dtype. NaN (a failed sample) stays NaN.

    L: number of generated tokens of a sample in all its turns. M = max_response_length, B = overlong_buffer_length.
    r + penalty * clamp((M - B - L) / B, -1, 0), the soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13): no
    penalty up to M - B, then linear, -penalty from M on.
    With stop_properly_penalty_coef: r * coef for truncated samples instead, and no penalty on length. Meant for
    rewards >= 0: for a negative reward, a coefficient below 1 reduces the punishment.
    generated_lengths int [N], truncated bool [N]. Raises ValueError if shapes differ, or if not 0 < B <= M.
    """
    if generated_lengths.shape != rewards.shape or truncated.shape != rewards.shape:
        shapes = [tuple(t.shape) for t in (rewards, generated_lengths, truncated)]
        raise ValueError(f"rewards, generated_lengths and truncated must be of one length, not {shapes}")
    values = rewards.to(torch.float64)
    if stop_properly_penalty_coef is not None:
        return torch.where(truncated.to(torch.bool), values * stop_properly_penalty_coef, values).to(rewards.dtype)
    if not 0 < overlong_buffer_length <= max_response_length:
        raise ValueError(
            f"reward_shaping.overlong_buffer_length={overlong_buffer_length} must lie between 1 and "
            f"max_response_length={max_response_length}"
        )
    left = max_response_length - overlong_buffer_length - generated_lengths.to(torch.float64)
    return (values + overlong_buffer_penalty * (left / overlong_buffer_length).clamp(-1, 0)).to(rewards.dtype)


def overlong_filter(sample_mask: Tensor, truncated: Tensor) -> Tensor:
    """Return sample_mask [N] with 0 for samples cut off at the length limit (truncated, bool [N]), same dtype."""
    return torch.where(truncated.to(torch.bool), torch.zeros_like(sample_mask), sample_mask)


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
    """Terms by name of the reward, "" for the only reward: advantages = sum of the terms / scale. Empty for a custom
    estimator."""
    scale: float = 1.0
    """Divisor of the sum, the same for all samples of the step."""


def group_index(keys: Sequence[Hashable]) -> Tensor:
    """Return int64 [N]: group ids for any keys, such as prompt uids, numbered by first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of one group without failed samples differ by more than rounding: the same as
    `informative` of `group_stats`, without tensors."""
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
    std_of_others: bool = False,
    eps: float = EPS,
) -> AdvantageEstimate:
    """Return A = r - baseline, divided by (std + eps) of the whole group if `normalize`.

    The baseline is the group's mean or, with leave_one_out, the mean of its other samples: then
    A = (r - mean) * n / (n - 1). A group with equal rewards, or with one sample, gives exactly 0. `std_of_others`: with
    leave_one_out, divide by the std of the other samples, as NeMo RL does; where these are equal A is not divided.
    Arguments as for `group_stats`. GRPO: arXiv 2402.03300, section 4.1.2.
    """
    groups = group_stats(rewards, group_ids, valid)
    advantages = groups.deviation
    if leave_one_out:
        size = groups.size[groups.index].to(torch.float64)
        advantages = advantages * size / (size - 1).clamp(min=1)
    term = advantage_term(rewards, advantages)
    if normalize:
        std = _std_of_others(groups) if leave_one_out and std_of_others else groups.std[groups.index]
        advantages = torch.where(std > 0, advantages / (std + eps), advantages)
        term = replace(term, scale=torch.where(std > 0, std + eps, 1.0))
    return AdvantageEstimate(advantages, groups, terms={"": term})


def _std_of_others(groups: GroupStats) -> Tensor:
    """Return, for each sample, the standard deviation (with n - 1) of the other valid samples of its group; exactly 0
    if these are equal. [N]"""
    squares = torch.where(groups.valid, groups.deviation.square(), 0.0)
    total = squares.new_zeros(len(groups.size)).index_add(0, groups.index, squares)[groups.index]
    size = groups.size[groups.index].to(torch.float64)
    rest = total - squares * size / (size - 1).clamp(min=1)
    rest = torch.where(rest > EQUAL_REWARDS_TOLERANCE**2 * total, rest, 0.0)  # of a lone winner only rounding is left
    return torch.where(size > 2, (rest / (size - 2).clamp(min=1)).sqrt(), 0.0)


def advantage_term(rewards: Tensor, difference: Tensor) -> AdvantageTerm:
    """Return the term of rewards whose differences to their baselines are known, [N] each, without a scale."""
    rewards = rewards.to(torch.float64)
    return AdvantageTerm(rewards, rewards - difference, torch.ones_like(rewards))


def clip_advantages(advantages: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Return the advantages clamped to [low, high]; None leaves a side open. Raises ValueError if low > high."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"advantage_clip_low={low} is above advantage_clip_high={high}")
    return advantages if low is None and high is None else advantages.clamp(low, high)
