"""`grpo`: the RL loop. `loss_fn`: the clipped policy-gradient loss. The formulas are in objective/, which reads every
key of `loss_fn`; docs/objective.md explains them. validation/objective.py checks which keys go together."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from grpo_mcore.recipe.schema.section import (
    CustomCode,
    Fixed,
    ImportPath,
    NameOrCode,
    NonNegative,
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    Seed,
)

PolicyTermName = Literal[
    "clip", "masked", "flash_reinforce", "sapo", "dppo_tv", "dppo_kl", "gmpo", "vespo", "dro", "clip_cov", "kl_cov"
]
POLICY_TERM_OPTIONS: dict[str, dict[str, float]] = {
    "flash_reinforce": {"max_kl": 0.005},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "dppo_tv": {"max_ratio": 20.0},
    "dppo_kl": {"max_ratio": 20.0},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "dro": {"beta": 1.0},
    "clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
    "kl_cov": {"share": 2e-4, "beta": 1.0},
}
"""Names and defaults of loss_fn.policy_term_options by policy term; a term without a row has none."""
KLType = Annotated[str | CustomCode, NameOrCode(("k1", "k2", "k3"))]


class ClippedPGLossConfig(Section):
    """`loss_fn`. The ratio of a token is its probability under the policy over that before the step's first update.
    Its importance weight is its probability before the step's first update over that under the engine."""

    path: ImportPath | None = None
    """Import path of a custom loss: a class derived from ClippedPGLossFn, or a function (docs/extending.md). null:
    the loss that this section describes."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function or class at path."""
    disable_ppo_ratio: bool = False
    """REINFORCE: weight the log-prob itself by the advantage, without a ratio."""
    token_level_loss: bool = True
    """Mean over all tokens of the optimizer step. false: mean over sequences of their token means."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio per sequence, the geometric mean of its token ratios. Needs token_level_loss: false."""
    sequence_importance_weight: Literal["geometric_mean", "product"] = "geometric_mean"
    """Importance weight of a sequence under sequence_level_importance_ratios: the geometric mean of its tokens'
    weights, or their product, which shrinks or grows with the length. product needs
    use_importance_sampling_correction: true."""
    sequence_length_normalizer: Positive | None = None
    """Dr. GRPO: divide the sum over a sequence's tokens by this constant, such as max_new_tokens, then take the mean
    over sequences. null: divide by the number of the sequence's own tokens. Needs token_level_loss: false."""
    policy_term: PolicyTermName = "clip"
    """Term of each token. clip: the clipped ratio and its variants below. masked: tokens outside of the clip's bounds
    are dropped. flash_reinforce: sequences that the policy has left behind are dropped. sapo: a soft gate. dppo_tv,
    dppo_kl: dropped where the token's probability has moved too far. gmpo: geometric mean of clipped ratios, needs
    token_level_loss: false. vespo: a smooth weight by sequence. dro: a quadratic penalty. clip_cov, kl_cov: a share of
    the tokens, of high covariance of log-prob and advantage, is dropped or held. Formulas and papers:
    docs/objective.md."""
    policy_term_options: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Options of policy_term that differ from their defaults. flash_reinforce: max_kl 0.005. sapo: tau_pos 1, tau_neg
    1.05. dppo_tv, dppo_kl: max_ratio 20. vespo: k_pos 2, lambda_pos 3, k_neg 3, lambda_neg 2. dro: beta 1. clip_cov:
    share 2e-4, low 1, high 5. kl_cov: share 2e-4, beta 1."""
    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower clip: the ratio is at least 1 - ratio_clip_min. 1: no lower clip."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """Upper clip: the ratio is at most 1 + ratio_clip_max."""
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: upper bound of the ratio where the advantage is negative. null: none."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL divergence to the reference. 0: the reference is not computed."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of the KL divergence, or a custom one: docs/extending.md."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Bound on the absolute log-ratio inside the KL estimator. null: no bound."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Bound on the absolute KL estimate of a token. null: no bound."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence, with weight reference_policy_kl_penalty, from the reward instead of adding it to the
    loss."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate of a token by its probability under the policy over that under the engine."""
    use_importance_sampling_correction: bool = False
    """Multiply the policy term of a token by its importance weight."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """Treatment of importance weights out of bounds: tis clamps them, icepop drops the token, seq-mask-tis drops the
    sequence by the geometric mean of its weights. null: no bounds."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of the importance weight."""
    truncated_importance_sampling_ratio_by_age: list[PositiveFloat] | None = None
    """Upper bounds by trajectory age, instead of truncated_importance_sampling_ratio: entry 0 for age 0 and so on, the
    last entry for all older ages. A sequence has the age of its oldest token."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower bound of the importance weight. null: 0 with tis; icepop and seq-mask-tis need a value."""
    ratio_to_engine: bool = False
    """The ratio of a token is its probability under the policy over that under the engine that drew it, which saves the
    log-prob pass before the first update. Such a ratio is its own correction for older weights."""
    force_on_policy_ratio: bool = False
    """Use the current policy, without gradient, as the previous one: the ratio is 1 and keeps its gradient. Requires
    exactly one optimizer step per RL step and saves a log-prob pass."""
    use_cispo: bool = False
    """CISPO: the clipped ratio, without gradient, weights the log-prob."""
    positive_example_nll_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of samples with a positive reward. 0: no such term."""
    positive_example_nll_divisor: Literal["all", "micro_batch"] = "all"
    """Divisor of that sum. all: all tokens that the optimizer step trains on. micro_batch: the tokens of positive
    samples in each micro-batch of a rank, as in NeMo RL; the term then grows with the number of micro-batches and
    ranks."""
    entropy_coeff: NonNegativeFloat | None = None
    """Weight of the entropy bonus. 0: the exact entropy is computed and logged as entropy, but not rewarded. null: only
    an estimate from the sampled tokens is logged, as approx_entropy, at no cost."""


def policy_term_options(loss: ClippedPGLossConfig) -> dict[str, float]:
    """Return all options of the loss's policy term: its defaults, and what the recipe says."""
    return POLICY_TERM_OPTIONS.get(loss.policy_term, {}) | loss.policy_term_options


