"""The settings of the clipped policy-gradient loss, under the recipe's key names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from grpo_mcore.objective.refusals import (
    refuse_bad_ratio,
    refuse_bad_reduction,
    refuse_bad_truncation,
    refuse_bad_values,
    refuse_bad_weights,
)

KLType = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
SequenceWeight = Literal["geometric_mean", "product"]


@dataclass(frozen=True)
class ClippedPGLossConfig:
    """Values of the recipe's `loss_fn` section. Refused combinations raise ValueError with the reason."""

    disable_ppo_ratio: bool = False
    """REINFORCE: weight the log-prob itself by the advantage, without a ratio."""
    token_level_loss: bool = True
    """Mean over all tokens of the global batch; else the mean of each sequence, then over sequences."""
    sequence_length_normalizer: int | None = None
    """Dr. GRPO: the sum over a sequence's tokens / this constant, then the mean over sequences. None: the mean."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio a sequence, the geometric mean of its token ratios."""
    ratio_clip_min: float = 0.2
    """The ratio is clipped below at 1 - ratio_clip_min."""
    ratio_clip_max: float = 0.2
    """The ratio is clipped above at 1 + ratio_clip_max."""
    ratio_clip_c: float | None = None
    """Dual clip: for negative advantages the term is at most -advantage * ratio_clip_c. Greater than 1."""
    reference_policy_kl_penalty: float = 0.01
    """Weight of the KL to the reference. 0 switches the term off."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of the KL."""
    kl_input_clamp_value: float | None = 20.0
    """Bound on |log ratio to the reference| inside the KL estimator. None: no bound."""
    kl_output_clamp_value: float | None = 10.0
    """Bound on |KL| of a token. None: no bound."""
    use_kl_in_reward: bool = False
    """The KL penalty is taken from the advantages, so the loss has none."""
    use_importance_sampling_correction: bool = False
    """Multiply the policy term by pi_prev / pi_generation."""
    sequence_importance_weight: SequenceWeight = "geometric_mean"
    """pi_prev / pi_generation of a sequence, from those of its tokens: their geometric mean, or their product."""
    truncated_importance_sampling_type: TruncationType | None = None
    """What happens outside the bounds: tis clamps the weight, icepop drops tokens, seq-mask-tis sequences."""
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of the weight."""
    truncated_importance_sampling_ratio_by_age: Sequence[float] | None = None
    """Upper bounds by trajectory age: entry min(age, last). Takes the place of truncated_importance_sampling_ratio."""
    truncated_importance_sampling_ratio_min: float | None = None
    """Lower bound of the weight (tis: 0 where not given)."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL by pi_theta / pi_generation."""
    force_on_policy_ratio: bool = False
    """Take the current policy, without gradient, as the previous one: the ratio is 1 in value."""
    use_cispo: bool = False
    """CISPO: the clipped ratio, without gradient, weights the log-prob."""
    positive_example_nll_weight: float = 0.0
    """Weight of the negative log-likelihood of samples with a positive reward. 0 switches the term off."""
    entropy_coeff: float | None = None
    """Weight of the entropy bonus. 0: the entropy is a metric only. None: it is not computed."""

    @classmethod
    def from_any(cls, source: Any) -> ClippedPGLossConfig:
        """The config from a mapping, or from any object with these attributes (a missing one is default)."""
        if isinstance(source, cls):
            return source
        names = {field.name for field in fields(cls)}
        if isinstance(source, Mapping):
            unknown = sorted(set(source) - names)
            if unknown:
                raise ValueError(f"loss_fn: unknown key {unknown[0]!r}; the keys are: {', '.join(sorted(names))}")
            return cls(**source)
        values = {name: getattr(source, name) for name in names if hasattr(source, name)}
        if not values:
            raise TypeError(f"loss_fn: {type(source).__name__} has none of the attributes of ClippedPGLossConfig")
        return cls(**values)

    def __post_init__(self) -> None:
        by_age = self.truncated_importance_sampling_ratio_by_age
        if by_age is not None:
            object.__setattr__(self, "truncated_importance_sampling_ratio_by_age", tuple(by_age))
        refuse_bad_values(self)
        refuse_bad_ratio(self)
        refuse_bad_reduction(self)
        refuse_bad_weights(self)
        refuse_bad_truncation(self)
