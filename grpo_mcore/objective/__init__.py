"""The objective: losses, advantages, rewards and metrics as pure functions on tensors."""

from __future__ import annotations

from grpo_mcore.objective.advantages import (
    Advantages,
    GroupStats,
    clip_advantages,
    group_index,
    group_stats,
    grpo_advantages,
)
from grpo_mcore.objective.checks import nonfinite_samples
from grpo_mcore.objective.config import ClippedPGLossConfig
from grpo_mcore.objective.loss import ClippedPGLossFn
from grpo_mcore.objective.metrics import METRIC_REDUCTIONS, combine_metrics, without_empty_extremes
from grpo_mcore.objective.reduce import valid_counts
from grpo_mcore.objective.rewards import overlong_filter, scale_reward_values
from grpo_mcore.objective.sft_loss import NLLLossFn

__all__ = [
    "METRIC_REDUCTIONS",
    "Advantages",
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "GroupStats",
    "NLLLossFn",
    "clip_advantages",
    "combine_metrics",
    "group_index",
    "group_stats",
    "grpo_advantages",
    "nonfinite_samples",
    "overlong_filter",
    "scale_reward_values",
    "valid_counts",
    "without_empty_extremes",
]
