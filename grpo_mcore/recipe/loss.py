"""`loss_fn`: the clipped policy-gradient loss. The formulas are in objective/, which reads every key here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_mcore.recipe.section import NonNegativeFloat, Positive, PositiveFloat, Section


class ClippedPGLossConfig(Section):
    """`loss_fn`. Ratio: probability of a token under the policy over that before the step's first update."""

    disable_ppo_ratio: bool = False
    """REINFORCE: the log-prob takes the place of the ratio."""
    token_level_loss: bool = True
    """Mean over all tokens of the optimizer step. false: mean over sequences of their token means."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio a sequence, the geometric mean over its tokens. Needs token_level_loss: false."""
    sequence_importance_weight: Literal["geometric_mean", "product"] = "geometric_mean"
    """The importance-sampling weight of a sequence under sequence_level_importance_ratios: the geometric mean of its
    tokens' weights, or their plain product, which shrinks or grows with the length. product needs
    use_importance_sampling_correction: true."""
    sequence_length_normalizer: Positive | None = None
    """Dr. GRPO: the sum over a sequence's tokens divided by this constant, such as max_new_tokens, then the mean over
    sequences. null: divided by the sequence's own tokens. Needs token_level_loss: false."""
    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - ratio_clip_min. 1: not clipped below."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + ratio_clip_max."""
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the ratio where the advantage is negative. null: none."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL divergence to the reference. 0: no reference is computed. Also read by algorithms/."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """The log-ratio in the KL estimator is kept within plus and minus this value. null: no bound."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """The KL estimate of a token is kept within plus and minus this value. null: no bound."""
    use_kl_in_reward: bool = False
    """The KL divergence, with weight reference_policy_kl_penalty, is taken from the reward instead of entering the
    loss. Read by algorithms/."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate of a token by its probability under the policy over that under the engine."""
    use_importance_sampling_correction: bool = False
    """Weight the loss of a token by its probability under the policy before the step over that under the
    engine."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """What happens to importance weights out of bounds: tis clamps them, icepop drops the token, seq-mask-tis
    drops the sequence by the geometric mean of its weights. null: nothing."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of the importance weight."""
    truncated_importance_sampling_ratio_by_age: list[PositiveFloat] | None = None
    """Upper bound by trajectory age, in place of truncated_importance_sampling_ratio: entry 0 for age 0 and so on, the
    last one for all older. A sequence has the age of its oldest token."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower bound of the importance weight. null: 0 with tis; icepop and seq-mask-tis need a value."""
    force_on_policy_ratio: bool = False
    """Ratio 1 with the gradient of the policy. Needs one optimizer step a step; saves a log-prob pass.
    Also read by algorithms/."""
    use_cispo: bool = False
    """CISPO: the clipped ratio is a constant weight of the log-prob."""
    positive_example_nll_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of samples with a positive reward. 0: no such term."""
    entropy_coeff: NonNegativeFloat | None = None
    """Weight of the entropy of the policy's distribution, which the loss rewards. 0: it is only computed, exactly, and
    logged as entropy. null: estimated from the sampled tokens, at no cost, as approx_entropy."""
