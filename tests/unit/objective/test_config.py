"""The configuration of ClippedPGLossFn: the recipe's section, with the recipe's checks."""

from __future__ import annotations

import pytest

from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn
from grpo_mcore.recipe import RecipeError

from .cases import BY_AGE, TIS


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        ({"use_cispo": True, "disable_ppo_ratio": True}, "disable_ppo_ratio"),  # a rule of the table
        ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value"),  # a type
        (TIS | {"truncated_importance_sampling_ratio": None}, "needs an upper bound"),  # which a recipe may have
    ],
)
def test_what_a_recipe_may_not_say_a_loss_does_not_take(cfg, reason: str) -> None:
    """The rules are those of tests/unit/recipe/bad_recipes.yaml."""
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
