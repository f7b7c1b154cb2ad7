"""`grpo.reward_scaling` on a batch of a script's own."""

from __future__ import annotations

from typing import Any

from grpo_mcore.objective import scale_reward_values
from grpo_mcore.recipe import RewardScalingConfig


def scale_rewards(repeated_batch: Any, reward_scaling_cfg: Any) -> Any:
    """`repeated_batch["total_reward"]` clamped to the source interval and mapped to the target interval, in place.

    The rewards as they were stay in `repeated_batch["unscaled_reward"]`. `repeated_batch`: a BatchedDataDict or any
    dict. `reward_scaling_cfg`: grpo.reward_scaling, or a mapping with its keys; not enabled, nothing changes. Returns
    the batch.
    """
    scaling = RewardScalingConfig.model_validate(reward_scaling_cfg)
    if scaling.enabled:
        bounds = scaling.model_dump(exclude={"enabled"})
        rewards = repeated_batch["unscaled_reward"] = repeated_batch["total_reward"]
        repeated_batch["total_reward"] = scale_reward_values(rewards, **bounds)
    return repeated_batch
