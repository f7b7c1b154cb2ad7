"""`grpo-mcore train RECIPE [key=value ...] [--resume [PATH]]`: train a model with GRPO."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from grpo_mcore.recipe import Change, MasterConfig, load_recipe

STOPPED_EARLY = 75
"""Exit code of a run that saved and stopped on request; the same command with --resume goes on (EX_TEMPFAIL)."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that saved and ended on SIGTERM."""


def run(args: argparse.Namespace) -> int:
    """Train as the recipe says; with cluster.max_restarts, in a process of its own that can be restarted."""
    config = load_recipe(args.recipe, args.overrides).config
    began = time.time()
    if config.cluster.max_restarts == 0:
        return exit_code(train(config, args.resume, began))
    from grpo_mcore.algorithms.lifecycle.supervise import supervise

    return supervise(attempt, config, args.resume, began)


def attempt(config: MasterConfig, resume: str | bool | None, began: float) -> tuple[int, str | None]:
    """Run once, in a process of its own. Return the exit code, and the loss of a process or node that ended the run or
    None. `began`: unix time of the first attempt, from which checkpointing.checkpoint_must_save_by counts."""
    from grpo_mcore.cli.main import guarded
    from grpo_mcore.cluster import is_fault

    losses: list[str] = []

    def work() -> int:
        try:
            return exit_code(train(config, resume, began))
        except Exception as error:
            losses.extend([str(error).partition("\n")[0]] if is_fault(error) else [])
            raise

    return guarded("train", work), losses[0] if losses else None


def exit_code(summary: Mapping[str, object]) -> int:
    """Return the exit code of a run that came to its end."""
    return TERMINATED if summary["terminated"] else STOPPED_EARLY if summary["stopped_early"] else 0


def resumed(folder: Path, changes: Sequence[Change]) -> str:
    """Return the lines that say what a resumed run changes."""
    if not changes:
        return f"resuming from {folder}, with the same recipe"
    rows = [("key", "checkpoint", "now, takes effect"), *((change.key, change.saved, change.new) for change in changes)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    table = (f"  {key:<{widths[0]}}  {saved:<{widths[1]}}  {new}" for key, saved, new in rows)
    return "\n".join([f"resuming from {folder}, with {len(changes)} values of the recipe changed:", *table])


def train(config: MasterConfig, resume: str | bool | None = None, began: float | None = None) -> dict[str, object]:
    """Run a recipe to its end and return the summary. Everything that was started ends with it, also on errors.

    What is wrong with the model, the data or the checkpoint shows before anything starts.
    """
    from grpo_mcore.algorithms.checkpointing.checkpoints import CheckpointManager
    from grpo_mcore.algorithms.grpo import grpo_train
    from grpo_mcore.algorithms.lifecycle.stopping import on_signal, on_sigterm
    from grpo_mcore.algorithms.setup import check_run, start_cluster, start_run
    from grpo_mcore.data import TurnTemplate, build_task_data, load_tokenizer
    from grpo_mcore.data.processors import longest_prompt
    from grpo_mcore.observe import Logger
    from grpo_mcore.tools.plan.measured import compare

    model = check_run(config)
    checkpointer = CheckpointManager(config.checkpointing)
    checkpointer.open(resume)
    if checkpointer.resumed_from is not None:
        print(resumed(checkpointer.resumed_from, checkpointer.changes(config)))
    names = config.policy.tokenizer
    tokenizer = load_tokenizer(names.name, names.chat_template, names.chat_template_kwargs)
    separate, limit = config.data.use_multiple_dataloader, longest_prompt(config)
    data = build_task_data(config.data.train, config.data.validation, tokenizer, limit, separate=separate)
    if config.grpo.max_rollout_turns > 1:
        TurnTemplate(tokenizer)  # raises where the chat template cannot hold several turns
    save_by = config.checkpointing.seconds_to_save_by
    deadline = None if save_by is None else (began or time.time()) + save_by
    with on_signal(deadline) as stop, closing(Logger(config.logger, run=checkpointer.log_run())) as logger:
        print(f"starting policy and engines (logs: {logger.log_dir}) ...", flush=True)
        try:
            with start_cluster(config, logger.log_dir) as cluster, on_sigterm(stop):
                env_names = data.env_names | data.val_env_names
                run = start_run(
                    config, model, cluster, tokenizer, data.train, data.validation, logger, checkpointer, env_names
                )
                with closing(run.policy_generation):
                    return grpo_train(**vars(run), stop=stop, compare=compare)
        except BaseException as error:
            if (newest := checkpointer.latest()) is not None:
                error.add_note(f"the last checkpoint is {newest}; `--resume` goes on from there")
            raise
