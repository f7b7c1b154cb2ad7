"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) on whole batches, for scripts with a loop of their own. When a
step is complete, and when too much was generated for it, the loop's own schedule decides.

Groups whose rewards are all equal give no gradient: they are replaced by the groups of further generation batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from grpo_mcore.data import BatchedDataDict
from grpo_mcore.observe import Timeline
from grpo_mcore.recipe import GRPOConfig, MasterConfig
from grpo_mcore.rollout import schedule as s


def dynamic_sampling(
    repeated_batch: BatchedDataDict,
    std: Tensor,
    baseline: Tensor,
    dynamic_sampling_num_gen_batches: int,
    master_config: MasterConfig | Mapping[str, Any],
    timer: Timeline | None = None,
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
    with timer.phase("dynamic_sampling") if timer else nullcontext():
        kept = repeated_batch.select_indices(_kept_samples(repeated_batch, generations))
        kept["filtered_reward"] = kept["total_reward"]
        found = [batch for batch in (batch_cache, kept) if batch is not None and batch.size]
        kept = BatchedDataDict.from_batches(found) if found else kept
    command = _next_command(
        grpo,
        kept.size // generations,
        batch=repeated_batch.size // generations,
        batches=dynamic_sampling_num_gen_batches,
    )
    if isinstance(command, s.Train):
        return kept.slice(0, len(command.groups) * generations), True, None
    return kept, False, kept if kept.size else None


def _next_command(grpo: Mapping[str, Any], kept: int, *, batch: int, batches: int) -> s.Command:
    """What the loop's own schedule does after `batches` generation batches of `batch` groups gave `kept` groups."""
    default = GRPOConfig.model_fields["dynamic_sampling_max_gen_batches"].default
    config = s.ScheduleConfig(
        grpo["num_prompts_per_step"],
        max_steps=1,
        prompts_per_dispatch=batch,
        max_gen_batches=grpo.get("dynamic_sampling_max_gen_batches", default),
    )
    schedule = s.Schedule(config, engine_version=1)
    uids = [str(group) for group in range(max(kept, batch * batches))]
    schedule.record(s.Dispatched(tuple(uids)))
    for number, uid in enumerate(uids):
        schedule.record(s.GroupFinished(uid, informative=number < kept))
    try:
        return schedule.next()
    except s.ScheduleError as error:
        raise ValueError(f"dynamic sampling: {str(error).partition(': ')[2]}") from error


def _kept_samples(batch: BatchedDataDict, generations: int) -> list[int]:
    """Indices of the samples of informative groups, group by group in order of appearance."""
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
