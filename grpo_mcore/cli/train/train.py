"""`grpo-mcore train RECIPE [key=value ...] [--resume [PATH]] [--follow RUN]`: train a model with GRPO."""

from __future__ import annotations

import argparse
import logging
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mcore.observe.exit_codes import exit_code
from grpo_mcore.recipe import Algorithm, Change, MasterConfig, load_recipe

if TYPE_CHECKING:
    from grpo_mcore.base.stopping import StopRequest
    from grpo_mcore.driver.record.followed_run import FollowedRun
    from grpo_mcore.driver.run.run import Run

logger = logging.getLogger(__name__)

VERBS: dict[Algorithm, str] = {"grpo": "train", "sft": "sft", "dpo": "dpo"}
"""The command of each algorithm that trains."""

CHECK_HELP = "check all that can be checked in seconds, and end"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_resume(parser)
    add_follow(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help=CHECK_HELP)
    only.add_argument("--validate-only", action="store_true", help="validate the model or the checkpoint, and end")


def add_follow(parser: argparse.ArgumentParser) -> None:
    """Add --follow and --tokens."""
    parser.add_argument(
        "--follow",
        metavar="RUN",
        help="come to the weights of a recorded run, whatever chance decided in it: take its samples and their order "
        "from its log folder (exp_NNN), without engines, and compare log-probs and metrics; exit code 1 if any differs",
    )
    parser.add_argument(
        "--tokens",
        choices=("recorded",),
        default="recorded",
        help="where the samples of --follow come from. There is one choice: what an engine generates depends on which "
        "requests share its batches, which a second run does not repeat",
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add --resume."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=None,
        metavar="PATH",
        help="go on from a checkpoint: PATH, or the newest in checkpointing.checkpoint_dir; "
        "auto: the newest where there is one, else from the start",
    )


def run(args: argparse.Namespace) -> int:
    """Train as the recipe says."""
    config = load_recipe(args.recipe, args.overrides).config
    if args.check:
        return check("grpo", config, args.resume)
    if args.validate_only:
        from grpo_mcore.driver.run.run import validate_only

        validate_only(config, args.resume)
        return 0
    if args.follow is not None:
        return follow(config, args.resume, args.follow)
    return run_to_end("grpo", config, args.resume)


def follow(config: MasterConfig, resume: str | bool | None, run: str) -> int:
    """Follow a recorded run, in a folder or at the address of its mirror, to its end, and return the exit code: 1 if
    anything differs. A failure ends it."""
    from grpo_mcore.driver.record.followed_run import FollowedRun
    from grpo_mcore.tools.mirrored import local_run
    from grpo_mcore.tools.report.run_files import find_run

    followed = FollowedRun(find_run(local_run(run)))
    if changed := followed.check(config):
        print(table_of(f"following {followed.folder}, with other values of", changed, "recorded"))
    summary = train(config, resume, follow=followed)
    if summary.get("followed", {}).get("differs_first") is not None:
        return 1
    return 0 if summary.get("end") == followed.end else exit_code(summary)


def run_to_end(algorithm: Algorithm, config: MasterConfig, resume: str | bool | None) -> int:
    """Train until the run is over, and return its exit code; with cluster.max_restarts, in a process of its own that
    can be restarted."""
    began = time.time()
    if config.cluster.max_restarts == 0:
        return exit_code(_train(algorithm, config, resume, began))
    from grpo_mcore.driver.run.supervise import supervise

    return supervise(partial(attempt, algorithm=algorithm), config, resume, began, verb=VERBS[algorithm])


def _train(algorithm: Algorithm, config: MasterConfig, resume: str | bool | None, began: float) -> dict[str, Any]:
    """Run a recipe once with the loop of its algorithm, and return the summary."""
    if algorithm == "grpo":
        return train(config, resume, began)
    from grpo_mcore.algorithms.distill import distill_train
    from grpo_mcore.algorithms.dpo import dpo_train
    from grpo_mcore.algorithms.sft import sft_train

    fine_tune = distill_train if config.on_policy_distillation.enabled else sft_train
    return run_recipe(algorithm, dpo_train if algorithm == "dpo" else fine_tune, config, resume, began)


def check(algorithm: Algorithm, config: MasterConfig, resume: str | bool | None) -> int:
    """Check all that can be checked before anything starts, and say how many steps are left. Raises what is wrong."""
    from grpo_mcore.driver.run.run import prepare
    from grpo_mcore.observe.logger import check_loggers

    check_loggers(config.logger)
    prepared = prepare(config, resume, algorithm=algorithm, starts=False)
    if (folder := prepared.checkpointer.resumed_from) is not None:
        print(resumed(folder, prepared.changes))
    print(f"all checks passed; {prepared.steps_left()} steps are left, nothing was started")
    return 0


