"""Reward scaling and shaping, and sample masks, on plain tensors."""

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
