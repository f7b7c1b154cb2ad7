"""`grpo-mcore sft RECIPE [key=value ...] [--resume [PATH]] [--check]`: fine-tune a model on examples, and export it to
a Hugging Face folder."""

from __future__ import annotations

import argparse

from grpo_mcore.cli.train.train import CHECK_HELP, add_resume, run_to_end
from grpo_mcore.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_resume(parser)
    parser.add_argument("--check", action="store_true", help=CHECK_HELP)


def run(args: argparse.Namespace) -> int:
    """Fine-tune as the recipe says."""
    config = load_recipe(args.recipe, args.overrides).config  # a wrong recipe shows before torch is imported

    if args.check:
        from grpo_mcore.driver.run.run_recipe import check

        return check("sft", config, args.resume)

    return run_to_end("sft", config, args.resume)
