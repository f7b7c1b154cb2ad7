"""Qwen2, Qwen2.5 and the text part of Qwen2.5-VL: dense decoder with biases on q, k and v."""

from typing import Any

from grpo_mcore.families.dense import dense_params, dense_shape
from grpo_mcore.families.images import with_vision
from grpo_mcore.families.spec import ModelShape, require

params = dense_params


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`, of a vision model that of its text part and its tower."""
    if config["model_type"] == "qwen2_5_vl":  # published with the text's keys at the top, written by transformers apart
        text = shape(config | config.get("text_config", {}) | {"model_type": "qwen2"})
        tower = "Qwen2_5_VisionTransformerPretrainedModel"
        return with_vision(text, config, tower, root="visual", text_root="model", interleaved=False)
    require(config, qk_norm=False)  # only vLLM reads it
    return dense_shape(config, family="qwen2", qkv_bias=True, qk_norm=False)
