"""One event, one call: each event of a run is recorded here once, for all who keep account of it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.data import DatumSpec
from grpo_mcore.driver.checkpoints.checkpoint_files import GRPOSaveState, RunSnapshot
from grpo_mcore.driver.checkpoints.checkpoints import SavedPosition
from grpo_mcore.driver.record.followed_run import FollowedRun
from grpo_mcore.driver.record.run_report import RunReport
from grpo_mcore.driver.rollouts.prompt_sampler import PromptSampler
from grpo_mcore.driver.rollouts.prompt_stream import PromptStream
from grpo_mcore.driver.rollouts.validation import Validation, stop_reason
from grpo_mcore.observe import LEDGER_FILE, Ledger, Timeline
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.recipe import MasterConfig, has_greedy_baseline, prompts_per_generation_batch
from grpo_mcore.refit.refit import RefitReport
from grpo_mcore.rollout import schedule as s
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.pass_rates import rewards_by_column

logger = logging.getLogger(__name__)

GIB = 2**30
PASS_RATES_FILE = "pass_rates.jsonl"
"""File next to the ledger with one `rollout.pass_rates.PromptRecord` a line, for each prompt that was tried."""


class RunRecord:
    """Tells the schedule, the ledger, the report and the prompt stream of every event.

    The schedule decides by the events what comes next and knows the step, the ledger makes the fate of every prompt
    auditable, the report shows the run to its user, and the prompt stream keeps the position in the data. The record
    itself counts what a checkpoint holds besides.
    """

    def __init__(
        self,
        config: MasterConfig,
        schedule: s.Schedule,
        prompts: PromptStream,
        ledger: Ledger,
        report: RunReport,
        state: GRPOSaveState,
        follow: FollowedRun | None = None,
    ) -> None:
        """`state`: save state of the checkpoint that the run resumes, or `first_save_state()`. `follow`: the recorded
        run that this one follows."""
        self._config, self._follow, self._saves = config, follow, config.checkpointing.enabled
        self.goes_on = False
        """Whether this run follows another and begins at a checkpoint at which the other one did not stop."""
        self.schedule, self.prompts, self.ledger, self.report = schedule, prompts, ledger, report
        self._consumed, self._valid_tokens = state["consumed_samples"], state["total_valid_tokens"]
        self._val_reward = state.get("val_reward")
        self._val_metrics = state.get("val_metrics")  # of the validation after this step, if there was one
        self._metrics: dict[str, float] = {}  # of the last step, by which checkpoints are ranked
        self._stops_at_once = False
        self._saved_step = state["current_step"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ledger.close()
        self.report.close()

    def stop_asked(self, stop: StopRequest) -> None:
        """Record the request to stop, if there is one, and again when it becomes urgent."""
        if (alarm := self.report.alarms.stop_reason) is not None:
            stop.ask(alarm)
        if self._follow is not None and (recorded := self._follow.stop()) is not None:
            stop.ask(recorded[0], at_once=recorded[1])
        urgent = stop.at_once and not self._stops_at_once
        if stop.reason and (self.schedule.asked is None or urgent):
            self._stops_at_once = stop.at_once
            outcome = "what is trained so far is saved" if urgent else "the step that has begun is finished and saved"
            logger.info("%s: %s, then the run ends", stop.reason, outcome)
            self.ledger.write("stop_asked", why=stop.reason, at_once=stop.at_once)
            self.schedule.record(s.StopAsked(stop.reason, at_once=stop.at_once))

    def refitted(self, report: RefitReport | None) -> None:
        """Record that all engines have the policy's weights. `report`: None where there are no engines."""
        self.report.refit(report)
        self.schedule.record(s.Refitted(self.schedule.policy_version))

    def dispatched(self, batch: Sequence[DatumSpec], *, data_ended: bool = False) -> None:
        """Record that prompts were sent to the engines. `data_ended`: the data holds no further prompt."""
        uids = tuple(prompt["uid"] for prompt in batch)
        self.report.dispatched(len(batch))
        if passed_over := self.prompts.passed_over():
            self.ledger.write("passed_over", uids=passed_over)
        self.ledger.write("dispatched", uids=uids, version=self.schedule.engine_version)
        self.schedule.record(s.Dispatched(uids, data_ended=data_ended))

    def resumed(self, batch: Sequence[DatumSpec], versions: Sequence[int], restored: Sequence[Group]) -> None:
        """Record the prompts that were in flight when the checkpoint was saved: `restored` groups are finished already,
        the other prompts are generated again. `versions`: weight version that generates each prompt of `batch`."""
        uids = tuple(prompt["uid"] for prompt in batch)
        self.report.dispatched(len(batch) - len(restored))
        self.ledger.write("dispatched", uids=uids, version=self.schedule.engine_version)
        self.schedule.record(s.Dispatched(uids, versions=tuple(versions)))
        for group in restored:
            version = group.weight_version
            self.ledger.write("finished", uid=group.uid, version=version, scored=group.scored, kept=True)
            self.schedule.record(s.GroupFinished(group.uid, nbytes=group.nbytes))

    def follow(self) -> None:
        """Hold every entry of the ledger from here on against those of the run that is followed, if one is."""
        if self._follow is not None:
            self.ledger.follow = self._follow.followed_by

    def sample_finished(self) -> None:
        """Record that one sample is generated."""
        self.report.sample()

    def group_finished(self, group: Group, *, informative: bool) -> None:
        """Record a group that is generated and scored, or that failed. `informative`: a step may train on it."""
        uid = group.uid
        if group.failure is not None:
            self._consumed += 1
            self.prompts.mark_done([uid])
            self.report.group_failed(group, group.failure)
            self.ledger.write("failed", uid=uid, why=group.failure)
            self.schedule.record(s.GroupFailed(uid, group.failure))
            return
        rate = self.prompts.rates.add(self._drawn(group))
        self.ledger.write("finished", uid=uid, version=group.weight_version, scored=group.scored, rate=rate)
        if not informative:
            self._consumed += 1
            self.prompts.mark_done([uid])
            self.report.group_filtered(group, reason := "its rewards are equal")
            self.ledger.write("filtered", uid=uid, why=reason)
        self.schedule.record(s.GroupFinished(uid, informative, group.nbytes))

    def _drawn(self, group: Group) -> Group:
        return group.without_first() if has_greedy_baseline(self._config) else group

    def retried(self, uid: str, reason: str) -> None:
        """Record that a prompt's samples are thrown away and generated again."""
        self.ledger.retried(uid, reason)

    def restarted(self, worker: str, reason: str) -> None:
        """Record that an engine or an environment died or hung, and is started again."""
        self.ledger.write("restarted", worker=worker, why=reason)
        self.report.restarted(worker, reason)

    def trained(
        self,
        command: s.Train,
        groups: list[Group],
        metrics: dict[str, float],
        clock: Timeline,
        returned: Sequence[Group] = (),
        queued: int = 0,
    ) -> None:
        """Record a step. Its surplus prompts go back to the data, to be generated again. `returned`: the groups among
        them that have finished. `queued`: the most samples that waited for room on the engines at a time."""
        for group in returned:
            self.report.group_returned(group)
        if queued:
            metrics = metrics | {"num_queued_samples": float(queued)}
        if self.schedule.config.max_trajectory_age:
            ahead = len(self.schedule.in_flight) - len(command.groups) - len(command.surplus)
            metrics = metrics | {"num_groups_ahead": float(ahead)}
        drawn = [self._drawn(group) for group in groups]
        metrics = metrics | rewards_by_column(drawn, self._config.logger.metrics_by) | self.prompts.step_metrics()
        self.prompts.mark_done(command.groups)
        self.prompts.put_back(command.surplus)
        self.ledger.write("trained", uids=command.groups, step=command.step, version=self.schedule.policy_version)
        if command.surplus:
            self.ledger.write("returned", uids=command.surplus)
        self._consumed += len(groups)
        self._valid_tokens += int(metrics["num_valid_tokens"])
        self._val_metrics = None
        logged = self.report.step(command.step, groups, metrics, clock)
        self._metrics = {f"train:{name}": value for name, value in logged.items()}
        self.schedule.record(s.Trained(command.step))
        self.prompts.record_step(command.step, metrics)

    def validated(self, step: int, validation: Validation) -> None:
        """Record a validation. The run ends where it reached grpo.stop_at_validation_threshold."""
        metrics = self._val_metrics = validation.metrics
        if metrics["reward"] is not None:
            self._val_reward = metrics["reward"]
        self._metrics |= {f"val:{name}": value for name, value in metrics.items() if value is not None}
        self.report.validation(step, validation)
        self.schedule.record(s.Validated(step, stop_reason(metrics, self._config.grpo)))

    def snapshot(self) -> RunSnapshot:
        """Return what a checkpoint must hold for a resumed run to go on from here."""
        entries = self.ledger.sync()
        data_state = self.prompts.state_dict() | {
            "ledger": entries,
            "ledger_digest": self.ledger.last_digest(entries),
            "in_flight": dict(self.schedule.in_flight),
            "schedule": self.schedule.position(),
        }
        if self._follow is not None:
            data_state["followed"] = self._follow.entries
        state = GRPOSaveState(
            consumed_samples=self._consumed,
            current_step=self.schedule.step,
            total_steps=self.schedule.step,
            current_epoch=self.prompts.epoch,
            total_valid_tokens=self._valid_tokens,
            log_run=self.report.run_name,
        )
        if self._val_reward is not None:
            state["val_reward"] = self._val_reward
        if self._val_metrics is not None:
            state["val_metrics"] = self._val_metrics
        return RunSnapshot(state, data_state, self._metrics)

    def checkpoint_begun(self, step: int) -> None:
        """Record that the checkpoint of a step is being written: training goes on."""
        self.schedule.record(s.Checkpointed(step))

    def saved(self, step: int, folder: Path) -> None:
        """Record that the checkpoint of a step is complete."""
        self._saved_step = step
        self.report.checkpoint(folder)
        self.ledger.write("saved", step=step)
        self._write_pass_rates()

    def not_saved(self, step: int, error: Exception) -> None:
        """Record that the checkpoint of a step could not be written. The run goes on without it."""
        self.report.not_saved(error)
        self.ledger.write("not_saved", step=step, why=str(error.__cause__))

    def _write_pass_rates(self) -> None:
        """Write the pass rate of each prompt to a file for people; a checkpoint has its own copy."""
        path = self.ledger.path.with_name(PASS_RATES_FILE)
        records = ({"uid": uid, **vars(record)} for uid, record in self.prompts.rates.prompts.items())
        try:
            path.with_suffix(".tmp").write_bytes(msgspec.json.Encoder().encode_lines(records))
            path.with_suffix(".tmp").replace(path)
        except OSError as error:
            logger.warning("the pass rates cannot be written to %s: %s", path, error.strerror or error)

    def ended(self, reason: str, stop: StopRequest, unsaved: int | None = None) -> dict[str, Any]:
        """Record the end of the run and return its summary. `unsaved`: the last step, if it could not be saved."""
        schedule = self.schedule
        self._write_pass_rates()
        self.ledger.write("ended", why=reason, data_ended=schedule.data_ended and not schedule.in_flight)
        early = reason == schedule.asked
        lost = schedule.step - self._saved_step if unsaved is not None or (early and not self._saves) else 0
        end = RunEnd.in_order(reason, early=early, at_once=stop.at_once, unsaved=lost)
        if self._follow is None:
            return self.report.finish(end)
        followed = self._follow.conclude(self.report.logger.log_dir)
        if followed["differs_first"] is not None:
            end = RunEnd("failed", f"{reason}; the run differs from its record", 1, lost)
        elif reason == self._follow.end:
            end = RunEnd("finished", reason, 0)
        return self.report.finish(end, followed) | {"stopped_early": early}


