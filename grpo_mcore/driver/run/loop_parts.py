"""Collaborators of the loop in `algorithms/grpo.py`, made from a run."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.cluster import Cluster
from grpo_mcore.data import DatumSpec
from grpo_mcore.driver.checkpoints.background import BackgroundCheckpoints
from grpo_mcore.driver.checkpoints.checkpoints import SavedPosition
from grpo_mcore.driver.checkpoints.group_store import read_groups, write_groups
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.engines.sampling_config import sampling_of, turn_limits
from grpo_mcore.driver.interfaces import GenerationInterface, PolicyInterface
from grpo_mcore.driver.policy.refit_parity import sampled_parity
from grpo_mcore.driver.policy.refit_step import refit_engines
from grpo_mcore.driver.record.followed_run import FollowedRun
from grpo_mcore.driver.record.recorded_rollouts import RecordedRollouts, RecordedValidation
from grpo_mcore.driver.record.run_record import RunRecord, start_record, start_schedule
from grpo_mcore.driver.record.run_report import Compare, RunReport
from grpo_mcore.driver.record.sample_writer import SampleSink
from grpo_mcore.driver.rollouts.prompt_stream import PromptStream
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.driver.rollouts.scoring import as_workers
from grpo_mcore.driver.rollouts.validation import Validation, run_validation
from grpo_mcore.driver.run.run import Run
from grpo_mcore.observe import Timeline
from grpo_mcore.recipe import has_greedy_baseline
from grpo_mcore.refit.refit import RefitReport
from grpo_mcore.rollout.schedule import Finish, Schedule, ScheduleConfig
from grpo_mcore.step.step_groups import StepGroups


@dataclass(frozen=True)
class LoopParts:
    """The collaborators of a GRPO loop. `samples`: gets the samples of each step with what was computed of them."""

    schedule: Schedule
    record: RunRecord
    prompts: PromptStream
    rollouts: Rollouts | RecordedRollouts
    groups: StepGroups
    checkpoints: BackgroundCheckpoints
    clock: Timeline
    samples: SampleSink
    between_commands: Callable[[], None]
    """Hears requests to stop, completes the checkpoint under way, starts and ends a profile."""
    refit: Callable[..., RefitReport | None]
    """Gives the policy's weights to the engines."""
    generate: Callable[[Sequence[DatumSpec]], None]
    """Sends prompts to the engines, for the step that comes next."""
    validate: Callable[[int], Validation | None]
    """Validates after the step with this number. Returns None where an urgent request to stop has interrupted it."""
    save: Callable[[int], None]
    """Begins the checkpoint of the step with this number."""


@contextmanager
def open_parts(run: Run, stop: StopRequest, compare: Compare | None, follow: FollowedRun | None) -> Iterator[LoopParts]:
    """Make the parts, and bring a resumed run to where its checkpoint left off. While the context is open, rollouts go
    on whenever the driver waits for the policy's ranks, and the run hears requests to stop."""
    config, policy, engines, tokenizer = run.master_config, run.policy, run.policy_generation, run.tokenizer
    position, cluster, logger = run.checkpointer.position(), policy.cluster, run.logger
    schedule = start_schedule(config, run.grpo_save_state, validates=run.val_dataloader is not None)
    report = RunReport(logger, config, schedule, policy, engines, tokenizer, compare, run.rows())
    clock = Timeline(cluster.clock.now, report.span)
    ledger_folder = run.checkpointer.folder if config.checkpointing.enabled else logger.log_dir
    record = start_record(
        config, schedule, run.grpo_save_state, run.dataloader, ledger_folder, report, position, follow
    )
    refit = partial(
        refit_engines, policy, engines, config, record.restarted, sampled=sampled_parity(config, cluster.clock)
    )
    hooks = RolloutHooks(
        restore_engines=partial(refit, lost_only=True), on_restart=record.restarted, on_span=report.spans.span
    )
    rollouts: Rollouts | RecordedRollouts
    if follow is None:
        rollouts = make_rollouts(run, record, replace(hooks, phase=clock.phase))
    else:
        rollouts = RecordedRollouts(follow, cluster.store, stop)
    generations, sampling = config.grpo.num_generations_per_prompt, sampling_of(config.policy.generation, tokenizer)
    sampling = replace(sampling, first_is_greedy=has_greedy_baseline(config))
    groups = StepGroups(config)
    profile = StepProfile(policy, engines, Path(logger.log_dir, "profile"), config.logger.profile_steps)
    checkpoints = BackgroundCheckpoints(
        run.checkpointer, policy, config, on_saved=record.saved, on_failure=record.not_saved
    )

    def generate(batch: Sequence[DatumSpec]) -> None:
        rollouts.dispatch(batch, sampling=sampling, generations=generations, step=schedule.step + 1)

    def between_commands() -> None:
        record.stop_asked(stop)
        checkpoints.poll(wait=follow is not None)  # so that its ledger says it no later than the recorded one
        profile.follow(schedule.step + 1)

    def validate(step: int) -> Validation | None:
        recorded = None if follow is None else RecordedValidation(follow, cluster.store, stop, step)
        workers = as_workers(run.val_task_to_env or {}, engines.cluster, config.cluster.platform)
        return stop.interruptible(
            lambda: run_validation(
                engines, run.val_dataloader, workers, config, tokenizer=tokenizer, hooks=hooks, rollouts=recorded
            )
        )

    def save(step: int) -> None:
        checkpoints.start(step, record.snapshot, partial(write_groups, groups=groups.waiting(), cluster=cluster))

    with ExitStack() as stack:
        for part in (record, checkpoints, policy.run_alongside(rollouts), _heard(stop, cluster), stop.listening()):
            stack.enter_context(part)
        if position is not None:
            sizes = range(config.grpo.async_grpo.min_samples_per_group or generations, generations + 1)
            resume_in_flight(position, record, groups, cluster, refit, generate, sizes=sizes, goes_on=record.goes_on)
        record.follow()
        yield LoopParts(
            schedule=schedule,
            record=record,
            prompts=record.prompts,
            rollouts=rollouts,
            groups=groups,
            checkpoints=checkpoints,
            clock=clock,
            samples=report.samples if follow is None else follow.comparing(report.samples),
            between_commands=between_commands,
            refit=partial(refit, timeline=clock),
            generate=generate,
            validate=validate,
            save=save,
        )


