"""`grpo-mcore dpo RECIPE [key=value ...] [--resume [PATH]] [--check]`: train a model on pairs of answers, a chosen and
a rejected one, and export it to a Hugging Face folder."""

from __future__ import annotations

import argparse

from grpo_mcore.cli.train.train import CHECK_HELP, add_resume, run_to_end
from grpo_mcore.recipe import DEFAULT, Problem, RecipeError, algorithm_of, load_recipe, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_resume(parser)
    parser.add_argument("--check", action="store_true", help=CHECK_HELP)


def run(args: argparse.Namespace) -> int:
    """Train as the recipe says."""
    recipe = load_recipe(args.recipe, args.overrides)
    if algorithm_of(recipe.config) != "dpo":
        problem = Problem(DEFAULT, "dpo", "the recipe needs a section dpo, and none for grpo; inherit recipes/dpo.yaml")
        raise RecipeError([problem], shown(recipe.path))

    if args.check:
        from grpo_mcore.driver.run.run_recipe import check

        return check("dpo", recipe.config, args.resume)

    return run_to_end("dpo", recipe.config, args.resume)