def start_schedule(config: MasterConfig, state: GRPOSaveState, *, validates: bool) -> s.Schedule:
    """Return the schedule of a run that begins, or goes on from the checkpoint with this state. `validates`: there is
    validation data."""
    metrics = state.get("val_metrics")
    reached = None if metrics is None else stop_reason(metrics, config.grpo)
    return s.Schedule(schedule_config(config, validates=validates), step=state["current_step"], stop=reached)


def start_record(
    config: MasterConfig,
    schedule: s.Schedule,
    state: GRPOSaveState,
    dataloader: Any,
    folder: Path,
    report: RunReport,
    position: SavedPosition | None,
    follow: FollowedRun | None = None,
) -> RunRecord:
    """Begin the record of a run, or continue that of a resumed one. `folder`: where the ledger lies; `position`: where
    the run stood in the checkpoint that it resumes; `follow`: the recorded run that this one follows."""
    if follow is not None and position is not None:
        follow.copy_ledger(folder / LEDGER_FILE, position.ledger_entries)
    ledger = Ledger(
        folder / LEDGER_FILE,
        step=schedule.step,
        kept=position.ledger_entries if position else 0,
        max_age=schedule.config.max_trajectory_age,
        last=position.ledger_digest if position else None,
        clock=report.time,
    )
    sampler = config.data.sampler
    prompts = PromptStream(
        dataloader,
        config.grpo.max_num_epochs,
        position.stream if position else None,
        columns=[*config.logger.metrics_by, *([sampler.column] if sampler.enabled and sampler.column else [])],
        sampler=(lambda rates: PromptSampler(sampler, rates, config.grpo.seed)) if sampler.enabled else None,
    )
    record = RunRecord(config, schedule, prompts, ledger, report, state, follow)
    if follow is not None:
        record.goes_on = follow.begin(position) and position is not None
        if record.goes_on and position is not None:
            schedule.at_position(position.stream["schedule"])
        else:
            record.follow()
    return record


