"""NeMo RL's other entry points with their documented arguments; the loop is in grpo.py.

A script that was written against `nemo_rl.algorithms.grpo` runs with the package name changed: all of this is
importable from `grpo_mcore.algorithms.grpo`. Our own command line uses `driver/run/run.py` instead.
"""

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from grpo_mcore.cluster import Cluster
from grpo_mcore.data import AllTaskProcessedDataset, BatchedDataDict, TaskData
from grpo_mcore.driver.checkpoints.checkpoint_files import GRPOSaveState, first_save_state
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.interfaces import ColocatablePolicyInterface, GenerationInterface, LossFunction
from grpo_mcore.driver.policy.refit_step import refit_once
from grpo_mcore.driver.rollouts.scoring import as_workers
from grpo_mcore.driver.rollouts.validation import run_validation
from grpo_mcore.driver.run.run import prepare, start_run
from grpo_mcore.driver.run.setup import start_cluster
from grpo_mcore.environments.interfaces import EnvironmentInterface
from grpo_mcore.families import ModelShape
from grpo_mcore.families.images import image_settings, settings_of
from grpo_mcore.objective import scale_reward_values
from grpo_mcore.observe import Logger
from grpo_mcore.recipe import GRPOConfig, MasterConfig, RewardScalingConfig
from grpo_mcore.refit.refit import RefitReport, Timer
from grpo_mcore.rollout.images import ImageReader

TokenizerType = TypeVar("TokenizerType")
"""A tokenizer of transformers."""


def setup(
    master_config: MasterConfig | Mapping[str, Any],
    tokenizer: Any,
    dataset: AllTaskProcessedDataset | Mapping[str, AllTaskProcessedDataset],
    val_dataset: AllTaskProcessedDataset | None,
    processor: object = None,
    *,
    cluster: Cluster | None = None,
    logger: Logger | None = None,
    resume: str | bool | None = None,
) -> tuple[
    ColocatablePolicyInterface,
    GenerationInterface,
    tuple[Cluster, Cluster],
    Any,
    Any,
    LossFunction,
    Logger,
    CheckpointManager,
    GRPOSaveState,
    MasterConfig,
]:
    """Start everything that `grpo_train` needs, and return it in the documented order: policy, engines, (training
    cluster, inference cluster), data loader, validation data loader, loss, logger, checkpoint manager, save state,
    config.

    `dataset`: several by task name for data.use_multiple_dataloader. Raises RecipeError, SetupError, FamilyError,
    DataError, ResumeError; ValueError for a `processor` that is not the one of the model's folder.
    """
    config = MasterConfig.model_validate(master_config)
    data = TaskData(dataset, val_dataset, env_names={}, val_env_names={})  # the caller starts the environments
    prepared = prepare(config, resume, tokenizer=tokenizer, data=data)
    if processor is not None:
        check_processor(processor, prepared.model.shape, prepared.model.folder)
    checkpointer = prepared.checkpointer
    checkpointer.fetch_log(Path(config.logger.log_dir))
    logger = logger or Logger(config.logger, run=checkpointer.log_run())
    checkpointer.mirror_log(logger)
    started_here, cluster = cluster is None, cluster or start_cluster(config, Path(logger.log_dir))
    try:
        run = start_run(prepared, cluster, logger)
    except BaseException:
        if started_here:  # the caller has no handle to end it by
            cluster.shutdown()
        raise
    return (
        run.policy, run.policy_generation, (cluster, cluster), run.dataloader, run.val_dataloader, run.loss_fn, logger,
        checkpointer, run.grpo_save_state, config,
    )  # fmt: skip


