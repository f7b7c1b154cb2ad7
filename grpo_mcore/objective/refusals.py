"""Settings of the loss that cannot be what was meant: each is refused with a ValueError that names the key, says why,
and where possible what to set instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_mcore.objective.config import ClippedPGLossConfig


def refuse_bad_values(cfg: ClippedPGLossConfig) -> None:
    """Single values out of their range."""
    _require(
        cfg.reference_policy_kl_type in ("k1", "k2", "k3"),
        f"reference_policy_kl_type is {cfg.reference_policy_kl_type!r}; choose k1, k2 or k3",
    )
    for name in ("ratio_clip_min", "ratio_clip_max", "reference_policy_kl_penalty", "positive_example_nll_weight"):
        _require(getattr(cfg, name) >= 0, f"{name} is {getattr(cfg, name)}; it must not be negative")
    for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
        value = getattr(cfg, name)
        _require(value is None or value > 0, f"{name} is {value}; it must be positive, or null for no bound")
    _require(
        cfg.entropy_coeff is None or cfg.entropy_coeff >= 0,
        f"entropy_coeff is {cfg.entropy_coeff}; it must not be negative, or null for no entropy",
    )
    constant = cfg.sequence_length_normalizer
    _require(
        constant is None or constant > 0,
        f"sequence_length_normalizer is {constant}; it must be positive, such as the longest response",
    )


def refuse_bad_ratio(cfg: ClippedPGLossConfig) -> None:
    """Ratio, clips and CISPO."""
    _require(
        cfg.ratio_clip_c is None or cfg.ratio_clip_c > 1,
        f"ratio_clip_c is {cfg.ratio_clip_c}; it must exceed 1, or it cuts ratios that did not move",
    )
    _require(
        cfg.ratio_clip_c is None or not cfg.disable_ppo_ratio,
        "ratio_clip_c bounds a ratio, and disable_ppo_ratio leaves none: unset one of them",
    )
    if not cfg.use_cispo:
        return
    for name, reason in (
        ("disable_ppo_ratio", "CISPO weights tokens by the clipped ratio, which disable_ppo_ratio removes"),
        ("force_on_policy_ratio", "it makes the ratio 1, so CISPO would have nothing to clip"),
        ("sequence_level_importance_ratios", "CISPO clips the ratio of each token"),
    ):
        _require(not getattr(cfg, name), f"use_cispo with {name}: {reason}")
    _require(cfg.ratio_clip_c is None, "use_cispo with ratio_clip_c: CISPO has no surrogate to clip twice")
    _require(cfg.token_level_loss, "use_cispo with token_level_loss=false: CISPO is a token-level loss")


def refuse_bad_reduction(cfg: ClippedPGLossConfig) -> None:
    """How tokens and sequences are averaged."""
    _require(
        not cfg.sequence_level_importance_ratios or not cfg.token_level_loss,
        "sequence_level_importance_ratios (GSPO) defines one term a sequence: set token_level_loss=false",
    )
    if cfg.sequence_length_normalizer is None:
        return
    _require(
        not cfg.token_level_loss,
        "sequence_length_normalizer divides the sum of each sequence, which token_level_loss does not form: "
        "set token_level_loss=false",
    )
    _require(
        not cfg.sequence_level_importance_ratios,
        "sequence_length_normalizer weighs a sequence by its length, and sequence_level_importance_ratios (GSPO) "
        "defines one term a sequence, whatever its length: unset one of them",
    )


def refuse_bad_weights(cfg: ClippedPGLossConfig) -> None:
    """The importance weight of a sequence."""
    kind = cfg.sequence_importance_weight
    _require(
        kind in ("geometric_mean", "product"),
        f"sequence_importance_weight is {kind!r}; choose geometric_mean or product",
    )
    if kind != "product":
        return
    _require(
        cfg.sequence_level_importance_ratios,
        "sequence_importance_weight=product is the weight of a sequence, and without "
        "sequence_level_importance_ratios each token has its own: unset it, or set both",
    )
    _require(
        cfg.use_importance_sampling_correction,
        "sequence_importance_weight=product is a weight of use_importance_sampling_correction, which is false",
    )


def refuse_bad_truncation(cfg: ClippedPGLossConfig) -> None:
    """Bounds of the importance weights."""
    kind = cfg.truncated_importance_sampling_type
    high, low = cfg.truncated_importance_sampling_ratio, cfg.truncated_importance_sampling_ratio_min
    by_age = cfg.truncated_importance_sampling_ratio_by_age
    if kind is None:
        _require(
            high is None and low is None and by_age is None,
            "truncated_importance_sampling_ratio(_min, _by_age) does nothing without a "
            "truncated_importance_sampling_type: set it to tis, icepop or seq-mask-tis",
        )
        return
    _require(
        kind in ("tis", "icepop", "seq-mask-tis"),
        f"truncated_importance_sampling_type is {kind!r}; choose tis, icepop or seq-mask-tis",
    )
    _require(
        cfg.use_importance_sampling_correction,
        f"truncated_importance_sampling_type={kind} bounds the weight of use_importance_sampling_correction, "
        "which is false",
    )
    _require(
        low is not None or kind == "tis",
        f"truncated_importance_sampling_type={kind} needs truncated_importance_sampling_ratio_min",
    )
    if by_age is None:
        _require(
            high is not None and high > 0,
            f"truncated_importance_sampling_type={kind} needs a positive truncated_importance_sampling_ratio, "
            f"not {high}; or bounds by age in truncated_importance_sampling_ratio_by_age",
        )
    else:
        _require(
            high is None,
            "truncated_importance_sampling_ratio_by_age takes the place of truncated_importance_sampling_ratio: "
            "give one of them",
        )
        _require(
            len(by_age) > 0,
            "truncated_importance_sampling_ratio_by_age is empty; give the bound for age 0, then for age 1, ...",
        )
    _require(low is None or low >= 0, f"truncated_importance_sampling_ratio_min is {low}; it must not be negative")
    for bound in by_age if by_age is not None else (high,):
        _require(
            bound is not None and bound > 0 and (low is None or low <= bound),
            f"truncated_importance_sampling_ratio_min={low} must lie between 0 and the upper bound, which is {bound} "
            "and must be positive",
        )
    _require(
        kind != "seq-mask-tis" or not cfg.sequence_level_importance_ratios,
        "truncated_importance_sampling_type=seq-mask-tis keeps token weights, of which "
        "sequence_level_importance_ratios has none: use icepop",
    )


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(f"loss_fn.{reason}")
