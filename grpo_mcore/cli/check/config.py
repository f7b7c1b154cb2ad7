"""`grpo-mcore config RECIPE [key=value ...]`: the resolved recipe as YAML, with the source of every value, or what
`grpo-mcore plan` refuses it with.
`grpo-mcore config --imported RECIPE`: what became of the keys of NeMo RL that it sets; a configuration of TRL, verl or
OpenRLHF is printed as a recipe, with the keys that are not used.
`grpo-mcore config --explain KEY`: what a key means, its type, default and readers.
`grpo-mcore config --reference`: every key with its type, default and meaning, as Markdown."""

import argparse
from pathlib import Path
from typing import Any

from grpo_mcore.recipe import batch_equation, load_recipe, resolved_yaml
from grpo_mcore.recipe.other_trainers import as_recipe, read_elsewhere


class _PrintReference(argparse.Action):
    """Prints the reference and exits, as --version does, because no recipe is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from grpo_mcore.recipe.loading.reference import reference

        print(reference(), end="", flush=True)
        parser.exit()


class _Explain(argparse.Action):
    """Prints what a key means, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, key: Any, option: str | None = None) -> None:
        from grpo_mcore.recipe.loading.reference import explain

        try:
            text = explain(key)
        except KeyError as error:
            parser.error(error.args[0])
        print(text, end="", flush=True)
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--explain", action=_Explain, metavar="KEY", help="print what a key or a section means, and exit"
    )
    parser.add_argument(
        "--reference", action=_PrintReference, nargs=0, help="print every key of recipes as Markdown, and exit"
    )
    parser.add_argument(
        "--imported",
        action="store_true",
        help="print what becomes of the keys of NeMo RL, or a file of TRL, verl, OpenRLHF as a recipe",
    )


def run(args: argparse.Namespace) -> int:
    """Print the recipe."""
    if args.imported and (file := Path(args.recipe)).is_file() and (found := read_elsewhere(file)) is not None:
        print(as_recipe(*found), end="")
        return 0
    recipe = load_recipe(args.recipe, args.overrides)
    if args.imported:
        for note in recipe.imported:
            print(note)
        return 0
    from grpo_mcore.tools.plan.run_plan import check_plan

    check_plan(recipe.config)
    print(f"# {batch_equation(recipe.config)}")
    if recipe.imported:
        print(f"# {len(recipe.imported)} keys of NeMo RL are used under another name or dropped: --imported lists them")
    print(resolved_yaml(recipe), end="")
    return 0
