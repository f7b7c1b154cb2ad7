"""GRPO: sample a group of answers to each prompt, reward them, and make the better ones of a group likelier.

One step: refit the engines -> generate -> score -> advantages within each group -> clipped policy update.

Consumes: prompts of the data loader, and the samples and rewards that engines and environments produce.
Waits for: the next scored group (`rollouts.next_group`), the policy's ranks (`policy.train`), a refit, a validation.
Unblocked by: whatever finishes first; while the loop waits for the policy's ranks, rollouts go on in the background.

`rollout/schedule.py` decides what comes next, and the loop carries it out. Synchronous training is a trajectory age of
0. With a greater age the engines generate for later steps while the policy trains; the loop is the same.

Not here: the loss (objective/loss.py), the network (parallel/), the transfer of weights to the engines (refit/), and
NeMo RL's other entry points (algorithms/nemo_rl_api.py; importable from here).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_mcore.algorithms.nemo_rl_api import (
    TokenizerType,
    _default_grpo_save_state,
    _should_use_async_rollouts,
    dynamic_sampling,
    refit_policy_generation,
    refuse_processor,
    scale_rewards,
    setup,
    validate,
)
from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.driver.checkpoints.background import BackgroundCheckpoints
from grpo_mcore.driver.checkpoints.checkpoint_files import GRPOSaveState
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.checkpoints.group_store import resume_in_flight, write_groups
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.engines.sampling_config import sampling_of, turn_limits
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.driver.policy.refit_parity import sampled_parity
from grpo_mcore.driver.policy.refit_step import refit_engines
from grpo_mcore.driver.record.followed_run import FollowedRun
from grpo_mcore.driver.record.recorded_rollouts import RecordedRollouts, RecordedValidation
from grpo_mcore.driver.record.run_record import RunRecord, start_record, start_schedule
from grpo_mcore.driver.record.run_report import Compare, RunReport
from grpo_mcore.driver.record.sample_writer import SampleSink
from grpo_mcore.driver.record.step_profile import StepProfile
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.driver.rollouts.scoring import as_workers
from grpo_mcore.driver.rollouts.validation import run_validation
from grpo_mcore.observe import Logger, Timeline
from grpo_mcore.parallel.policy import LossFn
from grpo_mcore.recipe import (
    AsyncGRPOConfig,
    GRPOConfig,
    GRPOLoggerConfig,
    MasterConfig,
    RewardScalingConfig,
    needs_prev,
    needs_reference,
)
from grpo_mcore.rollout import schedule as s
from grpo_mcore.rollout.group import Group
from grpo_mcore.step.advantages import compute_targets
from grpo_mcore.step.step_batch import build_step_batch
from grpo_mcore.step.step_groups import StepGroups

__all__ = [
    "AsyncGRPOConfig", "GRPOConfig", "GRPOLoggerConfig", "GRPOSaveState", "MasterConfig", "RewardScalingConfig",
    "TokenizerType", "_default_grpo_save_state", "_should_use_async_rollouts", "async_grpo_train", "dynamic_sampling",
    "grpo_train", "refit_policy_generation", "scale_rewards", "setup", "train_on_groups", "validate",
]  # fmt: skip


def grpo_train(
    policy: PolicyGroup,
    policy_generation: EngineGroup,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: LossFn,
    task_to_env: Mapping[str, Any],
    val_task_to_env: Mapping[str, Any] | None,
    logger: Logger,
    checkpointer: CheckpointManager,
    grpo_save_state: GRPOSaveState,
    master_config: MasterConfig,
    processor: object = None,
    *,
    stop: StopRequest | None = None,
    compare: Compare | None = None,
    follow: FollowedRun | None = None,
) -> dict[str, Any]:
    """Train until all steps are done, the data has ended, a validation metric is reached, or `stop` asks for the end.
    Return the summary. The arguments are those of NeMo RL, and the fields of `run.Run`.

    `task_to_env`: environments by task name, which is a dataset's `task_name`, or its own name or its file's. A value
    is an object of this process (`create_env`), which scores between two waits of this loop, or an actor beside it
    (`MathEnvironment.remote(...)`). `follow`: take the samples from this run, in its order; there are no engines then.
    """
    refuse_processor(processor)
    config, engines, stop = master_config, policy_generation, stop or StopRequest()
    position = checkpointer.position()
    schedule = start_schedule(config, grpo_save_state, validates=val_dataloader is not None)
    report = RunReport(logger, config, schedule, policy, engines, tokenizer, compare)
    clock = Timeline(policy.cluster.clock.now, report.span)
    ledger_folder = checkpointer.folder if config.checkpointing.enabled else logger.log_dir
    record = start_record(config, schedule, grpo_save_state, dataloader, ledger_folder, report, position, follow)
    parity = sampled_parity(config, policy.cluster.clock)
    refit = partial(refit_engines, policy, engines, config, record.restarted, sampled=parity)
    store, samples = policy.cluster.store, report.samples if follow is None else follow.comparing(report.samples)
    hooks = RolloutHooks(
        restore_engines=partial(refit, lost_only=True), on_restart=record.restarted, watch=stop.check,
        on_span=report.spans.span,
    )  # fmt: skip
    rollouts: Rollouts | RecordedRollouts
    if follow is None:
        rollouts = make_rollouts(config, engines, task_to_env, tokenizer, record, replace(hooks, phase=clock.phase))
    else:
        rollouts = RecordedRollouts(follow, store, stop)
    sampling = sampling_of(config.policy.generation, tokenizer)
    generations = config.grpo.num_generations_per_prompt
    generate = partial(rollouts.dispatch, sampling=sampling, generations=generations)
    groups = StepGroups(config)
    profile = StepProfile(policy, engines, Path(logger.log_dir, "profile"), config.logger.profile_steps)
    checkpoints = BackgroundCheckpoints(
        checkpointer, policy, config, on_saved=record.saved, on_failure=record.not_saved
    )

    with record, checkpoints, policy.run_alongside(rollouts), stop.listening():
        if position is not None:
            again = partial(generate, step=record.step + 1)
            sizes = range(config.grpo.async_grpo.min_samples_per_group or generations, generations + 1)
            resume_in_flight(
                position, record, groups, policy.cluster, refit, again, sizes=sizes, goes_on=record.goes_on
            )
        record.follow()
        while True:
            record.stop_asked(stop)
            checkpoints.poll(wait=follow is not None)  # so that its ledger says it no later than the recorded one
            profile.follow(record.step + 1)
            match record.next():
                case s.Refit():
                    with clock.phase("refit"):
                        record.refitted(refit(timeline=clock))

                case s.Dispatch(count):
                    batch = record.prompts.take(count)
                    generate(batch, step=record.step + 1)
                    record.dispatched(batch, data_ended=len(batch) < count)

                case s.Await():
                    if engines.paused:  # nothing trains now, and no refit comes first
                        policy.offload()
                        engines.resume()
                    group = stop.interruptible(rollouts.next_group)  # in the phases "generate" and "reward"
                    if group is not None:
                        record.group_finished(group, informative=groups.add(group))

                case s.Train() as command:
                    rollouts.drop(record.unfinished(command.surplus))
                    trained, returned, sampled = groups.take(command, record.policy_version)
                    if queued := rollouts.most_queued():
                        sampled["num_queued_samples"] = float(queued)
                    metrics = train_on_groups(policy, engines, trained, loss_fn, config, clock, samples)
                    record.trained(command, trained, metrics | sampled, clock, returned)

                case s.Validate(step):
                    recorded = None if follow is None else RecordedValidation(follow, store, stop, step)
                    with clock.pause("validation"):
                        val_workers = as_workers(val_task_to_env or {}, engines.cluster, config.cluster.platform)
                        validation = stop.interruptible(partial(
                            run_validation, engines, val_dataloader, val_workers, config, tokenizer=tokenizer,
                            hooks=hooks, recorded=recorded,
                        ))  # fmt: skip
                    if validation is not None:
                        record.validated(step, validation)

                case s.Checkpoint(step):
                    with clock.pause("checkpoint"):
                        finished = partial(write_groups, groups=groups.waiting(), cluster=policy.cluster)
                        checkpoints.start(step, record.snapshot, finished)
                    record.checkpoint_begun(step)

                case s.Finish(reason):
                    return record.ended(reason, stop, unsaved=checkpoints.finish())


def train_on_groups(
    policy: PolicyGroup,
    engines: EngineGroup,
    groups: list[Group],
    loss_fn: LossFn,
    config: MasterConfig,
    clock: Timeline,
    samples: SampleSink | None = None,
) -> dict[str, float]:
    """Train one step on scored groups and return its metrics. The driver plans bins and advantages; the policy's ranks
    compute log-probs, loss and update. `samples`: gets the samples with what was computed of them."""
    with clock.phase("prepare"):
        engines.release(keep_weights=engines.pauses)  # paused engines may go on before the next refit
        batch = build_step_batch(groups, config, policy.layout, shares_prefixes=policy.shares_prefixes)
    if batch.ranks and policy.teachers is not None:
        with clock.phase("teachers"):
            if policy.teachers.colocated:
                policy.offload()
            batch = policy.teachers.score(batch, policy.background)
    stats: dict[str, Tensor] = {}
    prev, reference = needs_prev(config), needs_reference(config)
    offloaded = config.policy.offload_optimizer_for_logprob and (prev or reference)
    with clock.phase("prepare"):
        if offloaded:
            policy.offload()
        else:
            policy.onload()
        if batch.ranks:
            policy.receive(batch.ranks)
    if batch.ranks and (prev or reference):
        with clock.phase("logprobs"):
            kl_kind = config.loss_fn.reference_policy_kl_type if config.loss_fn.use_kl_in_reward else None
            stats = policy.infer_logprobs(
                len(batch.samples), prev=prev, reference=reference, kl_kind=kl_kind, dropout=True
            )
    with clock.phase("train"):
        if offloaded:
            policy.onload()
        targets, metrics = compute_targets(batch, stats, config)
        if not any(targets.valid_toks):  # all samples failed or were filtered
            policy.skip()
            if samples is not None:
                samples.trained(policy.updates, batch.groups, targets, [])
            return metrics | {"tokens": 0.0}
        metrics |= batch.plan_metrics | policy.train(loss_fn, targets)
    if samples is not None and samples.wants_logprobs:
        samples.trained(policy.updates, batch.groups, targets, policy.token_logprobs())
    return metrics | {"tokens": float(batch.tokens)}


def make_rollouts(
    config: MasterConfig,
    engines: EngineGroup,
    task_to_env: Mapping[str, Any],
    tokenizer: Any,
    record: RunRecord,
    hooks: RolloutHooks,
) -> Rollouts:
    """Build the rollouts of a run, which report to its record. `hooks`: those that do not."""
    ahead, generation = config.grpo.async_grpo, config.policy.generation
    return Rollouts(
        engines,
        as_workers(task_to_env, engines.cluster, config.cluster.platform),
        tokenizer,
        turn_limits(config),
        seed=config.grpo.seed,
        retries=Retries(
            ahead.max_generation_failures if ahead.enabled else 0, config.cluster.retry_wait_s, engines.cluster.clock
        ),
        enough_samples=ahead.min_samples_per_group if ahead.max_age else None,
        max_running=generation.max_running or generation.vllm_kwargs.get("max_num_seqs"),
        hooks=replace(hooks, on_sample=record.sample_finished, on_retry=record.retried),
    )


def async_grpo_train(
    policy: PolicyGroup,
    policy_generation: EngineGroup,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: LossFn,
    task_to_env: Mapping[str, Any],
    val_task_to_env: Mapping[str, Any] | None,
    logger: Logger,
    checkpointer: CheckpointManager,
    grpo_save_state: GRPOSaveState,
    master_config: MasterConfig,
    max_trajectory_age_steps: int = 1,
) -> dict[str, Any]:
    """Run `grpo_train` with grpo.async_grpo enabled at this age limit, whatever the recipe says.

    Raises RecipeError where the recipe does not allow it, ValueError where `setup` has started engines that sleep while
    the policy trains.
    """
    if policy_generation.sleeps and not policy_generation.pauses and max_trajectory_age_steps:
        raise ValueError(
            "these engines sleep while the policy trains, so they cannot generate ahead: set grpo.async_grpo.enabled "
            "before setup"
        )
    plain = master_config.model_dump()
    plain["grpo"]["async_grpo"] |= {"enabled": True, "max_trajectory_age_steps": max_trajectory_age_steps}
    return grpo_train(
        policy, policy_generation, dataloader, val_dataloader, tokenizer, loss_fn, task_to_env, val_task_to_env,
        logger, checkpointer, grpo_save_state, MasterConfig.model_validate(plain),
    )  # fmt: skip
