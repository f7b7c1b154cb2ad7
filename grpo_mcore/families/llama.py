"""Llama 2 and 3, and models of that shape: no biases, no query or key norm."""

from typing import Any

from grpo_mcore.families.dense import dense_params, dense_shape
from grpo_mcore.families.spec import ModelShape, require

params = dense_params


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    require(config, attention_bias=False, mlp_bias=False)
    require(config, bias=False, qkv_bias=False)  # only vLLM reads these
    return dense_shape(config, family="llama", qkv_bias=False, qk_norm=False)