def _weights(value: Any) -> Any:
    entries = list(value.values()) if isinstance(value, dict) else value
    if entries is not None and not (
        isinstance(entries, list)
        and entries
        and all(type(entry) in (int, float) and math.isfinite(entry) for entry in entries)
    ):
        raise ValueError("expected numbers by reward name, a list of numbers or null")
    return value


# Checked before the union below, which would report an error for each of its members.
_WEIGHTS = BeforeValidator(_weights)


class RewardScalingConfig(Section):
    """`grpo.reward_scaling`: clamp rewards to the source interval, then map it linearly to the target
    interval."""

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
    """`grpo.reward_shaping`: penalties for answers that are too long, applied after scaling, or a custom function."""

    enabled: bool = False
    """Shape rewards."""
    path: ImportPath | None = None
    """Import path of a custom function that shapes rewards, instead of the penalties: docs/extending.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function at path."""
    overlong_buffer_length: Positive = 128
    """Number of generated tokens, ending at max_response_length, over which the penalty grows from 0 to its maximum."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Maximum penalty, subtracted from the reward. 0: none."""
    max_response_length: Positive | None = None
    """Number of generated tokens from which the penalty is at its maximum. null: policy.max_total_sequence_length."""
    stop_properly_penalty_coef: Probability | None = None
    """Factor on the reward of truncated samples, instead of the penalty on length. null: no factor."""


class AdvEstimatorConfig(Section):
    """`grpo.adv_estimator`: how rewards become advantages."""

    name: Literal[
        "grpo", "dr_grpo", "rloo", "remax", "maxrl", "opo", "gfpo", "reinforce_plus_plus", "flash_reinforce", "gdpo",
        "opd",
    ] = "grpo"  # fmt: skip
    """Estimator. grpo: relative to the group. dr_grpo: reward minus the group's mean. rloo: reward minus the mean of
    the others. remax: reward minus that of the group's first sample, which is decoded greedily and not trained on.
    maxrl: reward minus the group's mean, divided by this mean. opo: reward minus the group's mean weighted by length.
    gfpo: grpo within `keep` samples of each group. reinforce_plus_plus: standardised over all trained tokens of the
    step. flash_reinforce: reward minus the mean of the step, for groups of 1. gdpo: each named reward by itself, then
    summed. opd: log-prob of the teacher minus the policy's, token by token (on_policy_distillation)."""
    path: ImportPath | None = None
    """Import path of a custom estimator, in place of the one that is named: docs/extending.md."""
    opd_weight: NonNegativeFloat = 0.0
    """Weight of the teacher's log-prob minus the policy's, added to the advantage of each token. For every estimator
    but opd, whose weight is 1. Above 0 it needs on_policy_distillation."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function at path."""
    normalize_rewards: bool | None = None
    """Divide by the standard deviation of the group. Only for grpo and gdpo. null: grpo.normalize_rewards."""
    use_leave_one_out_baseline: bool | None = None
    """Leave the sample itself out of its baseline. Only for grpo and gdpo. null: grpo.use_leave_one_out_baseline."""
    std_of_others: bool = False
    """With use_leave_one_out_baseline, divide by the standard deviation of the other samples of the group, as NeMo RL
    does; where these are equal, do not divide. false: that of the whole group. Only for grpo and gdpo."""
    keep: Annotated[int, Field(ge=2)] | None = None
    """Number of samples of each group that are trained on. Only for gfpo, which needs it."""
    keep_by: Literal["length", "token_efficiency"] = "length"
    """Which samples gfpo keeps: the shortest, or those with the highest reward per token."""
    minus_baseline: bool = True
    """Subtract the group's mean before standardising. false: use the rewards as they are, only for
    reinforce_plus_plus."""
    reward_weights: Annotated[dict[str, float] | list[float] | None, _WEIGHTS] = None
    """Weights of the named rewards, for gdpo only: by name, or in the order of the sorted names. null: all 1."""


