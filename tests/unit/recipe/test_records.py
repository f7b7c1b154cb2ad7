"""A run's recorded recipe is that of its own algorithm, whichever command reads it."""

from pathlib import Path

import pytest

from grpo_mcore.driver.checkpoints.checkpoint_files import recipe_text
from grpo_mcore.recipe import Algorithm, algorithm_of, load_recipe, settle_algorithm
from grpo_mcore.recipe.schema.master import ALGORITHMS

RECIPES = {"grpo": "grpo-arithmetic-cpu", "sft": "sft-arithmetic-cpu", "dpo": "dpo", "rm": "rm"}


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_record_is_of_its_runs_algorithm_wherever_it_lies(tmp_path: Path, algorithm: str) -> None:
    written = load_recipe(RECIPES[algorithm]).config
    for name, text in (("hyperparams.json", written.model_dump_json()), ("config.yaml", recipe_text(written))):
        (tmp_path / name).write_text(text)
        read = load_recipe(str(tmp_path / name)).config
        assert algorithm_of(read) == algorithm and read == written
        assert read.model_dump() == written.model_dump()


@pytest.mark.parametrize(
    ("recipe", "verb", "left"),
    [
        ("grpo-arithmetic-cpu", "sft", {"sft"}),
        ("sft-arithmetic-cpu", "grpo", {"grpo", "sft"}),
        ("eval", "grpo", {"grpo", "eval"}),
    ],
)
def test_a_record_is_of_the_algorithm_that_ran(recipe: str, verb: Algorithm, left: set[str]) -> None:
    """`grpo-mcore sft` takes any recipe, and `train` one of an evaluation."""
    config = load_recipe(recipe).config
    settle_algorithm(config, verb)
    assert algorithm_of(config) == verb and set(ALGORITHMS) & config.model_dump().keys() == left
