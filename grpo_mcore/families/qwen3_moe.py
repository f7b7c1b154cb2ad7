"""Qwen3 mixture of experts and the text part of Qwen3-VL's: Qwen3's attention, experts without a shared one."""

from dataclasses import replace
from typing import Any

from grpo_mcore.families.dense import attention_params, decoder_params, dense_shape
from grpo_mcore.families.experts import dense_layers, expert_count, expert_params
from grpo_mcore.families.images import QWEN3_VL_DEFAULTS, with_vision
from grpo_mcore.families.spec import ExpertShape, ModelShape, Param, require


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`, of a vision model that of its text part and its tower."""
    if "text_config" in config:
        # Transformers always normalises, and vLLM where this says so.
        require({"model_type": config["model_type"]} | config["text_config"], norm_topk_prob=True)
        fixed = {"tie_word_embeddings": config.get("tie_word_embeddings", False), "norm_topk_prob": True}
        return with_vision(
            shape(QWEN3_VL_DEFAULTS | config["text_config"] | fixed),
            config, "Qwen3VLMoeVisionModel", root="model.visual", text_root="model.language_model", interleaved=True,
        )  # fmt: skip
    require(config, attention_bias=False)
    require(config, shared_expert_intermediate_size=0)  # only vLLM reads it
    experts = ExpertShape(
        count=expert_count(config),
        active=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        dense_layers=dense_layers(config),
        normalized=config.get("norm_topk_prob", False),
    )
    model = dense_shape(config, family="qwen3_moe", qkv_bias=False, qk_norm=True, experts=experts)
    return replace(model, stacked_experts=config["model_type"] == "qwen3_vl_moe_text")


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    return decoder_params(shape, attention_params, expert_params())