class TurnCreditConfig(Section):
    """`grpo.turn_credit`: credit of single turns, added to the advantages of their tokens."""

    weight: NonNegativeFloat = 0.0
    """Weight of a turn's credit in the advantage of its tokens. 0: no credit by turn."""
    gamma: Probability = 0.95
    """Discount for each turn: with difference, of the share that a turn has in a later increase; with gigpo, of later
    rewards."""
    mode: Literal["difference", "gigpo"] = "difference"
    """difference: what the environment's turn_rewards, scores of the state after each turn, increase by. gigpo: turns
    of a group that were taken in the same state are compared by the rewards that follow."""


class AsyncGRPOConfig(Section):
    """`grpo.async_grpo`: engines generate for later steps while the policy trains. No key has an effect while enabled
    is false."""

    enabled: bool = False
    """Generate ahead of training. Needs loss_fn.use_importance_sampling_correction: true."""
    max_trajectory_age_steps: NonNegative = 1
    """Maximum age of a trajectory that is trained on, in weight versions, and maximum number of steps that generation
    is ahead. 0: same as enabled: false."""
    max_groups_in_flight: Positive | None = None
    """Maximum number of groups that are being generated or wait to be trained on. null: what the age allows,
    num_prompts_per_step x (1 + max_trajectory_age_steps)."""
    max_buffer_gb: PositiveFloat | None = None
    """Maximum size of groups in the object store, in GiB. Groups in generation count as much as the largest group so
    far. Beyond it only the prompts of the next step are dispatched. null: no limit."""
    group_order: Literal["in_order", "oldest_first", "freshest_first"] = "in_order"
    """Order in which steps take groups. in_order: as they were dispatched; a step waits for them. oldest_first and
    freshest_first: finished groups by weight version; a step waits only for groups that would become too old, so short
    answers are preferred."""
    max_generation_failures: NonNegative = 0
    """Maximum number of failed generation calls in a row. Their groups are generated again as a whole; one more failure
    ends the run."""
    in_flight_weight_updates: bool = False
    """Refit while engines generate: unfinished samples continue with the new weights. false: finish them first."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Compute the KV cache of unfinished samples again after a refit. Only with in_flight_weight_updates."""
    min_samples_per_group: Annotated[int, Field(ge=2)] | None = None
    """Number of samples with which a group is finished, whichever come first; the others are abandoned. A step then
    does not wait for the longest answers, so short ones are preferred. null: all num_generations_per_prompt."""
    partial_rollouts: bool = False
    """Pause unfinished samples while the policy trains on the engines' devices, and resume them after the refit. On
    GPUs the engines free their memory in between. With group_order oldest_first and max_groups_in_flight below what the
    age allows, no step waits for its longest samples. Only with in_flight_weight_updates."""

    @property
    def pauses(self) -> bool:
        """Whether unfinished samples are paused while the policy trains."""
        return self.partial_rollouts and self.max_age > 0

    @property
    def max_age(self) -> int:
        """Maximum trajectory age in weight versions; 0 unless enabled."""
        return self.max_trajectory_age_steps if self.enabled else 0


