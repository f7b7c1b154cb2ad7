"""The run that SFT and DPO share: start, one optimizer step per batch of examples, validation, checkpoints, export.

What tells them apart is a `FineTuning`: its data, its step and its metrics.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from grpo_mcore.algorithms.checkpointing.background import BackgroundCheckpoints
from grpo_mcore.algorithms.checkpointing.checkpoints import (
    CheckpointManager,
    GRPOSaveState,
    NotWritten,
    RunSnapshot,
    policy_folder,
)
from grpo_mcore.algorithms.rollouts.prompt_stream import PromptStream
from grpo_mcore.algorithms.run_control.checks import Model, check_model, check_writable
from grpo_mcore.algorithms.run_control.stopping import StopRequest, on_signal, on_sigterm
from grpo_mcore.algorithms.setup import start_cluster, start_policy, wait_until_ready
from grpo_mcore.algorithms.training_step.policy_group import PolicyGroup
from grpo_mcore.data import TaskData, build_dataloader, build_task_data, build_train_dataloader, load_tokenizer
from grpo_mcore.observe import Logger, RunConsole, Timeline, messages_kept
from grpo_mcore.recipe import Algorithm, Change, FineTuningConfig, MasterConfig, batch_equation
from grpo_mcore.rollout.datum import DatumSpec

SHOW_EVERY = 50  # steps
Metrics = dict[str, float]

logger = logging.getLogger(__name__)


class FineTuning(ABC):
    """The part of the loop below that differs between algorithms: training and evaluating on a batch."""

    algorithm: ClassVar[Algorithm]
    """Also the name of its section in the recipe."""

    def __init__(self, policy: PolicyGroup, config: MasterConfig) -> None:
        self.policy, self.config = policy, config
        self.state: dict[str, Any] = {}
        """Content of a checkpoint besides the policy and the position in the data."""

    @staticmethod
    @abstractmethod
    def load_data(config: MasterConfig, load: Callable[..., TaskData]) -> TaskData:
        """Return the data. `load`: `build_task_data` with the recipe's entries and tokenizer."""

    @abstractmethod
    def train(self, batch: Sequence[DatumSpec]) -> Metrics:
        """Run one optimizer step on these examples."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Sequence[DatumSpec]]) -> Metrics:
        """Return the metrics of a validation."""


@dataclass
class Prepared:
    """A run whose recipe, model, data and folders are checked. Nothing is started yet."""

    method: type[FineTuning]
    config: MasterConfig
    model: Model
    checkpointer: CheckpointManager
    changes: Sequence[Change]
    dataloader: Any
    val_dataloader: Any

    @property
    def settings(self) -> FineTuningConfig:
        return self.config[self.method.algorithm]


def prepare(method: type[FineTuning], config: MasterConfig, resume: str | bool | None = None) -> Prepared:
    """Check all that can be checked before anything starts. Raises the errors of model, data, checkpoint or folders."""
    model = check_model(config)
    generation = config.policy.generation  # the log-probs of the data, not those of a sampler
    generation.temperature, generation.top_p, generation.top_k = 1.0, 1.0, None
    checkpointer = CheckpointManager(config.checkpointing)
    checkpointer.open(resume)
    changes = checkpointer.changes(config)
    check_writable(config)
    names, data, settings = config.policy.tokenizer, config.data, config[method.algorithm]
    tokenizer = load_tokenizer(names.name, names.chat_template, names.chat_template_kwargs)
    longest = config.policy.max_total_sequence_length
    found = method.load_data(config, partial(build_task_data, data.train, data.validation, tokenizer, longest))
    train = build_train_dataloader(found.train, data, config.policy.train_global_batch_size, settings.seed)
    validation = found.validation and build_dataloader(
        found.validation, settings.val_global_batch_size, False, settings.seed, drop_last=False
    )
    return Prepared(method, config, model, checkpointer, changes, train, validation)


def fine_tune(prepared: Prepared) -> dict[str, Any]:
    """Run once. Return the summary: the number of steps, whether the run stopped early or was terminated, the last step
    if it could not be saved and, if the run came to its end, the folder of the model in Hugging Face's format, `hf` in
    checkpointing.checkpoint_dir."""
    config, checkpointer, began = prepared.config, prepared.checkpointer, time.time()
    save_by = config.checkpointing.seconds_to_save_by
    name = prepared.method.algorithm.upper()
    with (
        checkpointer.held(),
        closing(Logger(config.logger, run=checkpointer.log_run())) as log,
        messages_kept(log.console),
        on_signal(None if save_by is None else began + save_by) as stop,
        start_cluster(config, log.log_dir) as cluster,
        on_sigterm(stop),
    ):
        console = RunConsole(kept=log.console)
        policy = start_policy(config, cluster, prepared.model)
        wait_until_ready(config, cluster, policy.workers, "start of the policy")
        equation = batch_equation(config, prepared.method.algorithm)
        facts = {"batch": equation, "layout": policy.layout.describe(), "logs": log.log_dir}
        console.banner(f"{name} of {config.policy.model_name}", facts)
        log.log_hyperparams(config)
        summary = train_loop(prepared, policy, log, console, stop)
        if summary["stopped_early"]:
            resumable = "; --resume goes on from there" if config.checkpointing.enabled else ""
            console.note(f"{stop.reason}: stopped after step {summary['steps']}{resumable}")
            return summary
        target = Path(config.checkpointing.checkpoint_dir, "hf").resolve()
        policy.export_hf(str(target))
        console.summary(f"{name} is over", {"model": target}, {"metrics": log.log_dir / "metrics.jsonl"})
    return summary | {"exported": target}


def train_loop(
    prepared: Prepared, policy: PolicyGroup, log: Logger, console: RunConsole, stop: StopRequest
) -> dict[str, Any]:
    """Train until max_num_steps or the end of the data, or until `stop` asks for the end: the step under way is then
    finished and saved. Go on from the checkpoint, if the run resumes one."""
    config, settings, val_dataloader = prepared.config, prepared.settings, prepared.val_dataloader
    tuning, checkpointer = prepared.method(policy, config), prepared.checkpointer
    clock, metrics, step, position = Timeline(), Metrics(), 0, checkpointer.position()
    if position is not None:
        step = policy.updates = checkpointer.read(position.folder)[0]["current_step"]
        policy.load(policy_folder(position.folder))
        tuning.state = position.stream["tuning"]
    examples = PromptStream(prepared.dataloader, settings.max_num_epochs, position.stream if position else None)
    size, saving = config.policy.train_global_batch_size, config.checkpointing

    def validate() -> None:
        with clock.pause("validation"):
            found = tuning.evaluate(islice(iter(val_dataloader), settings.val_batches))
        log.log_metrics(found, step, "validation")
        console.note(f"step {step}: {_listed(found)}")
        metrics.update({f"val:{name}": value for name, value in found.items()})

    def not_saved(step: int, error: NotWritten) -> None:
        logger.warning("step %d: %s", step, error)

    checkpoints = BackgroundCheckpoints(
        checkpointer, policy, config, on_saved=lambda step, folder: None, on_failure=not_saved
    )
    with checkpoints, stop.heeded():
        if val_dataloader is not None and settings.val_at_start and step == 0:
            validate()
        batch = examples.take(size) if step < settings.max_num_steps else []
        while len(batch) == size:
            step += 1
            checkpoints.poll()
            with clock.phase("train"):
                found = tuning.train(batch)
            examples.mark_done([datum["uid"] for datum in batch])
            metrics.update({f"train:{name}": value for name, value in found.items()})
            seconds = clock.take()
            log.log_metrics(found | {"timing": seconds}, step, "train")
            batch = examples.take(size) if step < settings.max_num_steps else []
            ended = len(batch) < size
            last = ended or stop.reason is not None
            if last or step % SHOW_EVERY == 0:
                console.note(
                    f"step {step:>5} of {settings.max_num_steps}  {_listed(_shown(found))}  {seconds['total']:.3f} s"
                )
            if val_dataloader is not None and _due(step, settings.val_period, ended and settings.val_at_end):
                validate()
            recovery = _due(step, saving.ft_save_period or 0, False)
            if saving.enabled and (recovery or _due(step, saving.save_period, last)):
                state = GRPOSaveState(current_step=step, total_steps=step, log_run=log.log_dir.name)
                data_state = examples.state_dict() | {"tuning": tuning.state}
                snapshot = partial(RunSnapshot, state, data_state, dict(metrics))
                checkpoints.start(step, snapshot, lambda folder: None)
            if last:
                break
        else:
            ended = True
        unsaved = checkpoints.finish()
    early = not ended
    return {"steps": step, "stopped_early": early, "terminated": early and stop.at_once, "unsaved": unsaved}


def filled_up(batch: Sequence[DatumSpec], ranks: int) -> tuple[list[DatumSpec], list[float]]:
    """Return the examples and their weights, with copies of weight 0 if they are fewer than the data-parallel ranks, as
    the last batch of a validation may be."""
    copies = max(0, ranks - len(batch))
    return [*batch, *[batch[0]] * copies], [1.0] * len(batch) + [0.0] * copies


def _shown(metrics: Metrics) -> Metrics:
    names = ("loss", "accuracy", "rewards_margin_mean", "grad_norm", "lr")
    return {name: metrics[name] for name in names if name in metrics}


def _listed(metrics: Metrics) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _due(step: int, period: int, also: bool) -> bool:
    return also or (period > 0 and step % period == 0)
