"""The record of a run on examples (SFT, DPO, distillation): batches, files, console, content of its checkpoints."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Self

from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.driver.checkpoints.checkpoint_files import GRPOSaveState, RunSnapshot
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager, NotWritten, step_of
from grpo_mcore.driver.interfaces import ColocatablePolicyInterface, GenerationInterface
from grpo_mcore.driver.record.run_output import RunOutput
from grpo_mcore.driver.rollouts.prompt_stream import PromptStream
from grpo_mcore.observe import Logger, Timeline
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.recipe import Algorithm, FineTuningConfig, MasterConfig, batch_equation, exports_model
from grpo_mcore.recipe.headline import headline
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.group import Group
from grpo_mcore.step.step_batch import TrainTargets

logger = logging.getLogger(__name__)

SHOW_S = 5.0
"""Seconds between two lines of steps; the first and the last step always have one."""
SHOWN = ("loss", "accuracy", "rewards_margin_mean", "grad_norm", "lr")
Metrics = dict[str, float]


class TuningRecord(RunOutput):
    """The loop asks it for the next batch, tells it what was done, and asks what is due after a step.

    `step` counts the steps that are done. `extra_state` is saved besides the policy and the position in the data.
    `clock` times the phases of a step.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        logger: Logger,
        config: MasterConfig,
        policy: ColocatablePolicyInterface,
        engines: GenerationInterface,
        tokenizer: Any,
        *,
        checkpointer: CheckpointManager,
        state: GRPOSaveState,
        dataloader: Any,
        val_dataloader: Any,
        stop: StopRequest,
        rows: Sequence[int | None] = (),
    ) -> None:
        """`rows`: of the training and the validation data, for the banner. `state`: save state of the checkpoint that
        the run resumes, or `first_save_state()`."""
        self._algorithm, self._checkpointer, self._stop = algorithm, checkpointer, stop
        self._val_dataloader = val_dataloader
        self.step = state["current_step"]
        super().__init__(algorithm, logger, config, policy, engines, tokenizer, step=lambda: self.step, decodes=True)
        self.clock = Timeline(self.time.now, self.span)
        self._name = algorithm.upper() if policy.teachers is None else "Distillation"
        self._settings: FineTuningConfig = config[algorithm]
        self._size = config.policy.train_global_batch_size
        position = checkpointer.position()
        self.extra_state: dict[str, Any] = position.stream["tuning"] if position else {}
        self._examples = PromptStream(dataloader, self._settings.max_num_epochs, position.stream if position else None)
        self._waiting = self._take(self.step)  # the next step's batch; a short one ends the run
        self._asked: str | None = None  # why the run stops early
        self._val_metrics = state.get("val_metrics")  # of a validation after the last step
        self._metrics: Metrics = {}  # of the last step and the validation after it: checkpoints are ranked by them
        self._shown_at = float("-inf")
        self._open = ExitStack()
        self.console.banner(
            f"{self._name} of {config.policy.model_name}",
            headline(config, algorithm, rows)
            | {"batch": batch_equation(config, algorithm), "policy": self.describe_policy(), "logs": logger.log_dir},
        )

    def __enter__(self) -> Self:
        self._open.enter_context(self._stop.listening())
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        self._open.__exit__(*error)

    def _take(self, done: int) -> list[DatumSpec]:
        """Return the batch that comes after `done` steps."""
        return self._examples.take(self._size) if done < self._settings.max_num_steps else []

    @property
    def _is_over(self) -> bool:
        """Whether all steps are done, or the data holds no further batch."""
        return len(self._waiting) < self._size

    def next_batch(self) -> list[DatumSpec]:
        """Return the examples of the next step; none if the run is over."""
        return [] if self._is_over or self._asked else self._waiting

    def look_ahead(self) -> None:
        """Read and tokenise the batch of the step after this one. The loop calls it while the ranks train, once a step:
        they need not wait for it afterwards."""
        with self.clock.phase("next_batch"):
            self._waiting = self._take(self.step + 1)

    def trained(
        self, batch: Sequence[DatumSpec], groups: Sequence[Group], targets: TrainTargets, metrics: Metrics
    ) -> None:
        """Record a step: `groups` are the examples of `batch`, `targets` and `metrics` what was computed of them."""
        if self.samples.wants_logprobs:
            self.samples.trained(self.step + 1, groups, targets, self._policy.token_logprobs())
        self._examples.mark_done([datum["uid"] for datum in batch])
        self.step += 1
        self._val_metrics = None
        self._metrics = {f"train:{name}": value for name, value in metrics.items()}
        seconds = self.clock.take()
        lengths = [sample.length for group in groups for sample in group.samples]
        tokens = float(sum(lengths))
        metrics = metrics | {"tokens": tokens} | self.speed(tokens, lengths, seconds)
        shown = {name: metrics[name] for name in SHOWN if name in metrics}
        line = f"step {self.step:>5} of {self._settings.max_num_steps}  {_listed(shown)}  {seconds['total']:.3f} s"
        now, is_end = self.time.now(), self._is_over or self._stop.reason is not None
        is_due = is_end or self.step == self._first_step or now - self._shown_at >= SHOW_S
        self._shown_at = now if is_due else self._shown_at
        self.show_step(self.step, metrics, line if is_due else None)
        if (alarm_reason := self.alarms.stop_reason) is not None:
            self._stop.ask(alarm_reason)
        self._asked = None if self._is_over else self._stop.reason

    @property
    def _is_last(self) -> bool:
        """Whether no step comes after those that are done."""
        return self._is_over or self._asked is not None

    @property
    def validates_first(self) -> bool:
        """Whether a validation comes before the first step. A resumed run makes up for one that the run before it left
        out because it was asked to stop."""
        if self._val_dataloader is None:
            return False
        left_out = self._val_metrics is None and not self._is_over and _every(self._settings.val_period, self.step)
        return self._settings.val_at_start if self.step == 0 else left_out

    @property
    def validation_is_due(self) -> bool:
        """Whether a validation comes after the step that was just recorded. A run that was asked to stop saves at once
        and does not validate: it may soon be killed."""
        if self._val_dataloader is None or self._asked is not None:
            return False
        return _every(self._settings.val_period, self.step) or (self._is_over and self._settings.val_at_end)

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether a checkpoint comes after the step that was just recorded."""
        saving = self.config.checkpointing
        periods = (saving.ft_save_period or 0, saving.save_period)
        return saving.enabled and (self._is_last or any(_every(period, self.step) for period in periods))

    def validation_batches(self) -> Iterator[Sequence[DatumSpec]]:
        return islice(iter(self._val_dataloader), self._settings.val_batches)

    def validated(self, metrics: Metrics) -> None:
        """Record a validation."""
        self.logger.log_metrics(metrics, self.step, "validation")
        self.console.note(f"step {self.step}: {_listed(metrics)}")
        self._metrics |= {f"val:{name}": value for name, value in metrics.items()}
        self._val_metrics = dict(metrics)

    def snapshot(self) -> RunSnapshot:
        """Return what a checkpoint must hold for a resumed run to go on from here."""
        state = GRPOSaveState(
            current_step=self.step, total_steps=self.step, log_run=self.logger.log_dir.name, algorithm=self._algorithm
        )
        if self._val_metrics is not None:
            state["val_metrics"] = self._val_metrics
        data_state = self._examples.state_dict() | {"tuning": self.extra_state}
        return RunSnapshot(state, data_state, dict(self._metrics))

    def not_saved(self, step: int, error: NotWritten) -> None:
        """Record that the checkpoint of a step could not be written. The run goes on without it."""
        logger.warning("step %d: %s", step, error)

    def ended(self, unsaved: int | None) -> dict[str, Any]:
        """Write summary.json and, if the run came to its end, the model in Hugging Face's format. Return the summary:
        steps, how it ended (`RunEnd`), and the folder of the model. Where the run keeps no checkpoints, the model is
        all that is left of a run that is stopped, so it is written then too. `unsaved`: the last step, if it could not
        be saved."""
        early, saves = self._asked is not None, self.config.checkpointing.enabled
        trained = self.step - self._first_step + 1  # since the start
        wants_model = not early or (trained and not saves)
        target = self._export() if exports_model(self.config) and wants_model else None
        lost = 0
        if unsaved is not None:
            newest = self._checkpointer.latest_if_readable()
            lost = self.step - (step_of(newest.name) if newest else 0)
        elif early and not saves and target is None:
            lost = trained
        reason = "all steps are done" if self.step >= self._settings.max_num_steps else "the data has ended"
        end = RunEnd.in_order(self._asked or reason, early=early, at_once=self._stop.at_once, unsaved=lost)
        summary: dict[str, Any] = {"steps": self.step, **self.times(), **end.plain()} | (
            {} if target is None else {"exported": str(target)}
        )
        summary |= self.trouble()
        self.write_summary(summary, self.step)
        if early:
            left = "; --resume goes on from there" if saves else f"; its model is {target}" if target else ""
            self.console.note(f"{end}: stopped after step {self.step}{left}")
            return summary
        paths: dict[str, Path | str | None] = {"metrics": self.logger.log_dir / "metrics.jsonl", "samples": None}
        if self.samples.wants_logprobs:
            paths["samples"] = self.logger.log_dir / "samples"
        model = target or "not written: checkpointing.enabled is false, and save_hf is none"
        self.console.summary(f"{self._name} is over", {"model": model, **self.trouble_facts()}, paths)
        return summary if target is None else summary | {"exported": target}

    def _export(self) -> Path:
        target = self._checkpointer.make_way("hf").resolve()
        with self.clock.pause("export"):
            self._policy.export_hf(str(target))
        return target


def _listed(metrics: Metrics) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0
