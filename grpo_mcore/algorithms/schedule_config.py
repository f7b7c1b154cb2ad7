"""What the schedule reads of a recipe."""

from __future__ import annotations

from grpo_mcore.recipe import MasterConfig, prompts_per_generation_batch
from grpo_mcore.rollout.schedule import ScheduleConfig

GIB = 2**30


def schedule_config(config: MasterConfig, *, validates: bool) -> ScheduleConfig:
    """`validates`: there is something to validate on."""
    grpo, ahead, save = config.grpo, config.grpo.async_grpo, config.checkpointing
    return ScheduleConfig(
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
    )
