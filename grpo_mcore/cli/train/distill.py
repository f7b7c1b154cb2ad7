"""`grpo-mcore distill RECIPE [key=value ...] [--resume [PATH]] [--check]`: train a model to give a teacher's
distribution at every token, of its own samples, or with `distillation.on_policy: false` of given answers."""

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
    if not recipe.config.on_policy_distillation.enabled:
        message = "the recipe needs the sections distillation and teacher; inherit recipes/distillation_math.yaml"
        raise RecipeError([Problem(DEFAULT, "distillation", message)], shown(recipe.path))
    algorithm = algorithm_of(recipe.config)

    if args.check:
        from grpo_mcore.driver.run.run_recipe import check

        return check(algorithm, recipe.config, args.resume)

    return run_to_end(algorithm, recipe.config, args.resume)
