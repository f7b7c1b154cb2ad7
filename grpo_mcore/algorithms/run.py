"""A GRPO run from its recipe: check all that can be checked in seconds, start it, validate it alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from grpo_mcore.algorithms.checkpointing.checkpoints import CheckpointManager
from grpo_mcore.algorithms.record.sample_record import SampleRecord
from grpo_mcore.algorithms.rollouts.prompt_stream import check_same_data
from grpo_mcore.algorithms.rollouts.validation import run_validation
from grpo_mcore.algorithms.run_control.checks import (
    Model,
    check_checkpointing,
    check_environments,
    check_run,
    check_writable,
)
from grpo_mcore.algorithms.setup import Run, build_loaders, start_cluster, start_run
from grpo_mcore.algorithms.weight_sync.refit_step import refit_engines
from grpo_mcore.data import TaskData, TurnTemplate, build_task_data, load_tokenizer
from grpo_mcore.data.processors import longest_prompt
from grpo_mcore.observe import Logger, RunConsole, messages_kept, write_summary
from grpo_mcore.recipe import Change, MasterConfig

logger = logging.getLogger(__name__)


@dataclass
class Prepared:
    """A run whose recipe, model, data and folders are checked. Nothing is started yet."""

    config: MasterConfig
    model: Model
    checkpointer: CheckpointManager
    tokenizer: Any
    data: TaskData
    changes: Sequence[Change]

    @property
    def env_names(self) -> dict[str, str | None]:
        """Environment of each task."""
        return self.data.env_names | self.data.val_env_names

    def steps_left(self) -> int:
        """Return the number of steps that are left to do."""
        folder = self.checkpointer.resumed_from
        done = self.checkpointer.read(folder)[0]["current_step"] if folder else 0
        return max(self.config.grpo.max_num_steps - done, 0)


def prepare(config: MasterConfig, resume: str | bool | None = None, *, trains: bool = True) -> Prepared:
    """Check all that can be checked in seconds: what is wrong with the model, the data, the checkpoint, the rewards or
    the folders shows before anything starts. `trains`: no other run may train in the checkpoints' folder."""
    check_checkpointing(config)
    model = check_run(config)
    checkpointer = CheckpointManager(config.checkpointing)
    checkpointer.open(resume, trains=trains)
    changes = checkpointer.changes(config)
    check_writable(config)
    names = config.policy.tokenizer
    tokenizer = load_tokenizer(names.name, names.chat_template, names.chat_template_kwargs)
    separate, limit = config.data.use_multiple_dataloader, longest_prompt(config)
    data = build_task_data(config.data.train, config.data.validation, tokenizer, limit, separate=separate)
    prepared = Prepared(config, model, checkpointer, tokenizer, data, changes)
    check_environments(config, prepared.env_names, data.first_rows())
    loader, _ = build_loaders(config, data.train, data.validation)  # raises where the data has too few rows
    if (position := checkpointer.position()) is not None:
        check_same_data(position.stream, loader)
    if config.grpo.max_rollout_turns > 1:
        TurnTemplate(tokenizer)  # raises where the chat template cannot hold several turns
    return prepared


def validate_only(config: MasterConfig, resume: str | bool | None = None) -> dict[str, float | None]:
    """Validate the model, or a checkpoint, as a run would, and return the metrics. No step is trained or saved."""
    with started(prepare(config, resume, trains=False)) as run:
        console, step = RunConsole(kept=run.logger.console), run.grpo_save_state["current_step"]
        refit_engines(run.policy, run.policy_generation, config)
        found = run_validation(
            run.policy_generation, run.val_dataloader, run.val_task_to_env, config, tokenizer=run.tokenizer
        )
        record = SampleRecord(config.logger, run.logger.log_dir, run.policy.cluster, run.tokenizer)
        record.validated(step, found.groups)
        record.close()
        run.logger.log_hyperparams(config)
        run.logger.log_metrics(found.metrics | {"seconds": found.seconds}, step, "validation")
        console.samples(step, found.samples)
        console.validation(step, found.metrics, found.seconds)
        end = f"validated after step {step}, nothing was trained"
        write_summary(run.logger.log_dir / "summary.json", {"steps": step, "end": end, "validation": found.metrics})
    return found.metrics


@contextmanager
def started(
    prepared: Prepared, log_run: str | None = None, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[Run]:
    """Start a run, and end all of its processes with the context. `log_run`: folder of the logs to go on
    in; None: a new one. `around`: entered once the cluster is started."""
    config, data = prepared.config, prepared.data
    with closing(Logger(config.logger, run=log_run)) as run_log, messages_kept(run_log.console):
        logger.info("starting policy and engines (logs: %s) ...", run_log.log_dir)
        began = time.monotonic()
        with start_cluster(config, run_log.log_dir) as cluster, around():
            logger.info("  cluster: %s, ready after %.0f s", config.cluster.backend, time.monotonic() - began)
            run = start_run(
                config,
                prepared.model,
                cluster,
                prepared.tokenizer,
                data.train,
                data.validation,
                run_log,
                prepared.checkpointer,
                prepared.env_names,
            )
            logger.info("  everything is ready after %.0f s", time.monotonic() - began)
            with closing(run.policy_generation):
                yield run
