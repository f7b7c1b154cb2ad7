"""ClippedPGLossConfig: what it refuses and where it can be built from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_mcore.objective import ClippedPGLossConfig

from .cases import BY_AGE, DR_GRPO, GSPO, ICEPOP, IS, SEQ_MASK, TIS


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        (GSPO | {"token_level_loss": True}, "GSPO"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "disable_ppo_ratio"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "force_on_policy_ratio"),
        ({"use_cispo": True, **GSPO}, "sequence_level_importance_ratios"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c"),
        ({"use_cispo": True, "token_level_loss": False}, "token_level_loss"),
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "ratio_clip_c"),
        ({"ratio_clip_c": 1.0}, "exceed 1"),
        ({**TIS, "use_importance_sampling_correction": False}, "use_importance_sampling_correction"),
        ({**TIS, "truncated_importance_sampling_ratio": 0.0}, "positive"),
        ({**TIS, "truncated_importance_sampling_ratio": None}, "positive"),
        ({**TIS, "truncated_importance_sampling_ratio_min": 2.0}, "between"),
        ({**ICEPOP, "truncated_importance_sampling_ratio_min": None}, "ratio_min"),
        ({**SEQ_MASK, "truncated_importance_sampling_ratio_min": None}, "ratio_min"),
        ({**IS, "truncated_importance_sampling_ratio": 2.0}, "type"),
        ({**SEQ_MASK, **GSPO}, "seq-mask-tis"),
        ({**IS, "sequence_importance_weight": "product"}, "sequence_level_importance_ratios each token"),
        ({**GSPO, "sequence_importance_weight": "product"}, "use_importance_sampling_correction, which is false"),
        ({"sequence_importance_weight": "sum"}, "geometric_mean or product"),
        ({**DR_GRPO, "token_level_loss": True}, "set token_level_loss=false"),
        ({**DR_GRPO, **GSPO}, "whatever its length"),
        ({**DR_GRPO, "sequence_length_normalizer": 0}, "must be positive"),
        ({**BY_AGE, "truncated_importance_sampling_ratio": 2.0}, "give one of them"),
        ({**BY_AGE, "truncated_importance_sampling_type": None}, "does nothing without"),
        ({**BY_AGE, "truncated_importance_sampling_ratio_by_age": []}, "by_age is empty"),
        ({**BY_AGE, "truncated_importance_sampling_ratio_by_age": [2.0, 0.5]}, "upper bound, which is 0.5"),
        ({**BY_AGE, "truncated_importance_sampling_ratio_by_age": [2.0, float("nan")]}, "upper bound, which is nan"),
        ({**BY_AGE, "use_importance_sampling_correction": False}, "use_importance_sampling_correction, which is false"),
        ({**ICEPOP, "truncated_importance_sampling_ratio_min": -0.1}, "must not be negative"),
        ({"reference_policy_kl_type": "k4"}, "k1, k2 or k3"),
        ({"truncated_importance_sampling_type": "no"}, "tis, icepop"),
        ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value"),
        ({"ratio_clip_min": -0.1}, "ratio_clip_min"),
        ({"ratio_clip_mim": 0.1}, "ratio_clip_mim"),
    ],
)
def test_refused_combinations_say_why(cfg, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ClippedPGLossConfig.from_any(cfg)


def test_config_from_any_object_with_the_attributes() -> None:
    section = SimpleNamespace(ratio_clip_max=0.28, use_cispo=True, other=1)
    cfg = ClippedPGLossConfig.from_any(section)
    assert (cfg.ratio_clip_max, cfg.use_cispo, cfg.ratio_clip_min) == (0.28, True, 0.2)
    assert ClippedPGLossConfig.from_any(cfg) is cfg
    with pytest.raises(TypeError, match="SimpleNamespace"):
        ClippedPGLossConfig.from_any(SimpleNamespace(other=1))


def test_bounds_by_age_may_be_any_sequence() -> None:
    cfg = ClippedPGLossConfig(**BY_AGE)
    assert cfg.truncated_importance_sampling_ratio_by_age == (1.6, 1.3, 1.1)
    assert cfg == ClippedPGLossConfig(**{**BY_AGE, "truncated_importance_sampling_ratio_by_age": (1.6, 1.3, 1.1)})
    assert hash(cfg)