def validate(
    policy_generation: GenerationInterface,
    val_dataloader: Any,
    tokenizer: Any,
    val_task_to_env: Mapping[str, EnvironmentInterface] | None,
    step: int,
    master_config: MasterConfig,
    *,
    processor: object = None,
) -> tuple[dict[str, float | None], dict[str, float]]:
    """Generate on the validation prompts and score them. Return (metrics, timing in seconds).

    The samples do not depend on `step`. Raises ValueError where there is nothing to validate on, and for a `processor`
    that is not the one of the model's folder.
    """
    if processor is not None:
        _compare_processor(processor, policy_generation.images)
    environments = as_workers(val_task_to_env or {}, policy_generation.cluster, master_config.cluster.platform)
    validation = run_validation(policy_generation, val_dataloader, environments, master_config, tokenizer=tokenizer)
    return validation.metrics, {"validate": validation.seconds, "total": validation.seconds}


def refit_policy_generation(
    policy: ColocatablePolicyInterface,
    policy_generation: GenerationInterface,
    colocated_inference: bool = True,
    _refit_buffer_size_gb: float | None = None,
    timer: Timer | None = None,
) -> RefitReport:
    """Make every engine's weights equal the policy's, as weight version `policy.updates` + 1.

    `colocated_inference` False: send everything over the network, as to engines with devices of their own.
    `_refit_buffer_size_gb`: size in GiB in place of policy.refit_buffer_size_gb. `timer`: times the stages.
    Raises RefitError; the engines then have their old weights, or refuse to generate from mixed ones.
    """
    return refit_once(
        policy, policy_generation, colocated=colocated_inference, buffer_gb=_refit_buffer_size_gb, timeline=timer
    )


def scale_rewards(repeated_batch: Any, reward_scaling_cfg: RewardScalingConfig | Mapping[str, Any]) -> Any:
    """Clamp the rewards of a batch to the source interval and map them to the target interval, in place.

    These are `total_reward` and each named reward, `reward/NAME`; the original total rewards stay in `unscaled_reward`.
    `repeated_batch`: a BatchedDataDict or any dict. `reward_scaling_cfg`: grpo.reward_scaling, or a mapping with its
    keys; nothing changes where it is not enabled. Return the batch.
    """
    scaling = RewardScalingConfig.model_validate(reward_scaling_cfg)
    if scaling.enabled:
        bounds = scaling.model_dump(exclude={"enabled"})
        rewards = repeated_batch["unscaled_reward"] = repeated_batch["total_reward"]
        repeated_batch["total_reward"] = scale_reward_values(rewards, **bounds)
        for name in [name for name in repeated_batch if name.startswith("reward/")]:
            repeated_batch[name] = scale_reward_values(repeated_batch[name], **bounds)
    return repeated_batch


def dynamic_sampling(
    repeated_batch: BatchedDataDict,
    std: Tensor,
    baseline: Tensor,
    dynamic_sampling_num_gen_batches: int,
    master_config: MasterConfig | Mapping[str, Any],
    timer: Timer | None = None,
    batch_cache: BatchedDataDict | None = None,
) -> tuple[BatchedDataDict, bool, BatchedDataDict | None]:
    """Keeps the groups of a generation batch whose rewards differ, until there are num_prompts_per_step of them.

    repeated_batch: samples of one generation batch, with `total_reward`; it gets the entries `std` and `baseline`.
    Groups are the samples of equal `uid`, else of equal `task_name` and `idx`, else every num_generations_per_prompt
    samples in a row. std, baseline [N]: of the group of each sample; a group is kept, whole, if the std of any of
    its samples is above 0. dynamic_sampling_num_gen_batches: generation batches of this step so far, this one
    included. batch_cache: what the call before returned, None for the first batch of a step.

    Returns (batch, complete, cache). Not complete: batch and cache hold the groups kept so far; generate another
    batch and call again. Complete: batch has exactly num_prompts_per_step * num_generations_per_prompt samples, the
    groups found first, and cache is None: surplus groups are not kept for a step with newer weights. `filtered_reward`
    is the reward of the kept samples, and so is `total_reward`. With grpo.use_dynamic_sampling false the batch is
    returned as it is, and complete.

    Raises ValueError where a group has not num_generations_per_prompt samples, and where
    dynamic_sampling_max_gen_batches batches did not give enough groups.
    """
    grpo = master_config["grpo"]
    repeated_batch["std"], repeated_batch["baseline"] = std, baseline
    if not grpo["use_dynamic_sampling"]:
        return repeated_batch, True, batch_cache
    generations = grpo["num_generations_per_prompt"]
    with timer.time("dynamic_sampling") if timer else nullcontext():
        kept = repeated_batch.select_indices(_kept_samples(repeated_batch, generations))
        kept["filtered_reward"] = kept["total_reward"]
        parts = [batch for batch in (batch_cache, kept) if batch is not None and batch.size]
        kept = BatchedDataDict.from_batches(parts) if parts else kept
    batches, needed = dynamic_sampling_num_gen_batches, grpo["num_prompts_per_step"]
    default = GRPOConfig.model_fields["dynamic_sampling_max_gen_batches"].default
    if kept.size >= needed * generations:
        return kept.slice(0, needed * generations), True, None
    if batches >= grpo.get("dynamic_sampling_max_gen_batches", default):
        raise ValueError(
            f"dynamic sampling: {batches} generation batches gave too little to train on: "
            f"{batches * repeated_batch.size // generations} prompts were generated, {kept.size // generations} of "
            f"them informative (their rewards differ), {needed} are needed; raise "
            "grpo.dynamic_sampling_max_gen_batches or grpo.batch_multiplier, or train on easier or harder data"
        )
    return kept, False, kept if kept.size else None


