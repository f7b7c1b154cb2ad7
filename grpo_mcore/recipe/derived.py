"""Values that follow from others where a recipe leaves them null."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo_mcore.recipe.interpolate import InterpolationError, resolve_text

if TYPE_CHECKING:
    from grpo_mcore.recipe.master import MasterConfig

# In this order: an expression may use keys that stand above it.
DERIVED: dict[str, str | int] = {
    "policy.tokenizer.name": "${policy.model_name}",
    "policy.logprob_batch_size": "${policy.train_micro_batch_size}",
    "policy.logprob_chunk_size": 1024,
    "policy.sequence_packing.train_mb_tokens": (
        "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}"
    ),
    "policy.sequence_packing.logprob_mb_tokens": (
        "${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}"
    ),
    "policy.megatron_cfg.pipeline_dtype": "${policy.precision}",
    "policy.megatron_cfg.optimizer.clip_grad": "${policy.max_grad_norm}",
    "policy.megatron_cfg.scheduler.start_weight_decay": "${policy.megatron_cfg.optimizer.weight_decay}",
    "policy.megatron_cfg.scheduler.end_weight_decay": "${policy.megatron_cfg.optimizer.weight_decay}",
    "policy.generation.max_new_tokens": "${policy.max_total_sequence_length}",
    "policy.generation.val_temperature": "${policy.generation.temperature}",
    "policy.generation.val_top_p": "${policy.generation.top_p}",
    "policy.generation.val_top_k": "${policy.generation.top_k}",
    "policy.generation.vllm_cfg.max_model_len": "${policy.max_total_sequence_length}",
    "policy.generation.vllm_cfg.precision": "${policy.precision}",
    "data.max_input_seq_length": "${policy.max_total_sequence_length}",
    "grpo.reward_shaping.max_response_length": "${policy.max_total_sequence_length}",
    "sft.val_global_batch_size": "${policy.train_global_batch_size}",
}


def value_at(config: Any, key: str) -> Any:
    """The value of a full key of a configuration; None where a section of it is missing."""
    for part in key.split("."):
        config = config[int(part)] if isinstance(config, list) else config[part]
    return config


def fill_derived(config: MasterConfig) -> None:
    """Give every null key of DERIVED its value, and datasets without `env_name` the only environment."""
    for key, expression in DERIVED.items():
        section, name = _parent(config, key)
        if section[name] is None:
            section[name] = _evaluate(expression, config)
    if config.policy.megatron_cfg.optimizer.bf16 is None:
        config.policy.megatron_cfg.optimizer.bf16 = config.policy.precision == "bfloat16"
    if len(config.env) == 1:
        for entry in [*config.data.train, *config.data.validation]:
            if entry.env_name is None:
                entry.env_name = next(iter(config.env))


def missing_value(key: str, null: bool) -> Any:
    """What an interpolation finds at a key that a recipe does not set, or sets to null: the expression that
    it is derived from, else null or its default. Raises InterpolationError where there is none."""
    from grpo_mcore.recipe.schema import default_of, suggestion

    if key in DERIVED:
        return DERIVED[key]
    if null:
        return None
    try:
        return default_of(key)
    except KeyError:
        near = suggestion(key)
        hint = f"; nearest known key: {near}" if near and near != key else ""
        raise InterpolationError(f"{key} has no value{hint}") from None


def _evaluate(expression: str | int, config: MasterConfig) -> Any:
    return resolve_text(expression, lambda key: value_at(config, key)) if isinstance(expression, str) else expression


def _parent(config: MasterConfig, key: str) -> tuple[Any, str]:
    section, _, name = key.rpartition(".")
    return value_at(config, section), name
