"""Qwen3 mixture of experts: Qwen3's attention, experts without a shared one."""

from __future__ import annotations

from typing import Any

from grpo_mcore.families.dense import attention_params, decoder_params, dense_shape
from grpo_mcore.families.experts import dense_layers, expert_count, expert_params
from grpo_mcore.families.spec import ExpertShape, ModelShape, Param, require


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    require(config, attention_bias=False)
    require(config, shared_expert_intermediate_size=0)  # only vLLM reads it
    experts = ExpertShape(
        count=expert_count(config),
        active=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        dense_layers=dense_layers(config),
        normalized=config.get("norm_topk_prob", False),
    )
    return dense_shape(config, family="qwen3_moe", qkv_bias=False, qk_norm=True, experts=experts)


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    return decoder_params(shape, attention_params, expert_params())
