"""Qwen3 dense: no biases, RMS norm on every query and key head."""

from __future__ import annotations

from typing import Any

from grpo_mcore.families.dense import dense_params, dense_shape
from grpo_mcore.families.spec import FamilyError, ModelShape

params = dense_params


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    if config.get("attention_bias"):
        raise FamilyError("config.json: attention_bias true is not supported for qwen3 models")
    return dense_shape(config, family="qwen3", qkv_bias=False, qk_norm=True)
