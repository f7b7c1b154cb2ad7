"""Qwen3 dense: no biases, RMS norm on every query and key head."""

from __future__ import annotations

from typing import Any

from grpo_mcore.families.dense import dense_params, dense_shape
from grpo_mcore.families.spec import ModelShape, require

params = dense_params


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    require(config, attention_bias=False)
    return dense_shape(config, family="qwen3", qkv_bias=False, qk_norm=True)