def _kept_samples(batch: BatchedDataDict, generations: int) -> list[int]:
    """Return the indices of the samples of informative groups, group by group in order of appearance."""
    groups: dict[Hashable, list[int]] = {}
    for sample, key in enumerate(_group_keys(batch, generations)):
        groups.setdefault(key, []).append(sample)
    for key, samples in groups.items():
        if len(samples) != generations:
            raise ValueError(
                f"dynamic sampling: group {key!r} has {len(samples)} samples, grpo.num_generations_per_prompt is "
                f"{generations}. An entry 'uid' says which samples belong to one prompt"
            )
    informative = (batch["std"] > 0).reshape(batch.size).tolist()
    return [i for samples in groups.values() if any(informative[j] for j in samples) for i in samples]


def _group_keys(batch: BatchedDataDict, generations: int) -> list[Hashable]:
    for name in ("uid", "idx"):
        if name in batch:
            ids = _items(batch[name])
            by_task = name == "idx" and "task_name" in batch  # idx counts within a dataset
            return list(zip(batch["task_name"], ids, strict=True)) if by_task else ids
    return [sample // generations for sample in range(batch.size)]


def _items(values: Tensor | list[Any]) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else values


_default_grpo_save_state = first_save_state


def _should_use_async_rollouts(master_config: MasterConfig | Mapping[str, Any]) -> bool:
    """Return whether rollouts are asynchronous: always, unless the mapping says vllm_cfg.async_engine: false."""
    generation = master_config["policy"]["generation"]
    return generation["backend"] == "vllm" and bool(generation["vllm_cfg"].get("async_engine", True))


def check_processor(processor: Any, shape: ModelShape, folder: str) -> None:
    """Raise ValueError for the processor of a vision model that makes other pixels than the one of the model's folder,
    which policy and engines use; and for any with a model that reads no images."""
    vision = shape.vision
    _compare_processor(processor, None if vision is None else ImageReader(vision, image_settings(folder, vision)))


def _compare_processor(processor: Any, images: ImageReader | None) -> None:
    if images is None:
        raise ValueError("processor: this run has no images, so a processor has no use here; pass None")
    image_processor = getattr(processor, "image_processor", processor)
    if not hasattr(image_processor, "to_dict"):
        raise ValueError(f"processor: {type(processor).__name__} has no image processor of transformers")
    theirs, ours = settings_of(image_processor.to_dict(), images.vision, "processor"), images.settings
    if theirs != ours:
        odd = [key for key, value in asdict(theirs).items() if value != getattr(ours, key)]
        values = ", ".join(f"{key} {getattr(theirs, key)} (the model's folder: {getattr(ours, key)})" for key in odd)
        raise ValueError(f"processor: it makes other pixels than policy and engines do: {values}; load it from there")
