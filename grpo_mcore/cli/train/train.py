"""`grpo-mcore train RECIPE [key=value ...] [--resume [PATH]] [--follow RUN]`: train a model with the algorithm that the
recipe describes. `sft`, `dpo`, `rm` and `distill` are the same verb with a fixed algorithm."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mcore.cli.numbers import local
from grpo_mcore.observe.exit_codes import exit_code
from grpo_mcore.recipe import (
    DEFAULT,
    Algorithm,
    MasterConfig,
    Problem,
    Recipe,
    RecipeError,
    algorithm_of,
    load_recipe,
    shown,
)

if TYPE_CHECKING:
    from grpo_mcore.driver.record.followed_run import FollowedRun

VERBS: dict[Algorithm, str] = {"grpo": "train", "sft": "sft", "dpo": "dpo", "rm": "rm"}
"""The command of each algorithm that trains."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=None,
        metavar="PATH",
        help="go on from a checkpoint: PATH, or the newest in checkpointing.checkpoint_dir; "
        "auto: the newest where there is one, else from the start",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="check all that can be checked in seconds, and end")
    only.add_argument("--validate-only", action="store_true", help="validate the model or the checkpoint, and end")
    parser.add_argument(
        "--follow",
        type=local,
        metavar="RUN",
        help="train again on the samples of a recorded run, in its order, without engines: take them from its log "
        "folder (exp_NNN), and compare log-probs and metrics; exit code 1 if any differs",
    )
    parser.add_argument("--tokens", choices=("recorded",), default="recorded", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Train as the recipe says."""
    recipe = load_recipe(args.recipe, args.overrides)  # a wrong recipe shows before torch is imported
    config, algorithm = recipe.config, algorithm_by_verb(args.verb, recipe)
    if algorithm != "grpo" and (args.validate_only or args.follow is not None):
        option = "--validate-only" if args.validate_only else "--follow"
        raise RecipeError([Problem(DEFAULT, algorithm, f"{option} is for GRPO")], shown(recipe.path))
    if args.check:
        from grpo_mcore.driver.run.run_recipe import check

        return check(algorithm, config, args.resume)
    if args.validate_only:
        from grpo_mcore.driver.run.run import validate_only

        validate_only(config, args.resume)
        return 0
    if args.follow is not None:
        return follow(config, args.resume, args.follow)
    return run_to_end(algorithm, config, args.resume)


def algorithm_by_verb(verb: str, recipe: Recipe) -> Algorithm:
    """Return the algorithm that a verb runs: the recipe's for `train`, else the verb's own. Raises RecipeError for
    a recipe that `dpo`, `rm` or `distill` cannot run."""
    algorithm = algorithm_of(recipe.config)
    if verb == "sft":
        return "sft"
    problem = None
    if verb in ("dpo", "rm") and algorithm != verb:
        problem = f"the recipe needs a section {verb}, and none for grpo; inherit recipes/{verb}.yaml"
    elif verb == "distill" and not recipe.config.on_policy_distillation.enabled:
        problem = "the recipe needs the sections distillation and teacher; inherit recipes/distillation_math.yaml"
    if problem is not None:
        key = "distillation" if verb == "distill" else verb
        raise RecipeError([Problem(DEFAULT, key, problem)], shown(recipe.path))
    return "grpo" if algorithm == "eval" else algorithm


def follow(config: MasterConfig, resume: str | bool | None, run: str) -> int:
    """Follow a recorded run to its end, and return the exit code: 1 if anything differs. A failure ends it."""
    from grpo_mcore.driver.record.followed_run import FollowedRun
    from grpo_mcore.driver.run.run_recipe import table_of
    from grpo_mcore.tools.report.run_files import find_run

    followed = FollowedRun(find_run(Path(run)))
    if changed := followed.check(config):
        print(table_of(f"following {followed.folder}, with other values of", changed, "recorded"))
    return exit_code(train(config, resume, follow=followed))


def run_to_end(algorithm: Algorithm, config: MasterConfig, resume: str | bool | None) -> int:
    """Train until the run is over, and return its exit code; with cluster.max_restarts, in a process of its own that
    can be restarted."""
    started_at = time.time()
    if config.cluster.max_restarts == 0:
        return exit_code(_train(algorithm, config, resume, started_at))
    from grpo_mcore.driver.run.supervise import supervise

    return supervise(partial(attempt, algorithm=algorithm), config, resume, started_at, verb=VERBS[algorithm])


def _train(algorithm: Algorithm, config: MasterConfig, resume: str | bool | None, started_at: float) -> dict[str, Any]:
    """Run a recipe once with the loop of its algorithm, and return the summary."""
    if algorithm == "grpo":
        return train(config, resume, started_at)
    from grpo_mcore.algorithms.distill import distill_train
    from grpo_mcore.algorithms.dpo import dpo_train, rm_train
    from grpo_mcore.algorithms.sft import sft_train
    from grpo_mcore.driver.run.run_recipe import run_recipe

    loops = {"dpo": dpo_train, "rm": rm_train}
    fine_tune = distill_train if config.on_policy_distillation.enabled else sft_train
    return run_recipe(algorithm, loops.get(algorithm, fine_tune), config, resume, started_at)


def attempt(
    config: MasterConfig, resume: str | bool | None, started_at: float, algorithm: Algorithm = "grpo"
) -> tuple[int, str | None]:
    """Run once, in a process of its own. Return the exit code, and the loss of a process or node that ended the run or
    None. `started_at`: unix time of the first attempt, from which checkpointing.checkpoint_must_save_by counts."""
    from grpo_mcore.cli.main import guarded
    from grpo_mcore.cluster import is_fault

    losses: list[str] = []

    def work() -> int:
        try:
            return exit_code(_train(algorithm, config, resume, started_at))
        except Exception as error:
            losses.extend([str(error).partition("\n")[0]] if is_fault(error) else [])
            raise

    return guarded(VERBS[algorithm], work), losses[0] if losses else None


def train(
    config: MasterConfig,
    resume: str | bool | None = None,
    started_at: float | None = None,
    follow: FollowedRun | None = None,
) -> dict[str, Any]:
    """Run a GRPO recipe to its end, export what checkpointing.save_hf asks for, and return the summary. Everything that
    was started ends with it, also on errors. A run that stops early exports nothing: it is not over."""
    from grpo_mcore.algorithms.grpo import grpo_train
    from grpo_mcore.driver.run.run_recipe import run_recipe
    from grpo_mcore.tools.plan.measured import compare

    summary = run_recipe(
        "grpo",
        lambda run, stop: grpo_train(**vars(run), stop=stop, compare=compare, follow=follow),
        config,
        resume,
        started_at,
        follow,
    )
    if not config.checkpointing.enabled or config.checkpointing.save_hf == "none" or summary["stopped_early"]:
        return summary
    from grpo_mcore.tools.export import export_run

    folders = [str(folder) for folder in export_run(config.checkpointing)]
    print("\n".join(f"model in Hugging Face's format: {folder}" for folder in folders), flush=True)
    return summary | {"exported": folders}
