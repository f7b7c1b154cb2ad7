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

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_mcore.algorithms.nemo_rl_api import (
    TokenizerType,
    _default_grpo_save_state,
    _should_use_async_rollouts,
    check_processor,
    dynamic_sampling,
    refit_policy_generation,
    scale_rewards,
    setup,
    validate,
)
from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.driver.checkpoints.checkpoint_files import GRPOSaveState
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.interfaces import ColocatablePolicyInterface, GenerationInterface, LossFunction
from grpo_mcore.driver.record.followed_run import FollowedRun
from grpo_mcore.driver.record.run_report import Compare
from grpo_mcore.driver.record.sample_writer import SampleSink
from grpo_mcore.driver.run.loop_parts import open_parts
from grpo_mcore.driver.run.run import Run
from grpo_mcore.environments.interfaces import EnvironmentInterface
from grpo_mcore.objective import ValueLossFn
from grpo_mcore.observe import Logger, Timeline
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
from grpo_mcore.step.advantages import compute_targets, shaped_rewards
from grpo_mcore.step.step_batch import build_step_batch

__all__ = [
    "AsyncGRPOConfig", "GRPOConfig", "GRPOLoggerConfig", "GRPOSaveState", "MasterConfig", "RewardScalingConfig",
    "TokenizerType", "_default_grpo_save_state", "_should_use_async_rollouts", "async_grpo_train", "dynamic_sampling",
    "grpo_train", "refit_policy_generation", "scale_rewards", "setup", "train_on_groups", "validate",
]  # fmt: skip


def grpo_train(
    policy: ColocatablePolicyInterface,
    policy_generation: GenerationInterface,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: LossFunction,
    task_to_env: Mapping[str, EnvironmentInterface],
    val_task_to_env: Mapping[str, EnvironmentInterface] | None,
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
    if processor is not None:
        check_processor(processor, policy.shape, policy.model_folder)
    config, engines, stop = master_config, policy_generation, stop or StopRequest()
    run = Run(
        policy, engines, dataloader, val_dataloader, tokenizer, loss_fn, task_to_env, val_task_to_env, logger,
        checkpointer, grpo_save_state, config,
    )  # fmt: skip
    with open_parts(run, stop, compare, follow) as parts:
        schedule, record, rollouts, clock = parts.schedule, parts.record, parts.rollouts, parts.clock
        while True:
            parts.between_commands()
            match schedule.next():
                case s.Refit():
                    with clock.phase("refit"):  # interrupted while a lost engine starts again
                        stop.interruptible(lambda: record.refitted(parts.refit()))

                case s.Dispatch(count):
                    batch = parts.prompts.take(count)
                    parts.generate(batch)
                    record.dispatched(batch, data_ended=len(batch) < count)

                case s.Await():
                    if engines.paused:  # nothing trains now, and no refit comes first
                        policy.offload()
                        stop.interruptible(engines.resume)
                    group = stop.interruptible(rollouts.next_group)  # in the phases "generate" and "reward"
                    if group is not None:
                        record.group_finished(group, informative=parts.groups.add(group))

                case s.Train() as command:
                    rollouts.drop(schedule.unfinished(command.surplus))
                    trained, returned, sampled = parts.groups.take(command, schedule.policy_version)
                    queued = rollouts.most_queued()
                    metrics = train_on_groups(policy, engines, trained, loss_fn, config, clock, parts.samples)
                    record.trained(command, trained, metrics | sampled, clock, returned, queued)

                case s.Validate(step):
                    with clock.pause("validation"):
                        validation = parts.validate(step)
                    if validation is not None:
                        record.validated(step, validation)

                case s.Checkpoint(step):
                    with clock.pause("checkpoint"):
                        parts.save(step)
                    record.checkpoint_begun(step)

                case s.Finish(reason):
                    return record.ended(reason, stop, unsaved=parts.checkpoints.finish())


def train_on_groups(
    policy: ColocatablePolicyInterface,
    engines: GenerationInterface,
    groups: list[Group],
    loss_fn: LossFunction,
    config: MasterConfig,
    clock: Timeline,
    samples: SampleSink | None = None,
) -> dict[str, float]:
    """Train one step on scored groups and return its metrics. The driver plans bins and advantages; the policy's ranks
    compute log-probs, loss and update. `samples`: gets the samples with what was computed of them."""
    prev, reference, ppo, loss = needs_prev(config), needs_reference(config), config.ppo, config.loss_fn
    kl_kind = loss.reference_policy_kl_type if loss.use_kl_in_reward else None
    with clock.phase("prepare"):
        engines.release(keep_weights=engines.pauses)  # paused engines may go on before the next refit
        batch = build_step_batch(groups, config, policy.layout, shares_prefixes=policy.shares_prefixes)
    if batch.ranks and policy.teachers is not None:
        with clock.phase("teachers"), policy.ready_for("teachers"):
            batch = policy.teachers.score(batch, policy.background)
    with clock.phase("prepare"), policy.ready_for("logprobs" if prev or reference else "training"):
        if batch.ranks:
            policy.receive(batch.ranks)
    stats: dict[str, Tensor] = {}
    if batch.ranks and (prev or reference):
        with clock.phase("logprobs"):
            stats = policy.infer_logprobs(
                len(batch.samples), prev=prev, reference=reference, kl_kind=kl_kind, dropout=True
            )
    with clock.phase("train"), policy.ready_for("training"):
        rewards = shaped_rewards(batch.rewards, batch, config)
        if ppo.enabled and batch.ranks:
            with clock.phase("critic"):
                stats |= policy.infer_values(
                    rewards.nan_to_num(), ppo.adv_estimator, kl_kind, loss.reference_policy_kl_penalty
                )
        targets, metrics = compute_targets(batch, stats, config, rewards)
        counts = any(targets.valid_toks)  # else all samples failed or were filtered
        if ppo.enabled and counts:
            with clock.phase("critic"):
                metrics |= policy.train_critic(ValueLossFn(config.value_loss_fn), targets)
        if not counts or (ppo.enabled and policy.updates < ppo.policy_training_start_step):  # the critic learns first
            policy.skip()
            if samples is not None:
                samples.trained(policy.updates, batch.groups, targets, [])
            return metrics | (batch.plan_metrics | {"tokens": float(batch.tokens)} if counts else {"tokens": 0.0})
        metrics |= batch.plan_metrics | policy.train(loss_fn, targets)
    if samples is not None and samples.wants_logprobs:
        samples.trained(policy.updates, batch.groups, targets, policy.token_logprobs())
    return metrics | {"tokens": float(batch.tokens)}


def async_grpo_train(
    policy: ColocatablePolicyInterface,
    policy_generation: GenerationInterface,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: LossFunction,
    task_to_env: Mapping[str, EnvironmentInterface],
    val_task_to_env: Mapping[str, EnvironmentInterface] | None,
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
