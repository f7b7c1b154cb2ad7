"""Settings of the loss: named ones for each term and important combinations, and all combinations that are allowed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from grpo_mcore.recipe import checked_loss

IS = {"use_importance_sampling_correction": True}
TIS = {**IS, "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.3}
ICEPOP = {
    **IS,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 1.5,
    "truncated_importance_sampling_ratio_min": 0.6,
}
SEQ_MASK = {
    **IS,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio": 1.1,
    "truncated_importance_sampling_ratio_min": 0.85,
}
BY_AGE = {
    **ICEPOP,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_by_age": [1.6, 1.3, 1.1],
}
DR_GRPO = {"token_level_loss": False, "sequence_length_normalizer": 9}
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "asymmetric": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.4},
    "dual clip": {"ratio_clip_c": 1.4},
    "sequence level": {"token_level_loss": False},
    "dr. grpo": DR_GRPO,
    "dr. grpo, everything": {
        **DR_GRPO,
        **BY_AGE,
        "ratio_clip_c": 1.3,
        "use_on_policy_kl_approximation": True,
        "reference_policy_kl_penalty": 0.5,
        "positive_example_nll_weight": 0.3,
    },
    "gspo": GSPO,
    "gspo, weights": {**GSPO, **IS},
    "gspo, tis": {**GSPO, **TIS, "truncated_importance_sampling_ratio": 1.05},
    "gspo, icepop": {**GSPO, **ICEPOP},
    "gspo, product": {**GSPO, **IS, "sequence_importance_weight": "product"},
    "gspo, product, tis by age": {
        **GSPO,
        **BY_AGE,
        "truncated_importance_sampling_type": "tis",
        "sequence_importance_weight": "product",
    },
    "gspo, icepop by age": {**GSPO, **BY_AGE},
    "cispo": {"use_cispo": True, "ratio_clip_max": 0.5},
    "luspo": {**GSPO, "sequence_length_normalizer": 1},
    "masked": {"policy_term": "masked"},
    "masked, weights": {"policy_term": "masked", "ratio_clip_max": 3.0, **TIS},
    "flash reinforce": {"policy_term": "flash_reinforce", "policy_term_options": {"max_kl": 0.05}},
    "sapo": {"policy_term": "sapo", "token_level_loss": False},
    "sapo, options": {"policy_term": "sapo", "policy_term_options": {"tau_pos": 2.0, "tau_neg": 3.0}},
    "dppo, total variation": {"policy_term": "dppo_tv", "ratio_clip_max": 0.15, "ratio_clip_min": 0.1},
    "dppo, kl": {"policy_term": "dppo_kl", "ratio_clip_max": 0.04, "ratio_clip_min": 0.03},
    "dppo, kl, truncated": {"policy_term": "dppo_kl", "policy_term_options": {"max_ratio": 1.2}},
    "gmpo": {"policy_term": "gmpo", "token_level_loss": False, "ratio_clip_min": 0.4, "ratio_clip_max": 0.3},
    "vespo": {"policy_term": "vespo"},
    "vespo, options": {"policy_term": "vespo", "policy_term_options": {"k_neg": 1.0, "lambda_pos": 0.5}},
    "clip-cov": {"policy_term": "clip_cov", "ratio_clip_min": 0.1, "ratio_clip_max": 0.3},
    "kl-cov": {"policy_term": "kl_cov", "policy_term_options": {"beta": 0.7}, "token_level_loss": False},
    "dro": {"policy_term": "dro", "policy_term_options": {"beta": 0.3}},
    "reinforce": {"disable_ppo_ratio": True},
    "forced on policy": {"force_on_policy_ratio": True},
    "gspo, forced": {**GSPO, "force_on_policy_ratio": True},
    "weights": IS,
    "tis": TIS,
    "icepop": ICEPOP,
    "tis by age": {**BY_AGE, "truncated_importance_sampling_type": "tis"},
    "icepop by age": BY_AGE,
    "seq-mask-tis by age": {**BY_AGE, "truncated_importance_sampling_type": "seq-mask-tis"},
    "seq-mask-tis": SEQ_MASK,
    "seq-mask-tis, sequence level": {**SEQ_MASK, "token_level_loss": False},
    "on-policy kl": {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.5},
    "k1": {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.5},
    "k2": {"reference_policy_kl_type": "k2", "reference_policy_kl_penalty": 0.5},
    "tight clamps": {
        "kl_input_clamp_value": 0.4,
        "kl_output_clamp_value": 0.075,
        "reference_policy_kl_penalty": 0.5,
    },
    "no clamps": {
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
        "reference_policy_kl_penalty": 0.5,
    },
    "no kl": {"reference_policy_kl_penalty": 0.0},
    "kl in reward": {"use_kl_in_reward": True},
    "positive nll": {"positive_example_nll_weight": 0.3},
    "entropy, logged": {"entropy_coeff": 0.0},
    "entropy": {"entropy_coeff": 0.2},
    "entropy, sequence level": {"entropy_coeff": 0.2, "token_level_loss": False},
    "entropy, dr. grpo": {"entropy_coeff": 0.2, **DR_GRPO},
}

BOOL = (False, True)
REDUCTIONS: tuple[dict[str, Any], ...] = ({}, {"token_level_loss": False}, DR_GRPO)


def policy_settings() -> Iterator[dict[str, Any]]:
    """Yield every allowed combination of ratio, clip, reduction and importance weights."""
    for reduction, sequence_ratio, disabled, cispo, forced, dual in product(REDUCTIONS, BOOL, BOOL, BOOL, BOOL, BOOL):
        for corrected, kind, by_age, low, product_weight in product(
            BOOL, (None, "tis", "icepop", "seq-mask-tis"), BOOL, BOOL, BOOL
        ):
            settings = reduction | {
                "sequence_level_importance_ratios": sequence_ratio,
                "disable_ppo_ratio": disabled,
                "use_cispo": cispo,
                "force_on_policy_ratio": forced,
                "ratio_clip_c": 1.3 if dual else None,
                "use_importance_sampling_correction": corrected,
                "truncated_importance_sampling_type": kind,
                "truncated_importance_sampling_ratio": 1.2 if kind and not by_age else None,
                "truncated_importance_sampling_ratio_by_age": [1.4, 1.1] if by_age else None,
                "truncated_importance_sampling_ratio_min": 0.8 if low else None,
                "sequence_importance_weight": "product" if product_weight else "geometric_mean",
            }
            if is_allowed(settings):
                yield settings


def other_settings() -> Iterator[dict[str, Any]]:
    """Yield every allowed combination of the KL and the negative log-likelihood of positive samples."""
    for nll, approximation, kl in product(BOOL, BOOL, ("none", "in reward", "k1", "k2", "k3")):
        for input_clamp, output_clamp in product((None, 0.3), (None, 0.1)) if kl.startswith("k") else ((None, None),):
            settings = {
                "positive_example_nll_weight": 0.5 * nll,
                "use_on_policy_kl_approximation": approximation,
                "reference_policy_kl_penalty": 0.0 if kl == "none" else 0.7,
                "use_kl_in_reward": kl == "in reward",
                "reference_policy_kl_type": kl if kl.startswith("k") else "k3",
                "kl_input_clamp_value": input_clamp,
                "kl_output_clamp_value": output_clamp,
            }
            if is_allowed(settings):
                yield settings


def is_allowed(settings: dict[str, Any]) -> bool:
    try:
        checked_loss(settings)
    except ValueError:
        return False
    return True