def attempt(
    config: MasterConfig, resume: str | bool | None, began: float, algorithm: Algorithm = "grpo"
) -> tuple[int, str | None]:
    """Run once, in a process of its own. Return the exit code, and the loss of a process or node that ended the run or
    None. `began`: unix time of the first attempt, from which checkpointing.checkpoint_must_save_by counts."""
    from grpo_mcore.cli.main import guarded
    from grpo_mcore.cluster import is_fault

    losses: list[str] = []

    def work() -> int:
        try:
            return exit_code(_train(algorithm, config, resume, began))
        except Exception as error:
            losses.extend([str(error).partition("\n")[0]] if is_fault(error) else [])
            raise

    return guarded(VERBS[algorithm], work), losses[0] if losses else None


def resumed(folder: Path, changes: Sequence[Change]) -> str:
    """Return the lines that say what a resumed run changes."""
    if not changes:
        return f"resuming from {folder}, with the same recipe"
    what = f"resuming from {folder}, with {len(changes)} changed value{'s' * (len(changes) > 1)}"
    return table_of(what, changes, "checkpoint")


def table_of(what: str, changes: Sequence[Change], source: str) -> str:
    """Return the lines that list values of the recipe, under `what`. `source`: whose the old ones are."""
    rows = [("key", source, "now, takes effect"), *((change.key, change.saved, change.new) for change in changes)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    table = (f"  {key:<{widths[0]}}  {saved:<{widths[1]}}  {new}" for key, saved, new in rows)
    return "\n".join([f"{what}:", *table])


def train(
    config: MasterConfig,
    resume: str | bool | None = None,
    began: float | None = None,
    follow: FollowedRun | None = None,
) -> dict[str, Any]:
    """Run a GRPO recipe to its end, export what checkpointing.save_hf asks for, and return the summary. Everything that
    was started ends with it, also on errors. A run that stops early exports nothing: it is not over."""
    from grpo_mcore.algorithms.grpo import grpo_train
    from grpo_mcore.tools.plan.measured import compare

    summary = run_recipe(
        "grpo",
        lambda run, stop: grpo_train(**vars(run), stop=stop, compare=compare, follow=follow),
        config,
        resume,
        began,
        follow,
    )
    if not config.checkpointing.enabled or config.checkpointing.save_hf == "none" or summary["stopped_early"]:
        return summary
    from grpo_mcore.tools.export import export_run

    folders = [str(folder) for folder in export_run(config.checkpointing)]
    print("\n".join(f"model in Hugging Face's format: {folder}" for folder in folders), flush=True)
    return summary | {"exported": folders}


Loop = Callable[["Run", "StopRequest"], dict[str, Any]]
"""Trains a run until it is over or is asked to stop, and returns its summary."""


def run_recipe(
    algorithm: Algorithm,
    loop: Loop,
    config: MasterConfig,
    resume: str | bool | None,
    began: float | None = None,
    follow: FollowedRun | None = None,
) -> dict[str, Any]:
    """Prepare a run, open it, and run its loop under the signals that ask it to stop. Return the summary.

    `began`: unix time of the first attempt, from which checkpointing.checkpoint_must_save_by counts. `follow`: the run
    that it follows."""
    from grpo_mcore.base.stopping import Terminated, on_signal, on_sigterm
    from grpo_mcore.driver.run.run import open_run, prepare

    save_by = config.checkpointing.seconds_to_save_by
    deadline = None if save_by is None else (began or time.time()) + save_by
    with on_signal(deadline) as stop, on_sigterm(stop):
        prepared = prepare(config, resume, algorithm=algorithm, follow=follow)
        checkpointer = prepared.checkpointer
        if checkpointer.resumed_from is not None:
            print(resumed(checkpointer.resumed_from, prepared.changes))
            if algorithm == "grpo" and not prepared.steps_left():
                print(f"nothing is left to do: grpo.max_num_steps is {config.grpo.max_num_steps}; raise it to go on")
                return {"stopped_early": False, "terminated": False}
        try:
            with open_run(prepared, stop) as run:
                return loop(run, stop)
        except BaseException as error:
            if config.checkpointing.enabled and (newest := checkpointer.latest_if_readable()) is not None:
                error.add_note(f"the last checkpoint is {newest}; `--resume` goes on from there")
            by_ray = isinstance(error, SystemExit) and error.code == signal.SIGTERM  # its handler, while it starts
            if stop.stage == "start" and (by_ray or (stop.at_once and isinstance(error, KeyboardInterrupt))):
                raise Terminated from error
            raise
