"""`grpo`: the RL loop."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from grpo_mcore.recipe.section import (
    NonNegative,
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    PositiveFloat,
    Probability,
    Section,
)


def _weights(value: Any) -> Any:
    entries = list(value.values()) if isinstance(value, dict) else value
    if entries is not None and not (
        isinstance(entries, list)
        and entries
        and all(type(entry) in (int, float) and math.isfinite(entry) for entry in entries)
    ):
        raise ValueError("expected numbers by reward name, a list of numbers or null")
    return value


# Checked at once: the union below would answer with a message for each of its members.
_WEIGHTS = BeforeValidator(_weights)


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
    """`grpo.reward_shaping`: penalties for answers that are too long, after scaling. Read by objective/."""

    enabled: bool = False
    """Shape rewards."""
    overlong_buffer_length: Positive = 128
    """Generated tokens before max_response_length over which the penalty grows from 0 to its largest."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Largest penalty; it is taken from the reward. 0: none."""
    max_response_length: Positive | None = None
    """Generated tokens at which the penalty is largest. null: policy.max_total_sequence_length."""
    stop_properly_penalty_coef: Probability | None = None
    """Factor on the reward of truncated samples; with it nothing is taken for length. null: no factor."""


class AdvEstimatorConfig(Section):
    """`grpo.adv_estimator`: how rewards become advantages. Read by objective/."""

    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gdpo", "opd"] = "grpo"
    """The estimator. grpo: relative to the group. dr_grpo: reward minus group mean, no more. rloo: reward minus the
    mean of the others. reinforce_plus_plus: standardised over all trained tokens of the step. gdpo: each named
    reward by itself, then summed. opd: not supported yet."""
    normalize_rewards: bool | None = None
    """Divide by the standard deviation of the group; grpo and gdpo have the choice. null: grpo.normalize_rewards."""
    use_leave_one_out_baseline: bool | None = None
    """Baseline without the sample itself; grpo and gdpo have the choice. null: grpo.use_leave_one_out_baseline."""
    minus_baseline: bool = True
    """Subtract the group's mean before standardising; false takes the rewards as they are. Only
    reinforce_plus_plus has the choice."""
    reward_weights: Annotated[dict[str, float] | list[float] | None, _WEIGHTS] = None
    """Weights of the named rewards, for gdpo: by name, or in the order of the sorted names. null: all 1."""


class AsyncGRPOConfig(Section):
    """`grpo.async_grpo`: engines generate for later steps while the policy trains. All of it is inert while enabled is
    false."""

    enabled: bool = False
    """Generate ahead of training. Needs loss_fn.use_importance_sampling_correction: true."""
    max_trajectory_age_steps: NonNegative = 1
    """Oldest trajectory that is trained on, in weight versions; so many steps ahead prompts are generated. 0: none, as
    if enabled were false."""
    max_groups_in_flight: Positive | None = None
    """Most groups that are generated, or wait to be trained on, at one time. null: what the age allows,
    num_prompts_per_step x (1 + max_trajectory_age_steps)."""
    max_buffer_gb: PositiveFloat | None = None
    """Most that groups may take of the object store, in GiB: those that wait to be trained on, and each one under way
    as much as the largest so far. Nothing new is dispatched beyond it, but for a step's prompts. null: no bound."""
    group_order: Literal["in_order", "oldest_first", "freshest_first"] = "in_order"
    """Which groups a step takes. in_order: those dispatched first, and it waits for them. The others take what is
    finished, by weight version, and wait only for groups that would get too old; so they prefer short answers."""
    max_generation_failures: NonNegative = 0
    """Failed generation calls in a row that are tolerated: their groups are generated anew, as a whole. One more
    ends the run."""
    in_flight_weight_updates: bool = False
    """Refit while engines generate: samples under way go on with the new weights. false: they are finished first."""
    recompute_kv_cache_after_weight_updates: bool = False
    """What the old weights computed of samples under way is computed again after a refit. Only with
    in_flight_weight_updates."""

    min_samples_per_group: Annotated[int, Field(ge=2)] | None = None
    """A group is finished with so many of its samples, whichever come first, and the others are given up: a step does
    not wait for the longest, and prefers short answers. null: all num_generations_per_prompt."""
    partial_rollouts: bool = False
    """Engines that share the policy's devices stand still while it trains, and on GPUs give it their memory; samples
    under way go on after the refit. With group_order oldest_first and max_groups_in_flight below what the age allows no
    step waits for its longest samples. Only with in_flight_weight_updates."""

    @property
    def pauses(self) -> bool:
        """Whether samples under way stand still while the policy trains."""
        return self.partial_rollouts and self.max_age > 0

    @property
    def max_age(self) -> int:
        """The age limit in force, in weight versions."""
        return self.max_trajectory_age_steps if self.enabled else 0


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
    """Largest number of generated turns of a trajectory. An environment may end it earlier."""
    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of their group, where the estimator has the choice. Read by
    objective/."""
    use_leave_one_out_baseline: bool = True
    """The baseline of a sample is the mean reward of the others of its group, not of all, where the estimator has the
    choice. Read by objective/."""
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
    """Samples of one prompt in validation. Above 1, pass@k is reported too: k = 1, 2, 4, ... and this number."""
    stop_at_validation_metric: str | None = None
    """Validation metric, as it is printed (such as accuracy, pass@4 or TASK/accuracy, with or without `val:`), that
    ends the run once it is at or above the threshold. There is no such end for metrics that should get low."""
    stop_at_validation_threshold: float | None = None
    """Value of stop_at_validation_metric that ends the run."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Do not compute reference log-probs. Needs loss_fn.reference_policy_kl_penalty 0, which skips them
    anyway."""
    seed: int = 42
    """Origin of all seeds: data order and, with step, prompt and generation index, sampling."""
    overlong_filtering: bool = False
    """Truncated samples do not enter the loss. Read by objective/."""
    use_dynamic_sampling: bool = False
    """Train only on groups whose rewards differ, as given by the environment, and go on generating until there are
    num_prompts_per_step of them. Prompts that are too many are generated anew later."""
    dynamic_sampling_max_gen_batches: Positive = 10
    """Largest number of batches generated for one step; if they are not enough, the run ends. Inert while
    use_dynamic_sampling is false."""
    batch_multiplier: Annotated[float, Field(ge=1)] = 1.0
    """Prompts of one generation batch over num_prompts_per_step. Above 1 only with use_dynamic_sampling."""
    seq_logprob_error_threshold: Annotated[float, Field(gt=1)] | None = None
    """Leave out samples whose probabilities differ more than this between engine and policy: the mean over their
    tokens of exp|difference of log-probs|, which is 1 where they agree. null: none is left out."""
    reward_scaling: Annotated[RewardScalingConfig, OffWhenNull] = Field(default_factory=RewardScalingConfig)
    """Linear scaling of rewards."""
    reward_shaping: Annotated[RewardShapingConfig, OffWhenNull] = Field(default_factory=RewardShapingConfig)
    """Penalties for long answers."""
    adv_estimator: Annotated[AdvEstimatorConfig, OffWhenNull] = Field(default_factory=AdvEstimatorConfig)
    """How rewards become advantages."""
    async_grpo: Annotated[AsyncGRPOConfig, OffWhenNull] = Field(default_factory=AsyncGRPOConfig)
    """Generation ahead of training."""