class GRPOConfig(Section):
    """`grpo`."""

    num_prompts_per_step: Positive = 32
    """Number of prompts of one step."""
    num_generations_per_prompt: Positive = 16
    """Number of samples of one prompt, which form its group."""
    max_num_epochs: Positive = 1
    """Maximum number of passes over the training data."""
    max_num_steps: NonNegative = 1_000_000
    """Maximum number of steps. 0: only validate, if val_at_start or val_at_end says so."""
    max_rollout_turns: Positive = 1
    """Maximum number of generated turns of a trajectory. An environment may end it earlier."""
    turns: Literal["free", "together"] | None = None
    """When a sample continues with its next turn. free: a turn is scored as soon as it is generated, and the next one
    starts as soon as the environment has answered. together: a group is scored when all its samples are generated, and
    the samples of one step on one engine start each turn together, so that a rerun gives an engine equal batches. null:
    free; together where cluster.backend is local."""
    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of their group, for estimators with this option."""
    use_leave_one_out_baseline: bool = True
    """Use the mean reward of the group's other samples as baseline, not of all, for estimators with this option."""
    advantage_clip_low: float | None = None
    """Lower bound of the advantages. null: none."""
    advantage_clip_high: float | None = None
    """Upper bound of the advantages. null: none."""
    invalid_tool_call_advantage: float | None = None
    """Advantage, before clipping, of the tokens of messages in which a Gym's agent left a tool call as text. null: that
    of the sample."""
    malformed_thinking_advantage: float | None = None
    """Advantage, before clipping, of the tokens of a Gym's messages whose text contains a mark of reasoning. null: that
    of the sample."""
    val_period: NonNegative = 10
    """Steps between two validations. 0: never."""
    val_start_at: Annotated[int, Field(ge=-1)] = -1
    """First step at which a periodic validation may happen. -1: the first step."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    val_batch_size: Positive | None = 256
    """Maximum number of prompts in generation at one time in validation. null: all."""
    max_val_samples: Positive | None = 256
    """Maximum number of prompts of one validation. null: the whole validation data."""
    val_num_generations_per_prompt: Positive = 1
    """Number of samples of one prompt in validation. Above 1, pass@k is reported too: k = 1, 2, 4, ... and this
    number."""
    stop_at_validation_metric: str | None = None
    """Validation metric that ends the run once it is at or above stop_at_validation_threshold, under the name that is
    printed: accuracy, pass@4 or TASK/accuracy, with or without `val:`. Only for metrics that should rise."""
    stop_at_validation_threshold: float | None = None
    """Value of stop_at_validation_metric that ends the run."""
    skip_reference_policy_logprobs_calculation: bool = False
    """State that no reference log-probs are computed. Needs loss_fn.reference_policy_kl_penalty: 0, which skips them
    anyway."""
    seed: Fixed[Seed] = 42
    """Seed of the data order and, together with step, prompt and generation index, of sampling."""
    overlong_filtering: bool = False
    """Leave truncated samples out of the loss."""
    use_dynamic_sampling: bool = False
    """Train only on groups whose rewards, as given by the environment, differ. Generation continues until there are
    num_prompts_per_step of them; surplus prompts are generated again later."""
    dynamic_sampling_max_gen_batches: Positive = 10
    """Maximum number of batches generated for one step; if they are not enough, the run ends. No effect without
    use_dynamic_sampling."""
    dynamic_sampling_min_range: NonNegativeFloat = 0.0
    """Highest difference between the largest and the smallest reward of a group that dynamic sampling drops. No effect
    without use_dynamic_sampling."""
    batch_multiplier: Annotated[float, Field(ge=1)] = 1.0
    """Number of prompts of one generation batch, as a multiple of num_prompts_per_step. Above 1 only with
    use_dynamic_sampling."""
    seq_logprob_error_threshold: Annotated[float, Field(gt=1)] | None = None
    """Leave samples out of the loss whose probabilities differ by more than this between engine and policy: the mean of
    exp|difference of log-probs| over their tokens, which is 1 if they agree. null: keep all."""
    reward_scaling: Annotated[RewardScalingConfig, OffWhenNull] = Field(default_factory=RewardScalingConfig)
    """Linear scaling of rewards."""
    reward_shaping: Annotated[RewardShapingConfig, OffWhenNull] = Field(default_factory=RewardShapingConfig)
    """Penalties for long answers."""
    adv_estimator: Annotated[AdvEstimatorConfig, OffWhenNull] = Field(default_factory=AdvEstimatorConfig)
    """How rewards become advantages."""
    turn_credit: Annotated[TurnCreditConfig, OffWhenNull] = Field(default_factory=TurnCreditConfig)
    """Credit by turn, for samples of several turns."""
    async_grpo: Annotated[AsyncGRPOConfig, OffWhenNull] = Field(default_factory=AsyncGRPOConfig)
    """Generation ahead of training."""
