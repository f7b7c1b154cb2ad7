"""`grpo-mcore eval MODEL|CHECKPOINT... [--config RECIPE] [key=value ...]`: how well do models solve tasks."""

import argparse
from pathlib import Path

from grpo_mcore.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "grpo-mcore eval MODEL|CHECKPOINT... [--config RECIPE] [key=value ...]"
    parser.description = (
        "Sample answers to the prompts of a recipe's validation data with its engines, score them with its "
        "environments, and report accuracy, pass@k and cons@k. A model is a folder, a name on the hub or a checkpoint; "
        "without one, the recipe's is evaluated. An interrupted evaluation goes on when it is repeated."
    )
    parser.set_defaults(models=())
    parser.add_argument(
        "--config", metavar="RECIPE", help="a recipe with section eval, or any training recipe; default: that of the "
        "checkpoint, if only one is given, else recipes/eval.yaml",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the table."""
    from grpo_mcore.tools.evaluation import evaluate
    from grpo_mcore.tools.export import find_checkpoint, is_checkpoint

    models, recipe = args.models, args.recipe or "eval"
    if args.recipe is None and len(models) == 1 and is_checkpoint(Path(models[0])):
        recipe = str(find_checkpoint(Path(models[0])).folder / "config.yaml")
    report = evaluate(load_recipe(recipe, args.overrides).config, models)
    print(
        "\n".join(["", *report.table, "", f"report: {report.folder}/report.md, samples: {report.folder}/samples.jsonl"])
    )
    return 0
