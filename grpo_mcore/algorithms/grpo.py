"""GRPO: sample a group of answers to each prompt, reward them, and make the better ones of a group likelier.

One step: refit the engines -> generate -> score -> advantages within each group -> clipped policy update. What comes
next is decided by `rollout.schedule`; this file carries it out. Synchronous training is a trajectory age of 0; above
it the engines generate for later steps while the policy trains, in this same loop.

Not here: the loss (objective/loss.py), the network (parallel/), weights on their way to the engines (refit/).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_mcore.algorithms.checkpointing.background import BackgroundCheckpoints
from grpo_mcore.algorithms.checkpointing.checkpoints import CheckpointManager
from grpo_mcore.algorithms.checkpointing.group_store import in_time, read_groups, write_groups
from grpo_mcore.algorithms.checkpointing.save_state import GRPOSaveState, first_save_state
from grpo_mcore.algorithms.dynamic_sampling import dynamic_sampling
from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.algorithms.engines.policy_endpoint import open_endpoint
from grpo_mcore.algorithms.engines.retries import Retries
from grpo_mcore.algorithms.lifecycle.run_report import RunReport
from grpo_mcore.algorithms.lifecycle.stopping import StopRequest
from grpo_mcore.algorithms.reward_scaling import scale_rewards
from grpo_mcore.algorithms.rollouts.prompt_stream import PromptStream
from grpo_mcore.algorithms.rollouts.rollouts import Rollouts
from grpo_mcore.algorithms.rollouts.sampling_config import sampling_of, turn_limits
from grpo_mcore.algorithms.rollouts.scoring import as_workers
from grpo_mcore.algorithms.rollouts.validation import run_validation, stop_reason
from grpo_mcore.algorithms.schedule_config import schedule_config
from grpo_mcore.algorithms.setup import (
    make_loss,
    needs_prev,
    needs_reference,
    start_cluster,
    start_engines,
    start_policy,
    wait_until_ready,
)
from grpo_mcore.algorithms.training_step.advantages import compute_targets
from grpo_mcore.algorithms.training_step.policy_group import PolicyGroup
from grpo_mcore.algorithms.training_step.step_batch import build_step_batch
from grpo_mcore.algorithms.training_step.step_groups import StepGroups
from grpo_mcore.algorithms.weight_sync.refit_step import refit_engines, refit_policy_generation
from grpo_mcore.cluster import Cluster
from grpo_mcore.data import (
    AllTaskProcessedDataset,
    MultipleDataloaderWrapper,
    build_dataloader,
    build_train_dataloader,
)
from grpo_mcore.objective import ClippedPGLossFn
from grpo_mcore.observe import LEDGER_FILE, Ledger, Logger, Timeline
from grpo_mcore.recipe import (
    AsyncGRPOConfig,
    GRPOConfig,
    GRPOLoggerConfig,
    MasterConfig,
    RewardScalingConfig,
)
from grpo_mcore.rollout import schedule as s
from grpo_mcore.rollout.group import Group

__all__ = [
    "AsyncGRPOConfig", "GRPOConfig", "GRPOLoggerConfig", "GRPOSaveState", "MasterConfig", "RewardScalingConfig",
    "async_grpo_train", "dynamic_sampling", "grpo_train", "refit_policy_generation", "scale_rewards", "setup",
    "validate",
]  # fmt: skip


def setup(
    master_config: MasterConfig | Mapping[str, Any],
    tokenizer: Any,
    dataset: AllTaskProcessedDataset | Mapping[str, AllTaskProcessedDataset],
    val_dataset: AllTaskProcessedDataset | None,
    processor: Any = None,
    *,
    cluster: Cluster | None = None,
    logger: Logger | None = None,
    resume: str | bool | None = None,
) -> tuple[
    PolicyGroup,
    EngineGroup,
    tuple[Cluster, Cluster],
    Any,
    Any,
    ClippedPGLossFn,
    Logger,
    CheckpointManager,
    GRPOSaveState,
    MasterConfig,
]:
    """Starts everything that `grpo_train` needs. `dataset`: several by task name for data.use_multiple_dataloader.

    Returns policy, engines, (training cluster, inference cluster), data loader, validation data loader, loss, logger,
    checkpoint manager, save state, config. Raises RecipeError, SetupError, FamilyError, DataError.
    """
    config = MasterConfig.model_validate(master_config)
    checkpointer = CheckpointManager(config.checkpointing)
    found = checkpointer.find(resume)
    if found is None:
        checkpointer.refuse_to_mix()
    logger = logger or Logger(config.logger, run=checkpointer.log_run(found))
    grpo = config.grpo
    dataloader = build_train_dataloader(dataset, config.data, grpo.num_prompts_per_step, grpo.seed)
    val_dataloader = None
    if val_dataset is not None:
        size = grpo.val_batch_size or len(val_dataset)
        val_dataloader = build_dataloader(val_dataset, size, False, grpo.seed, drop_last=False)
    own_cluster, cluster = cluster is None, cluster or start_cluster(config, Path(logger.log_dir))
    try:
        policy = start_policy(config, cluster)
        engines = start_engines(config, cluster, policy)
        wait_until_ready(config, cluster, [*policy.workers, *engines.all_hosts()])
        save_state = first_save_state()
        if found is not None:
            save_state, data_state = checkpointer.read(found)
            policy.load(str((found / "policy").resolve()))
            policy.updates = save_state["current_step"]
            save_state["data"] = data_state | {"folder": str(found)}  # type: ignore[typeddict-unknown-key]
        engines.endpoint = open_endpoint(config, engines, Path(logger.log_dir))
    except BaseException:
        if own_cluster:  # the caller has no handle to end it by
            cluster.shutdown()
        raise
    loss_fn = make_loss(config)
    clusters = (cluster, cluster)
    return policy, engines, clusters, dataloader, val_dataloader, loss_fn, logger, checkpointer, save_state, config


def grpo_train(
    policy: PolicyGroup,
    policy_generation: EngineGroup,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: ClippedPGLossFn,
    task_to_env: Mapping[str, Any],
    val_task_to_env: Mapping[str, Any] | None,
    logger: Logger,
    checkpointer: CheckpointManager,
    grpo_save_state: GRPOSaveState,
    master_config: MasterConfig,
    processor: Any = None,
    *,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Trains until the schedule is finished: all steps are done, the data has ended, a validation metric is reached, or
    `stop` asks for it. Returns the summary."""
    config, step_clock, ahead = master_config, Timeline(), master_config.grpo.async_grpo
    limits = schedule_config(config, validates=val_dataloader is not None)
    reached = stop_reason(grpo_save_state["val_metrics"], config.grpo) if "val_metrics" in grpo_save_state else None
    schedule = s.Schedule(limits, step=grpo_save_state["current_step"], stop=reached)
    data_state = grpo_save_state.pop("data", None)
    prompts = PromptStream(dataloader, config.grpo.max_num_epochs, data_state)
    environments = as_workers(task_to_env, policy.cluster)

    def restarted(worker: str, why: str) -> None:
        ledger.write("restarted", worker=worker, why=why)
        report.restarted(worker, why)

    def restore() -> None:
        refit_engines(policy, policy_generation, config, restarted, lost_only=True)

    rollouts = Rollouts(
        policy_generation,
        environments,
        tokenizer,
        turn_limits(config),
        seed=config.grpo.seed,
        on_sample=lambda: report.sample(),
        retries=Retries(ahead.max_generation_failures if ahead.enabled else 0, config.cluster.retry_wait_s),
        on_retry=lambda uid, why: ledger.retried(uid, why),
        restore_engines=restore,
        on_restart=restarted,
        enough_samples=config.grpo.async_grpo.min_samples_per_group if config.grpo.async_grpo.max_age else None,
    )
    sampling = sampling_of(config.policy.generation, tokenizer.eos_token_id)
    groups = StepGroups(config)
    report = RunReport(logger, config, grpo_save_state, policy, policy_generation)
    ledger = Ledger(
        (checkpointer.folder if config.checkpointing.enabled else logger.log_dir) / LEDGER_FILE,
        step=schedule.step,
        kept=(data_state or {}).get("ledger", 0),
        max_age=limits.max_trajectory_age,
    )

    checkpoints = BackgroundCheckpoints(checkpointer, policy, config, report, ledger)

    stop, told = stop or StopRequest(), False
    with closing(ledger), checkpoints, policy.run_alongside(rollouts), stop.heeded():
        if (in_flight := (data_state or {}).get("in_flight")) and not isinstance(schedule.next(), s.Finish):
            report.refit(refit_engines(policy, policy_generation, config, restarted))
            schedule.record(s.Refitted(version := schedule.policy_version))
            batch = prompts.take(len(in_flight))  # what was in flight comes first, in its order
            young = in_time(in_flight, limits, version)
            kept = read_groups(Path(data_state["folder"]), batch, policy.cluster, young)
            anew = [prompt for prompt in batch if prompt["uid"] not in kept]
            rollouts.dispatch(
                anew, sampling, generations=config.grpo.num_generations_per_prompt, step=schedule.step + 1
            )
            report.dispatched(len(anew))
            uids = tuple(prompt["uid"] for prompt in batch)
            ledger.write("dispatched", uids=uids, version=version)
            schedule.record(s.Dispatched(uids, versions=tuple(young[uid] if uid in kept else version for uid in uids)))
            for group in kept.values():
                groups.add(group)
                ledger.write("finished", uid=group.uid, version=group.weight_version, scored=group.scored, kept=True)
                schedule.record(s.GroupFinished(group.uid, nbytes=group.nbytes))

        while True:
            if stop.reason and (schedule.asked is None or stop.at_once > told):
                told = stop.at_once
                schedule.record(s.StopAsked(stop.reason, at_once=told))
            checkpoints.look()
            match schedule.next():
                case s.Refit(version):
                    with step_clock.phase("refit"):
                        refitted = refit_engines(policy, policy_generation, config, restarted)
                    report.refit(refitted)
                    schedule.record(s.Refitted(version))

                case s.Dispatch(count):
                    batch = prompts.take(count)
                    uids = tuple(prompt["uid"] for prompt in batch)
                    rollouts.dispatch(
                        batch, sampling, generations=config.grpo.num_generations_per_prompt, step=schedule.step + 1
                    )
                    report.dispatched(len(batch))
                    ledger.write("dispatched", uids=uids, version=schedule.engine_version)
                    schedule.record(s.Dispatched(uids, data_ended=len(batch) < count))

                case s.Await():
                    if policy_generation.paused:  # nothing trains now, and no refit comes first
                        policy.offload()
                        policy_generation.go_on()
                    with step_clock.phase("generate" if rollouts.generating else "reward"):
                        group = stop.interruptible(rollouts.next_group)
                    if group is None:
                        continue
                    uid = group.uid
                    if failure := group.failure:
                        groups.fail(group)
                        prompts.mark_done([uid])
                        report.group_failed(uid, failure)
                        ledger.write("failed", uid=uid, why=failure)
                        schedule.record(s.GroupFailed(uid, failure))
                        continue
                    informative = groups.add(group)
                    ledger.write("finished", uid=uid, version=group.weight_version, scored=group.scored)
                    if not informative:
                        prompts.mark_done([uid])
                        report.group_filtered()
                        ledger.write("filtered", uid=uid, why="its rewards are equal")
                    schedule.record(s.GroupFinished(uid, informative, group.nbytes))

                case s.Train(step) as command:
                    rollouts.give_up([uid for uid in command.surplus if uid not in schedule.finished])
                    trained, sampled = groups.take(command, schedule.policy_version)
                    if limits.max_trajectory_age:
                        gone = len(trained) + len(command.surplus)
                        sampled["num_groups_ahead"] = float(len(schedule.in_flight) - gone)
                    metrics = train_on_groups(policy, policy_generation, trained, loss_fn, config, step_clock)
                    prompts.mark_done(command.groups)
                    prompts.put_back(command.surplus)
                    ledger.write("trained", uids=command.groups, step=step, version=schedule.policy_version)
                    if command.surplus:
                        ledger.write("returned", uids=command.surplus)
                    schedule.record(s.Trained(step))
                    report.step(step, trained, metrics | sampled, step_clock)
                    if isinstance(dataloader, MultipleDataloaderWrapper):
                        dataloader.set_records({"step": step, **metrics, **sampled})

                case s.Validate(step):
                    with step_clock.pause():
                        validated = stop.interruptible(partial(
                            validate, policy_generation, val_dataloader, tokenizer, val_task_to_env, step, config,
                            report=report, restore_engines=restore, on_restart=restarted,
                        ))  # fmt: skip
                    if validated is not None:
                        schedule.record(s.Validated(step, stop_reason(validated[0], config.grpo)))

                case s.Checkpoint(step):
                    with step_clock.pause():
                        state = report.save_state(epoch=prompts.epoch)
                        place = prompts.state_dict() | {"ledger": ledger.sync(), "in_flight": dict(schedule.in_flight)}
                        keep = partial(write_groups, groups=groups.waiting(), cluster=policy.cluster)
                        checkpoints.start(step, place, state, report.last_metrics, keep)
                    schedule.record(s.Checkpointed(step))

                case s.Finish(reason):
                    checkpoints.wait()
                    ledger.write("ended", why=reason, data_ended=schedule.data_ended and not schedule.in_flight)
                    early = reason == schedule.asked
                    return report.finish(reason) | {"stopped_early": early, "terminated": early and stop.at_once}


