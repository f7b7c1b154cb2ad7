"""The settings of the clipped policy-gradient loss, under the recipe's key names, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

KLType = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True)
class ClippedPGLossConfig:
    """Values of the recipe's `loss_fn` section. Refused combinations raise ValueError with the reason."""

    disable_ppo_ratio: bool = False
    """REINFORCE: weight the log-prob itself by the advantage, without a ratio."""
    token_level_loss: bool = True
    """Mean over all tokens of the global batch; else the mean of each sequence, then over sequences."""
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
    truncated_importance_sampling_type: TruncationType | None = None
    """What happens outside the bounds: tis clamps the weight, icepop drops tokens, seq-mask-tis sequences."""
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of the weight."""
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

    @classmethod
    def from_any(cls, source: Any) -> ClippedPGLossConfig:
        """The config from a mapping, or from any object with these attributes (a missing one is default)."""
        if isinstance(source, cls):
            return source
        names = {field.name for field in fields(cls)}
        if isinstance(source, Mapping):
            unknown = sorted(set(source) - names)
            if unknown:
                raise ValueError(
                    f"loss_fn: unknown key {unknown[0]!r}; the keys are: {', '.join(sorted(names))}"
                )
            return cls(**source)
        values = {name: getattr(source, name) for name in names if hasattr(source, name)}
        if not values:
            raise TypeError(
                f"loss_fn: {type(source).__name__} has none of the attributes of ClippedPGLossConfig"
            )
        return cls(**values)

    def __post_init__(self) -> None:
        self._check_values()
        self._check_ratio()
        self._check_truncation()

    def _check_values(self) -> None:
        _require(
            self.reference_policy_kl_type in ("k1", "k2", "k3"),
            f"reference_policy_kl_type is {self.reference_policy_kl_type!r}; choose k1, k2 or k3",
        )
        for name in (
            "ratio_clip_min",
            "ratio_clip_max",
            "reference_policy_kl_penalty",
            "positive_example_nll_weight",
        ):
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
            value = getattr(self, name)
            _require(
                value is None or value > 0, f"{name} is {value}; it must be positive, or null for no bound"
            )

    def _check_ratio(self) -> None:
        _require(
            self.ratio_clip_c is None or self.ratio_clip_c > 1,
            f"ratio_clip_c is {self.ratio_clip_c}; it must exceed 1, or it cuts ratios that did not move",
        )
        _require(
            self.ratio_clip_c is None or not self.disable_ppo_ratio,
            "ratio_clip_c bounds a ratio, and disable_ppo_ratio leaves none: unset one of them",
        )
        _require(
            not self.sequence_level_importance_ratios or not self.token_level_loss,
            "sequence_level_importance_ratios (GSPO) defines one term a sequence: set token_level_loss=false",
        )
        if not self.use_cispo:
            return
        for name, reason in (
            (
                "disable_ppo_ratio",
                "CISPO weights tokens by the clipped ratio, which disable_ppo_ratio removes",
            ),
            ("force_on_policy_ratio", "it makes the ratio 1, so CISPO would have nothing to clip"),
            ("sequence_level_importance_ratios", "CISPO clips the ratio of each token"),
        ):
            _require(not getattr(self, name), f"use_cispo with {name}: {reason}")
        _require(
            self.ratio_clip_c is None, "use_cispo with ratio_clip_c: CISPO has no surrogate to clip twice"
        )
        _require(self.token_level_loss, "use_cispo with token_level_loss=false: CISPO is a token-level loss")

    def _check_truncation(self) -> None:
        kind = self.truncated_importance_sampling_type
        high, low = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if kind is None:
            _require(
                high is None and low is None,
                "truncated_importance_sampling_ratio(_min) does nothing without a "
                "truncated_importance_sampling_type: set it to tis, icepop or seq-mask-tis",
            )
            return
        _require(
            kind in ("tis", "icepop", "seq-mask-tis"),
            f"truncated_importance_sampling_type is {kind!r}; choose tis, icepop or seq-mask-tis",
        )
        _require(
            self.use_importance_sampling_correction,
            f"truncated_importance_sampling_type={kind} bounds the weight of "
            "use_importance_sampling_correction, which is false",
        )
        _require(
            high is not None and high > 0,
            f"truncated_importance_sampling_type={kind} needs a positive "
            f"truncated_importance_sampling_ratio, not {high}",
        )
        _require(
            low is not None or kind == "tis",
            f"truncated_importance_sampling_type={kind} needs truncated_importance_sampling_ratio_min",
        )
        _require(
            low is None or high is None or 0 <= low <= high,
            f"truncated_importance_sampling_ratio_min={low} must lie between 0 and the upper bound {high}",
        )
        _require(
            kind != "seq-mask-tis" or not self.sequence_level_importance_ratios,
            "truncated_importance_sampling_type=seq-mask-tis keeps token weights, of which "
            "sequence_level_importance_ratios has none: use icepop",
        )


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(f"loss_fn.{reason}")
