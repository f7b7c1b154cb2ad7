"""MiniMax-M2: every layer has experts chosen by sigmoid scores and a correction bias; queries and keys are normed over
all heads, and a part of each head rotates.

Layers for multi-token prediction, which a checkpoint may have after the last layer, are neither loaded nor exported.
"""

from dataclasses import replace
from typing import Any

from grpo_mcore.families.dense import attention_params, decoder_params, dense_shape
from grpo_mcore.families.experts import expert_params, sigmoid_experts
from grpo_mcore.families.spec import ModelShape, Param, require


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`. vLLM takes the scores and the bias from keys that transformers assumes."""
    require(config, attention_bias=False, use_qk_norm=True, qk_norm_type="per_layer")
    require(config, scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0)
    part = config["rotary_dim"] / config["head_dim"] if "rotary_dim" in config else None
    experts = sigmoid_experts({"moe_intermediate_size": config["intermediate_size"]} | config)
    model = dense_shape(
        {"partial_rotary_factor": part} | config,
        family="minimax_m2", qkv_bias=False, qk_norm=False, partial_rotary=True, experts=experts,
    )  # fmt: skip
    return replace(model, wide_qk_norm=True)


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    names = {"gate": "w1", "up": "w3", "down": "w2", "bias": "e_score_correction_bias"}
    return decoder_params(
        shape, attention_params, expert_params(block="block_sparse_moe", float32_router=True, **names)
    )