def train_on_groups(
    policy: PolicyGroup,
    engines: EngineGroup,
    groups: list[Group],
    loss_fn: ClippedPGLossFn,
    config: MasterConfig,
    clock: Timeline,
) -> dict[str, float]:
    """One step on scored groups: bins and advantages on the driver, the rest on the policy's ranks."""
    with clock.phase("prepare"):
        engines.release()
        policy.onload()
        batch = build_step_batch(groups, config, policy.layout)
        if batch.ranks:
            policy.receive(batch.ranks)
    stats: dict[str, Tensor] = {}
    prev, reference = needs_prev(config), needs_reference(config)
    if batch.ranks and (prev or reference):
        with clock.phase("logprobs"):
            kl_kind = config.loss_fn.reference_policy_kl_type if config.loss_fn.use_kl_in_reward else None
            stats = policy.infer_logprobs(len(batch.samples), prev=prev, reference=reference, kl_kind=kl_kind)
    with clock.phase("train"):
        targets, metrics = compute_targets(batch, stats, config)
        if not any(targets.valid_toks):  # all failed or filtered
            policy.skip()
            return metrics | {"tokens": 0.0}
        metrics |= batch.plan_metrics | policy.train(loss_fn, targets)
    return metrics | {"tokens": float(batch.tokens)}