def schedule_config(config: MasterConfig, *, validates: bool) -> s.ScheduleConfig:
    """Return the part of a recipe that decides what comes next. `validates`: there is validation data."""
    grpo, ahead, save = config.grpo, config.grpo.async_grpo, config.checkpointing
    return s.ScheduleConfig(
        num_prompts=grpo.num_prompts_per_step,
        max_steps=grpo.max_num_steps,
        prompts_per_dispatch=prompts_per_generation_batch(config) if grpo.use_dynamic_sampling else None,
        max_gen_batches=grpo.dynamic_sampling_max_gen_batches,
        max_failed_groups=max(8, prompts_per_generation_batch(config) // 4),
        max_trajectory_age=ahead.max_age,
        group_order=ahead.group_order,
        max_groups_in_flight=ahead.max_groups_in_flight if ahead.max_age else None,
        max_bytes_in_flight=int(ahead.max_buffer_gb * GIB) if ahead.max_buffer_gb and ahead.max_age else None,
        refit_in_flight=ahead.in_flight_weight_updates,
        val_period=grpo.val_period if validates else 0,
        val_start_at=grpo.val_start_at,
        val_at_start=grpo.val_at_start and validates,
        val_at_end=grpo.val_at_end and validates,
        save_period=save.save_period if save.enabled else 0,
        ft_save_period=(save.ft_save_period or 0) if save.enabled else 0,
    )
