"""Rules of the loss, as a library and with their places; bad_recipes.yaml has the others."""

import itertools
from typing import Any

import pytest

from grpo_mcore.recipe import ClippedPGLossConfig, RecipeError, checked_loss
from grpo_mcore.recipe.validation.objective import loss_findings
from tests.unit.recipe.conftest import MINIMAL

CHOICES: dict[str, tuple[Any, ...]] = {
    "disable_ppo_ratio": (False, True),
    "token_level_loss": (True, False),
    "sequence_level_importance_ratios": (False, True),
    "sequence_importance_weight": ("geometric_mean", "product"),
    "sequence_length_normalizer": (None, 8),
    "ratio_clip_c": (None, 3.0),
    "use_importance_sampling_correction": (False, True),
    "truncated_importance_sampling_type": (None, "tis", "icepop", "seq-mask-tis"),
    "truncated_importance_sampling_ratio": (None, 2.0),
    "truncated_importance_sampling_ratio_by_age": (None, [], [2.0, 4.0], [2.0, 0.5]),
    "truncated_importance_sampling_ratio_min": (None, 1.0, 3.0),
    "force_on_policy_ratio": (False, True),
    "use_cispo": (False, True),
}


@pytest.mark.parametrize("share", [13, pytest.param(1, marks=pytest.mark.every_state)])
def test_findings_name_keys_that_are_set(share: int) -> None:
    """Every `share`-th of 49,152 combinations; 13 divides no number of choices, so every two values meet."""
    accepted = 0
    for combination in itertools.islice(itertools.product(*CHOICES.values()), 0, None, share):
        values = dict(zip(CHOICES, combination, strict=True))
        found = loss_findings(ClippedPGLossConfig.model_construct(**values))
        accepted += not found
        for finding in found:
            assert all(key.removeprefix("loss_fn.") in ClippedPGLossConfig.model_fields for key in finding.keys)
            name = finding.keys[0].removeprefix("loss_fn.")
            assert values[name] != CHOICES[name][0], "the first key is not at its default"
    assert accepted > 100 // share


def test_a_loss_built_in_python_gets_the_problems_of_a_recipe(problems) -> None:
    values = {"use_cispo": True, "ratio_clip_c": 3.0}
    (line,) = problems(MINIMAL + "loss_fn: {use_cispo: true, ratio_clip_c: 3.0}\n")
    for source in (values, ClippedPGLossConfig(**values)):
        with pytest.raises(RecipeError) as error:
            checked_loss(source)
        assert [f"r.yaml:6: {problem}" for problem in error.value.problems] == [line]
    with pytest.raises(RecipeError, match="use_on_policy_kl_approximation: weights the KL term of the loss, which ref"):
        checked_loss({"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0})
    with pytest.raises(
        RecipeError, match="loss_fn.ratio_clip_mim: unknown key; nearest known key: loss_fn.ratio_clip_min"
    ):
        checked_loss({"ratio_clip_mim": 0.1})


def test_a_wrong_key_is_reported_with_its_line(problems) -> None:
    text = MINIMAL + (
        "loss_fn:\n"
        "  sequence_importance_weight: product\n"
        "  sequence_length_normalizer: 8\n"
        "  use_importance_sampling_correction: true\n"
        "  truncated_importance_sampling_type: tis\n"
        "  truncated_importance_sampling_ratio: 2\n"
        "  truncated_importance_sampling_ratio_by_age: [2, 1.5]\n"
        "  truncated_importance_sampling_ratio_min: 1.75\n"
        "  disable_ppo_ratio: true\n"
        "  ratio_clip_c: 3\n"
    )
    assert problems(text) == [
        "r.yaml:7: loss_fn.sequence_importance_weight: product needs sequence_level_importance_ratios: true",
        "r.yaml:8: loss_fn.sequence_length_normalizer: cannot be combined with token_level_loss: true; "
        "it divides the sum over each sequence",
        "r.yaml:12: loss_fn.truncated_importance_sampling_ratio_by_age: replaces "
        "truncated_importance_sampling_ratio; set only one of the two",
        "r.yaml:13: loss_fn.truncated_importance_sampling_ratio_min: the lower bound 1.75 is above the upper bound 1.5",
        "r.yaml:15: loss_fn.ratio_clip_c: cannot be combined with disable_ppo_ratio: true; it leaves no ratio to bound",
    ]
