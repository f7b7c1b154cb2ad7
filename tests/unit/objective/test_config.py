"""ClippedPGLossConfig: what it refuses and where it can be built from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_mcore.objective import ClippedPGLossConfig

from .cases import GSPO, ICEPOP, IS, SEQ_MASK, TIS


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