@contextmanager
def _heard(stop: StopRequest, cluster: Cluster) -> Iterator[None]:
    """Let every wait for a worker hear requests to stop."""
    before, cluster.watch = cluster.watch, stop.check
    try:
        yield
    finally:
        cluster.watch = before


def make_rollouts(run: Run, record: RunRecord, hooks: RolloutHooks) -> Rollouts:
    """Build the rollouts of a run, which report to its record. `hooks`: functions that do not."""
    config, engines = run.master_config, run.policy_generation
    ahead, generation = config.grpo.async_grpo, config.policy.generation
    return Rollouts(
        engines,
        as_workers(run.task_to_env, engines.cluster, config.cluster.platform),
        run.tokenizer,
        turn_limits(config),
        seed=config.grpo.seed,
        retries=Retries(
            ahead.max_generation_failures if ahead.enabled else 0,
            config.cluster.retry_wait_s,
            engines.cluster.clock,
            lambda: engines.cluster.watch(),
        ),
        enough_samples=ahead.min_samples_per_group if ahead.max_age else None,
        max_running=generation.max_running or generation.vllm_cfg.max_num_seqs,
        hooks=replace(hooks, on_sample=record.sample_finished, on_retry=record.retried),
    )


class StepProfile:
    """Traces of whole steps by torch's profiler, of the policy's ranks and the engines'. Call `follow` with the number
    of the step that is under way."""

    def __init__(
        self, policy: PolicyInterface, engines: GenerationInterface, folder: Path, steps: Collection[int]
    ) -> None:
        """`folder`: gets a folder for each of the `steps`, with a file for each rank."""
        self._policy, self._engines, self._folder, self._steps = policy, engines, folder, steps
        self._traced: int | None = None

    def follow(self, step: int) -> None:
        """Start the trace of `step`, if it is one of those to trace, and end that of the step before."""
        if step == self._traced:
            return
        if self._traced is not None:
            folder = (self._folder / f"step_{self._traced:06d}").resolve()
            self._engines.stop_profile(folder)
            self._policy.stop_profile(folder)
            self._traced = None
        if step in self._steps:
            self._policy.start_profile()
            self._engines.start_profile()
            self._traced = step


def young_enough(in_flight: Mapping[str, int], limits: ScheduleConfig, version: int) -> dict[str, int]:
    """Return the part of `in_flight` (uid -> weight version, in the order of dispatch) that will be young enough for
    its step, when `version` trains next. The recipe's limit may have changed since they were generated."""
    return {
        uid: generated
        for position, (uid, generated) in enumerate(in_flight.items())
        if version + position // limits.num_prompts - generated <= limits.max_trajectory_age
    }


def resume_in_flight(
    position: SavedPosition,
    record: RunRecord,
    groups: StepGroups,
    cluster: Cluster,
    refit: Callable[[], RefitReport | None],
    dispatch: Callable[[Sequence[DatumSpec]], None],
    *,
    sizes: range,
    goes_on: bool = False,
) -> None:
    """Restore the finished groups of a checkpoint that are young enough for their step and have as many samples as
    `sizes` allows, and `dispatch` the other prompts that were in flight, in their order: the recipe may have changed.
    Does nothing if the run is over already. `goes_on`: the run was not stopped here, so the prompts are under way with
    the weights that they had."""
    schedule = record.schedule
    if not position.in_flight or isinstance(schedule.next(), Finish):
        return
    if not goes_on:
        record.refitted(refit())
    version = schedule.policy_version
    batch = record.prompts.take(len(position.in_flight))  # the stream hands these out first, in their order
    young = position.in_flight if goes_on else young_enough(position.in_flight, schedule.config, version)
    restored = read_groups(position.folder, batch, cluster, young, sizes)
    dispatch([prompt for prompt in batch if prompt["uid"] not in restored])
    for group in restored.values():
        groups.add(group)
    begun = young if goes_on else {uid: young[uid] for uid in restored}
    versions = [begun.get(prompt["uid"], version) for prompt in batch]
    record.resumed(batch, versions, list(restored.values()))