def validate(
    policy_generation: EngineGroup,
    val_dataloader: Any,
    tokenizer: Any,
    val_task_to_env: Mapping[str, Any] | None,
    step: int,
    master_config: MasterConfig,
    *,
    report: RunReport | None = None,
    **faults: Any,
) -> tuple[dict[str, float | None], dict[str, float]]:
    """Generates on the validation prompts and scores them. Returns (metrics, timing in seconds).

    `faults`: what `Rollouts` does about workers that die."""
    if val_dataloader is None or not val_task_to_env:
        raise ValueError("there is nothing to validate on: set data.validation, or grpo.val_period to 0")
    clock = Timeline()
    with clock.phase("validate"):
        found = run_validation(
            policy_generation,
            val_dataloader,
            as_workers(val_task_to_env, policy_generation.cluster),
            master_config,
            tokenizer=tokenizer,
            faults=faults,
        )
    timing = clock.take()
    if report is not None:
        report.validation(step, found, timing["total"])
    return found.metrics, timing


def async_grpo_train(
    policy: PolicyGroup,
    policy_generation: EngineGroup,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: ClippedPGLossFn,
    task_to_env: Mapping[str, Any],
    val_task_to_env: Mapping[str, Any] | None,
    logger: Logger,
    checkpointer: CheckpointManager,
    grpo_save_state: GRPOSaveState,
    master_config: MasterConfig,
    max_trajectory_age_steps: int = 1,
) -> dict[str, Any]:
    """`grpo_train` with grpo.async_grpo enabled at this age limit, whatever the recipe says: the same loop.

    Raises RecipeError where the recipe does not go with it, ValueError where `setup` has started engines that sleep
    while the policy trains.
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
