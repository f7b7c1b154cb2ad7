"""The configuration of ClippedPGLossFn: the recipe's section, with the recipe's checks."""

from __future__ import annotations

import pytest

from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn
from grpo_mcore.recipe import RecipeError

from .cases import BY_AGE, DR_GRPO, GSPO, ICEPOP, IS, SEQ_MASK, TIS


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        (GSPO | {"token_level_loss": True}, "needs token_level_loss: false"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "disable_ppo_ratio"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "force_on_policy_ratio"),
        ({"use_cispo": True, **GSPO}, "sequence_level_importance_ratios"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c"),
        ({"use_cispo": True, "token_level_loss": False}, "token_level_loss"),
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "ratio_clip_c"),
        ({"ratio_clip_c": 1.0}, "must be above 1"),
        ({**TIS, "use_importance_sampling_correction": False}, "use_importance_sampling_correction"),
        ({**TIS, "truncated_importance_sampling_ratio": 0.0}, "must be above 0"),
        ({**TIS, "truncated_importance_sampling_ratio": None}, "needs an upper bound"),
        ({**TIS, "truncated_importance_sampling_ratio_min": 2.0}, "lower bound 2 is above the upper"),
        ({**ICEPOP, "truncated_importance_sampling_ratio_min": None}, "ratio_min"),
        ({**SEQ_MASK, "truncated_importance_sampling_ratio_min": None}, "ratio_min"),
        ({**IS, "truncated_importance_sampling_ratio": 2.0}, "type"),
        ({**SEQ_MASK, **GSPO}, "seq-mask-tis"),
        ({**IS, "sequence_importance_weight": "product"}, "product needs sequence_level_importance_ratios: true"),
        ({**GSPO, "sequence_importance_weight": "product"}, "product needs use_importance_sampling_correction: true"),
        ({"sequence_importance_weight": "sum"}, "one of 'geometric_mean', 'product'"),
        ({**DR_GRPO, "token_level_loss": True}, "cannot be combined with token_level_loss: true"),
        ({"policy_term": "gmpo"}, "gmpo needs token_level_loss: false"),
        ({"policy_term": "sapo", "use_cispo": True}, "belongs to policy_term: clip, not sapo"),
        ({"policy_term": "vespo", **IS}, "importance weight of its own"),
        ({"policy_term": "sapo", "policy_term_options": {"tau": 1.0}}, "no option 'tau'; it has tau_pos, tau_neg"),
        ({"policy_term_options": {"beta": 1.0}}, "clip has no option 'beta'; it has none"),
        ({"policy_term": "dro", "policy_term_options": {"beta": 0.0}}, "must be above 0"),
        ({"policy_term": "kl_cov", "policy_term_options": {"share": 2.0}}, "at most 1"),
        ({"policy_term": "clip_cov", "policy_term_options": {"low": 5.0}}, "low must be below high"),
        ({**DR_GRPO, "sequence_length_normalizer": 0}, "must be above 0"),
        ({**BY_AGE, "truncated_importance_sampling_ratio": 2.0}, "set only one of the two"),
        ({**BY_AGE, "truncated_importance_sampling_type": None}, "has no effect without"),
        ({**BY_AGE, "truncated_importance_sampling_ratio_by_age": []}, "the list is empty"),
        ({**BY_AGE, "truncated_importance_sampling_ratio_by_age": [2.0, 0.5]}, "above the upper bound 0.5"),
        (
            {**BY_AGE, "truncated_importance_sampling_ratio_by_age": [2.0, float("nan")]},
            "by_age.1: expected a finite number, got nan",
        ),
        ({**BY_AGE, "use_importance_sampling_correction": False}, "needs use_importance_sampling_correction: true"),
        ({**ICEPOP, "truncated_importance_sampling_ratio_min": -0.1}, "must be at least 0"),
        ({"reference_policy_kl_type": "k4"}, "one of k1, k2, k3"),
        ({"truncated_importance_sampling_type": "no"}, "one of 'tis', 'icepop'"),
        ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value"),
        ({"ratio_clip_min": -0.1}, "ratio_clip_min"),
        ({"ratio_clip_mim": 0.1}, "nearest known key: loss_fn.ratio_clip_min"),
        ({"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.0}, "needs its weight"),
        ({"use_kl_in_reward": True, "use_on_policy_kl_approximation": True}, "use_kl_in_reward: true removes"),
    ],
)
def test_rejected_combinations_say_why(cfg, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        ClippedPGLossFn(cfg)


def test_a_loss_takes_a_mapping_or_a_section() -> None:
    cfg = ClippedPGLossFn({"ratio_clip_max": 0.28, "use_cispo": True}).cfg
    assert (cfg.ratio_clip_max, cfg.use_cispo, cfg.ratio_clip_min) == (0.28, True, 0.2)
    assert ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_max=0.28, use_cispo=True)).cfg == cfg


def test_bounds_by_age_may_be_any_sequence() -> None:
    expected = [1.6, 1.3, 1.1]
    for bounds in (expected, tuple(expected)):
        cfg = ClippedPGLossFn(BY_AGE | {"truncated_importance_sampling_ratio_by_age": bounds}).cfg
        assert cfg.truncated_importance_sampling_ratio_by_age == expected
