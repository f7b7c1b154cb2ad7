"""`grpo-mcore sft RECIPE [key=value ...] [--resume [PATH]]`: fine-tune a model on examples, and export it to a Hugging
Face folder."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from grpo_mcore.cli.train import add_resume, exit_code, resumed
from grpo_mcore.recipe import MasterConfig, load_recipe

if TYPE_CHECKING:
    from grpo_mcore.algorithms.training_step.fine_tuning import FineTuning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_resume(parser)


def run(args: argparse.Namespace) -> int:
    """Fine-tune as the recipe says."""
    config = load_recipe(args.recipe, args.overrides).config  # a wrong recipe shows before torch is imported

    from grpo_mcore.algorithms.sft import SFT

    return exit_code(fine_tune(SFT, config, args.resume))


def fine_tune(method: type[FineTuning], config: MasterConfig, resume: str | bool | None = None) -> dict[str, Any]:
    """Run SFT or DPO and return the summary. Everything that was started ends with it, also on errors."""
    from grpo_mcore.algorithms.training_step.fine_tuning import fine_tune, prepare

    prepared = prepare(method, config, resume)
    if (folder := prepared.checkpointer.resumed_from) is not None:
        print(resumed(folder, prepared.changes))
    return fine_tune(prepared)
