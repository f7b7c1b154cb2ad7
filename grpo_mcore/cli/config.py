"""`grpo-mcore config RECIPE [key=value ...]`: the resolved recipe as YAML, with the source of every value."""

from __future__ import annotations

import argparse

from grpo_mcore.recipe import batch_equation, load_recipe, resolved_yaml
from grpo_mcore.recipe.master import runs_grpo


def run(args: argparse.Namespace) -> int:
    """Print the recipe."""
    recipe = load_recipe(args.recipe, args.overrides)
    print(f"# {batch_equation(recipe.config, 'grpo' if runs_grpo(recipe.config) else 'sft')}")
    print(resolved_yaml(recipe), end="")
    return 0
