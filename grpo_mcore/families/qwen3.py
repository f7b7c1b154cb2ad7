"""Qwen3 dense and the text part of Qwen3-VL: no biases, RMS norm on every query and key head."""

from typing import Any

from grpo_mcore.families.dense import dense_params, dense_shape
from grpo_mcore.families.images import QWEN3_VL_DEFAULTS, with_vision
from grpo_mcore.families.spec import ModelShape, require

params = dense_params


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`, of a vision model that of its text part and its tower."""
    if "text_config" in config:
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        return with_vision(
            shape(QWEN3_VL_DEFAULTS | config["text_config"] | tied),
            config, "Qwen3VLVisionModel", root="model.visual", text_root="model.language_model", interleaved=True,
        )  # fmt: skip
    require(config, attention_bias=False)
    return dense_shape(config, family="qwen3", qkv_bias=False, qk_norm=True)
