"""Reward scaling and sample masks, on plain tensors."""

from __future__ import annotations

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
    """Rewards clamped to [source_min, source_max] and mapped linearly to [target_min, target_max], dtype
    kept.

    NaN (a failed sample) stays NaN. Raises ValueError if the source range is empty.
    """
    if source_max <= source_min:
        raise ValueError(f"reward_scaling.source_max={source_max} must exceed source_min={source_min}")
    share = (rewards.to(torch.float64).clamp(source_min, source_max) - source_min) / (source_max - source_min)
    # This form, unlike a + share * (b - a), hits both ends of the target range exactly.
    return (target_min * (1 - share) + target_max * share).to(rewards.dtype)


def overlong_filter(sample_mask: Tensor, truncated: Tensor) -> Tensor:
    """sample_mask [N] with 0 for samples cut off at the length limit (truncated, bool [N]); dtype kept."""
    return torch.where(truncated.to(torch.bool), torch.zeros_like(sample_mask), sample_mask)
