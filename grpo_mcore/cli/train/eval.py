"""`grpo-mcore eval MODEL|CHECKPOINT... [--config RECIPE] [key=value ...]`: how well do models solve tasks."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from grpo_mcore.cli.numbers import local
from grpo_mcore.recipe import is_override, load_recipe


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line after `grpo-mcore eval`."""
    parser = argparse.ArgumentParser(
        prog="grpo-mcore eval",
        usage="grpo-mcore eval MODEL|CHECKPOINT... [--config RECIPE] [key=value ...]",
        description="Sample answers to the prompts of a recipe's validation data with its engines, score them with its "
        "environments, and report accuracy, pass@k and cons@k. An interrupted evaluation goes on when it is repeated.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL|CHECKPOINT",
        help="folders, names on the hub, or checkpoints; none: the recipe's",
    )
    parser.add_argument(
        "--config", metavar="RECIPE", help="a recipe with section eval, or any training recipe; default: that of the "
        "checkpoint, if only one is given, else recipes/eval.yaml",
    )  # fmt: skip
    args, rest = parser.parse_known_args(list(words))  # overrides may stand between options
    if unknown := [word for word in rest if word.startswith("-")]:
        parser.error(f"unknown option: {' '.join(unknown)}")
    all_words = [*args.words, *rest]
    args.overrides = [word for word in all_words if is_override(word)]
    others = [word for word in all_words if not is_override(word)]
    recipes = [*([args.config] if args.config else []), *(word for word in others if word.endswith((".yaml", ".yml")))]
    if len(recipes) > 1:
        parser.error(f"one recipe at a time, got {' and '.join(recipes)}")
    args.config = recipes[0] if recipes else None
    try:
        args.models = [local(word) for word in others if word not in recipes]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return args


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the table."""
    from grpo_mcore.tools.evaluation import evaluate
    from grpo_mcore.tools.export import find_checkpoint, is_checkpoint

    recipe = args.config or "eval"
    if args.config is None and len(args.models) == 1 and is_checkpoint(Path(args.models[0])):
        recipe = str(find_checkpoint(Path(args.models[0])).folder / "config.yaml")
    report = evaluate(load_recipe(recipe, args.overrides).config, args.models)
    print(
        "\n".join(["", *report.table, "", f"report: {report.folder}/report.md, samples: {report.folder}/samples.jsonl"])
    )
    return 0
