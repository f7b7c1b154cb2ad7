"""Run a recipe once: check it, start it, run its loop under the signals that ask it to stop, and end it."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_mcore.base.clock import REAL
from grpo_mcore.base.stopping import StopRequest, Terminated, on_signal, on_sigterm
from grpo_mcore.driver.record.followed_run import FollowedRun
from grpo_mcore.driver.run.environment_checks import CHECKED_ROWS
from grpo_mcore.driver.run.run import Run, open_run, prepare
from grpo_mcore.driver.run.trial_calls import try_environments, try_loss
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.observe.logger import check_loggers
from grpo_mcore.recipe import Algorithm, Change, MasterConfig

Loop = Callable[[Run, StopRequest], dict[str, Any]]
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
    save_by = config.checkpointing.seconds_to_save_by
    deadline = None if save_by is None else (began or REAL.unix()) + save_by
    with on_signal(deadline) as stop, on_sigterm(stop):
        prepared = prepare(config, resume, algorithm=algorithm, follow=follow)
        checkpointer = prepared.checkpointer
        if checkpointer.resumed_from is not None:
            print(resumed(checkpointer.resumed_from, prepared.changes))
            if algorithm == "grpo" and not prepared.steps_left():
                print(f"nothing is left to do: grpo.max_num_steps is {config.grpo.max_num_steps}; raise it to go on")
                return RunEnd("finished", "nothing was left to do", 0).plain()
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


def check(algorithm: Algorithm, config: MasterConfig, resume: str | bool | None) -> int:
    """Check all that can be checked before anything starts, and say how many steps are left. Raises what is wrong."""
    check_loggers(config.logger)
    prepared = prepare(config, resume, algorithm=algorithm, starts=False)
    if (folder := prepared.checkpointer.resumed_from) is not None:
        print(resumed(folder, prepared.changes))
    if algorithm == "grpo":
        rows = prepared.data.first_rows(CHECKED_ROWS)
        tried = try_loss(config) + try_environments(config, prepared.env_names, rows, prepared.tokenizer)
        print("".join(f"{line}\n" for line in tried), end="")
    print(f"all checks passed; {prepared.steps_left()} steps are left, nothing was started")
    return 0


def resumed(folder: Path, changes: Sequence[Change]) -> str:
    """Return the lines that say what a resumed run changes."""
    if not changes:
        return f"resuming from {folder}, with the same recipe"
    title = f"resuming from {folder}, with {len(changes)} changed value{'s' * (len(changes) > 1)}"
    return table_of(title, changes, "checkpoint")


def table_of(title: str, changes: Sequence[Change], source: str) -> str:
    """Return the lines that list changed values of the recipe. `source`: heading of the column of old values."""
    rows = [("key", source, "now, takes effect"), *((change.key, change.saved, change.new) for change in changes)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    table = (f"  {key:<{widths[0]}}  {saved:<{widths[1]}}  {new}" for key, saved, new in rows)
    return "\n".join([f"{title}:", *table])
