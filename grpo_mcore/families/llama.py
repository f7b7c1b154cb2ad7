"""Llama 2 and 3, and models of that shape: no biases, no query or key norm."""

from __future__ import annotations

from typing import Any

from grpo_mcore.families.dense import dense_params, dense_shape
from grpo_mcore.families.spec import FamilyError, ModelShape

params = dense_params


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise FamilyError("config.json: attention_bias or mlp_bias true is not supported for llama models")
    return dense_shape(config, family="llama", qkv_bias=False, qk_norm=False)
