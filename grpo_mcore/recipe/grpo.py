"""`grpo`: the RL loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_mcore.recipe.section import (
    NonNegative,
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    PositiveFloat,
    Section,
)


class RewardScalingConfig(Section):
    """`grpo.reward_scaling`: clamp rewards to the source interval, then map it linearly to the target
    interval. Read by objective/."""

    enabled: bool = False
    """Scale rewards."""
    source_min: float = 0.0
    """Lower end of the source interval."""
    source_max: float = 1.0
    """Upper end of the source interval."""
    target_min: float = 0.0
    """Lower end of the target interval."""
    target_max: float = 1.0
    """Upper end of the target interval."""


class RewardShapingConfig(Section):
    """`grpo.reward_shaping`: penalties for answers that are too long. Not supported yet."""

    enabled: bool = False
    """Shape rewards. Not supported yet."""
    overlong_buffer_length: Positive = 128
    """Tokens before max_response_length over which the penalty grows."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Largest penalty."""
    max_response_length: Positive | None = None
    """Length, in tokens, at which the penalty is largest. null: policy.max_total_sequence_length."""
    stop_properly_penalty_coef: NonNegativeFloat | None = None
    """Factor on the reward of truncated samples. null: none."""


class AdvEstimatorConfig(Section):
    """`grpo.adv_estimator`: how rewards become advantages."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"] = "grpo"
    """The estimator. Only grpo is supported yet."""


class AsyncGRPOConfig(Section):
    """`grpo.async_grpo`: generation runs ahead of training. Not supported yet."""

    enabled: bool = False
    """Generate while training. Not supported yet."""
    max_trajectory_age_steps: NonNegative = 1
    """Oldest trajectory that is trained on, in weight versions. Inert while enabled is false."""
    max_generation_failures: NonNegative = 0
    """Failed generations in a row that are tolerated. Inert while enabled is false."""
    in_flight_weight_updates: bool = False
    """Refit without waiting for running generations. Inert while enabled is false."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Drop the engines' KV cache after a refit. Inert while enabled is false."""


class GRPOConfig(Section):
    """`grpo`. Read by algorithms/ unless said otherwise."""

    num_prompts_per_step: Positive = 32
    """Prompts of one step."""
    num_generations_per_prompt: Positive = 16
    """Samples of one prompt: the group."""
    max_num_epochs: Positive = 1
    """Passes over the training data."""
    max_num_steps: Positive = 1_000_000
    """Largest number of steps."""
    max_rollout_turns: Positive = 1
    """Largest number of turns of a trajectory. Above 1: not supported yet."""
    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of their group. Read by objective/."""
    use_leave_one_out_baseline: bool = True
    """The baseline of a sample is the mean reward of the others of its group, not of all. Read by
    objective/."""
    advantage_clip_low: float | None = None
    """Lower bound of the advantages. null: none. Read by objective/."""
    advantage_clip_high: float | None = None
    """Upper bound of the advantages. null: none. Read by objective/."""
    val_period: NonNegative = 10
    """Validate every so many steps. 0: never."""
    val_start_at: Annotated[int, Field(ge=-1)] = -1
    """First step at which the periodic validation may happen. -1: the first."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    val_batch_size: Positive | None = 256
    """Prompts in generation at one time in validation. null: all of them."""
    max_val_samples: Positive | None = 256
    """Prompts of one validation. null: the whole validation data."""
    val_num_generations_per_prompt: Positive = 1
    """Samples of one prompt in validation. Above 1 the share of prompts with a right one is reported too."""
    stop_at_validation_metric: str | None = None
    """Validation metric that ends the run once it reaches the threshold. Not supported yet."""
    stop_at_validation_threshold: float | None = None
    """Threshold of stop_at_validation_metric. Not supported yet."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Do not compute reference log-probs. Needs loss_fn.reference_policy_kl_penalty 0, which skips them
    anyway."""
    seed: int = 42
    """Origin of all seeds: data order and, with step, prompt and generation index, sampling."""
    overlong_filtering: bool = False
    """Truncated samples do not enter the loss. Read by objective/."""
    use_dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by new ones. Not supported yet."""
    dynamic_sampling_max_gen_batches: Positive = 10
    """Largest number of batches generated for one step. Inert while use_dynamic_sampling is false."""
    batch_multiplier: PositiveFloat = 1.0
    """Prompts generated over prompts trained on. Other than 1: not supported yet."""
    seq_logprob_error_threshold: PositiveFloat | None = None
    """Leave out samples whose log-probs differ this much between engine and policy. Not supported yet."""
    reward_scaling: Annotated[RewardScalingConfig, OffWhenNull] = Field(default_factory=RewardScalingConfig)
    """Linear scaling of rewards."""
    reward_shaping: Annotated[RewardShapingConfig, OffWhenNull] = Field(default_factory=RewardShapingConfig)
    """Penalties for long answers. Not supported yet."""
    adv_estimator: Annotated[AdvEstimatorConfig, OffWhenNull] = Field(default_factory=AdvEstimatorConfig)
    """How rewards become advantages."""
    async_grpo: Annotated[AsyncGRPOConfig, OffWhenNull] = Field(default_factory=AsyncGRPOConfig)
    """Generation ahead of training. Not supported yet."""
