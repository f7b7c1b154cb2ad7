"""Rules between two keys that have the same shape, as tables. The place of a problem is that of the first key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.schema.master import RecipeSections, value_at

NEEDS = {
    ("policy.sequence_packing.shared_prefix.enabled", "policy.sequence_packing.enabled"): (
        "needs policy.sequence_packing.enabled true"
    ),
    ("grpo.adv_estimator.options", "grpo.adv_estimator.path"): "are for an estimator of your own: set path",
    ("grpo.reward_shaping.options", "grpo.reward_shaping.path"): "are for a function of your own: set path",
    ("grpo.reward_shaping.path", "grpo.reward_shaping.enabled"): "has no effect without enabled: true",
    ("grpo.stop_at_validation_metric", "grpo.stop_at_validation_threshold"): (
        "needs stop_at_validation_threshold (such as 0.9)"
    ),
    ("grpo.stop_at_validation_threshold", "grpo.stop_at_validation_metric"): (
        "needs stop_at_validation_metric (such as accuracy)"
    ),
    ("checkpointing.mirror", "checkpointing.enabled"): "there are no checkpoints to copy; set it to null",
    ("cluster.max_restarts", "checkpointing.enabled"): (
        "a run restarts from its newest checkpoint: set checkpointing.enabled: true, or max_restarts: 0"
    ),
}
"""Message for a key that is on while the other, which it needs, is off."""

AT_MOST = (
    ("policy.generation.max_new_tokens", "policy.max_total_sequence_length"),
    ("policy.generation.vllm_cfg.max_model_len", "policy.max_total_sequence_length"),
    ("data.max_input_seq_length", "policy.max_total_sequence_length"),
    ("policy.megatron_cfg.optimizer.min_lr", "policy.megatron_cfg.optimizer.lr"),
    ("policy.megatron_cfg.scheduler.lr_warmup_init", "policy.megatron_cfg.optimizer.lr"),
    ("grpo.advantage_clip_low", "grpo.advantage_clip_high"),
)
"""Keys whose value must not be above that of the other, where both have one."""

SAME = (
    ("policy.megatron_cfg.optimizer.clip_grad", "policy.max_grad_norm"),
    ("policy.megatron_cfg.pipeline_dtype", "policy.precision"),
)
"""Keys of Megatron-Core that repeat a key of `policy`. null and 0 are the same."""


def check_pairs(config: RecipeSections) -> Iterator[Finding]:
    """Yield what is wrong by the tables of this file."""
    for keys, message in NEEDS.items():
        if _is_on(value_at(config, keys[0])) and not _is_on(value_at(config, keys[1])):
            yield Finding(keys, message)
    for keys in AT_MOST:
        value, limit = (value_at(config, key) for key in keys)
        if value is not None and limit is not None and value > limit:
            yield Finding(keys, f"{value} is above {keys[1]} = {limit}")
    for keys in SAME:
        value, other = (value_at(config, key) for key in keys)
        if (value or 0) != (other or 0):
            yield Finding(keys, f"{value} contradicts {keys[1]} = {other}; set only that")


def _is_on(value: Any) -> bool:
    """Return whether a value switches something on: not null, false, an empty mapping or the number of times 0."""
    return value is not None and value is not False and value != {} and not (isinstance(value, int) and value == 0)
