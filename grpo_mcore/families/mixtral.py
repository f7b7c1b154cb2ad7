"""Mixtral: Llama's attention, every layer with experts."""

from typing import Any

from grpo_mcore.families.dense import attention_params, decoder_params, dense_shape
from grpo_mcore.families.experts import expert_count, expert_params
from grpo_mcore.families.spec import ExpertShape, ModelShape, Param, require


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    require(config, sliding_window=None)
    experts = ExpertShape(
        count=expert_count(config), active=config["num_experts_per_tok"], ffn_hidden_size=config["intermediate_size"]
    )
    return dense_shape(config, family="mixtral", qkv_bias=False, qk_norm=False, experts=experts)


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    experts = expert_params(block="block_sparse_moe", gate="w1", up="w3", down="w2")
    return decoder_params(shape, attention_params, experts)
