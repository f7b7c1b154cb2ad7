"""Losses, advantages, rewards and metrics as pure functions on tensors."""

from grpo_mcore.objective.advantages import (
    EPS,
    AdvantageEstimate,
    GroupStats,
    clip_advantages,
    group_index,
    group_stats,
    grpo_advantages,
    overlong_filter,
    rewards_differ,
    scale_reward_values,
    shape_rewards,
)
from grpo_mcore.objective.combine import METRIC_REDUCTIONS, CombinedMetrics, combine_metrics, step_metrics
from grpo_mcore.objective.critic import (
    ValueLossFn,
    critic_columns,
    critic_metrics,
    gae,
    gae_moments,
    gae_stats,
    policy_lambda,
)
from grpo_mcore.objective.custom import (
    LOSS_INPUTS,
    CustomLoss,
    CustomPart,
    StepSamples,
    build_loss,
    check_call,
    check_custom_objective,
    custom_advantages,
    custom_shaping,
)
from grpo_mcore.objective.distillation import (
    LOG_ZERO,
    DistillationLossFn,
    Divergence,
    distillation_metrics,
    teacher_gap,
)
from grpo_mcore.objective.estimators import estimate_advantages
from grpo_mcore.objective.kl import SampleKL, kl_to_go, token_advantages
from grpo_mcore.objective.loss import ClippedPGLossFn, NLLLossFn
from grpo_mcore.objective.metrics import CORRECT, majority_at_k, mean_interval, pass_at_k, pass_numbers
from grpo_mcore.objective.policy_terms import Marking, PolicyTerm
from grpo_mcore.objective.preference import PreferenceLossFn, RewardLossFn, dpo_loss, ipo_loss, simpo_loss
from grpo_mcore.objective.reduce import MaskedTokens, valid_counts
from grpo_mcore.objective.sample_stats import nonfinite_samples, sample_stats, stats_by_sample
from grpo_mcore.objective.turn_credit import credit_by_token, difference_credit, gigpo_credit
from grpo_mcore.recipe import ClippedPGLossConfig
