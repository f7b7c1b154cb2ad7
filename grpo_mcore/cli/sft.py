"""`grpo-mcore sft RECIPE [key=value ...] [--resume [PATH]]`: fine-tune a model on examples, and export it to a Hugging
Face folder."""

from __future__ import annotations

import argparse

from grpo_mcore.cli.train import add_resume, exit_code, run_recipe
from grpo_mcore.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_resume(parser)


def run(args: argparse.Namespace) -> int:
    """Fine-tune as the recipe says."""
    config = load_recipe(args.recipe, args.overrides).config  # a wrong recipe shows before torch is imported

    from grpo_mcore.algorithms.sft import sft_train

    return exit_code(run_recipe("sft", sft_train, config, args.resume))
