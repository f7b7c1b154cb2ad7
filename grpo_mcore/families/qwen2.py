"""Qwen2 and Qwen2.5: dense decoder with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from grpo_mcore.families.dense import dense_params, dense_shape
from grpo_mcore.families.spec import ModelShape, require

params = dense_params


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    require(config, qk_norm=False)  # only vLLM reads it
    return dense_shape(config, family="qwen2", qkv_bias=True, qk_norm=False)
