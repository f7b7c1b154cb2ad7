"""Losses, advantages, rewards and metrics as pure functions on tensors."""

from __future__ import annotations

from grpo_mcore.objective.advantages import (
    AdvantageEstimate,
    GroupStats,
    clip_advantages,
    group_index,
    group_stats,
    grpo_advantages,
)
from grpo_mcore.objective.combine import METRIC_REDUCTIONS, CombinedMetrics, combine_metrics, step_metrics
from grpo_mcore.objective.estimators import RewardWeights, estimate_advantages, weights_by_name
from grpo_mcore.objective.kl_in_reward import SampleKL, kl_to_go, token_advantages
from grpo_mcore.objective.loss import ClippedPGLossFn, NLLLossFn
from grpo_mcore.objective.metrics import CORRECT, pass_at_k, pass_numbers
from grpo_mcore.objective.reduce import valid_counts
from grpo_mcore.objective.rewards import overlong_filter, scale_reward_values, shape_rewards
from grpo_mcore.objective.sample_stats import nonfinite_samples, sample_stats
from grpo_mcore.recipe import ClippedPGLossConfig

__all__ = [
    "METRIC_REDUCTIONS", "CORRECT", "AdvantageEstimate", "ClippedPGLossConfig", "ClippedPGLossFn", "CombinedMetrics",
    "GroupStats", "NLLLossFn", "RewardWeights", "SampleKL", "clip_advantages", "combine_metrics",
    "estimate_advantages", "group_index", "group_stats", "grpo_advantages", "kl_to_go", "nonfinite_samples",
    "overlong_filter", "pass_at_k", "pass_numbers", "sample_stats", "scale_reward_values", "shape_rewards",
    "step_metrics", "token_advantages", "valid_counts", "weights_by_name",
]  # fmt: skip
