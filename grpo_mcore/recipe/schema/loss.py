"""`loss_fn`: the clipped policy-gradient loss. The formulas are in objective/, which reads every key of this section;
docs/objective.md explains them. validation/objective.py checks which keys go together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import (
    CustomCode,
    ImportPath,
    NameOrCode,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)

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
    force_on_policy_ratio: bool = False
    """Use the current policy, without gradient, as the previous one: the ratio is 1 and keeps its gradient. Requires
    exactly one optimizer step per RL step and saves a log-prob pass."""
    use_cispo: bool = False
    """CISPO: the clipped ratio, without gradient, weights the log-prob."""
    positive_example_nll_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of samples with a positive reward. 0: no such term."""
    entropy_coeff: NonNegativeFloat | None = None
    """Weight of the entropy bonus. 0: the exact entropy is computed and logged as entropy, but not rewarded. null: only
    an estimate from the sampled tokens is logged, as approx_entropy, at no cost."""
