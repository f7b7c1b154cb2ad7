"""The registered families, and the functions that look one up."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from grpo_mcore.families import (
    deepseek_v3,
    gemma3_text,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    nemotron_h,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from grpo_mcore.families.dense import dense_flops
from grpo_mcore.families.spec import FamilyError, ModelShape, Param

MODULES = (qwen2, qwen3, llama, qwen3_moe, mixtral, deepseek_v3, glm4_moe, minimax_m2, nemotron_h, gemma3_text, gpt_oss)
FAMILIES: dict[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in MODULES}
"""Modules by name, which is the `model_type` of `config.json`."""
# Architectures with other names, or several.
FAMILIES |= dict.fromkeys(("kimi_k2", "glm4_moe_lite", "glm_moe_dsa"), deepseek_v3)
FAMILIES["gemma3"] = gemma3_text
FAMILIES |= dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), qwen3_5)

OPTIONAL = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "sliding_window")
"""Keys of a Hugging Face config that many models leave at their default."""


def read_hf_config(folder: str | Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Read `config.json` of a local Hugging Face folder, with `overrides` (policy.hf_config_overrides). Raises
    FamilyError if it is missing, or for an override of a key that it does not have."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FamilyError(
            f"policy.model_name: {folder} holds no config.json; give a Hugging Face folder, or a name of the hub"
        )
    return with_overrides(json.loads(path.read_text()), overrides)


def with_overrides(
    config: Mapping[str, Any], overrides: Mapping[str, Any], at: str = "policy.hf_config_overrides"
) -> dict[str, Any]:
    """Return a Hugging Face config with values replaced; mappings are merged. Raises FamilyError for a key that it does
    not have, except one of OPTIONAL."""
    replaced = dict(config)
    for key, value in overrides.items():
        if key not in config and key not in OPTIONAL:
            near = get_close_matches(key, config, n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise FamilyError(f"{at}.{key}: the model's config.json has no such key{hint}")
        both = isinstance(value, Mapping) and isinstance(config.get(key), Mapping)
        replaced[key] = {**config[key], **value} if both else value
    return replaced


def shape_of(config: dict[str, Any]) -> ModelShape:
    """Return the shape that a Hugging Face config describes. Raises FamilyError if its model type is not supported or
    it lacks a key."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise FamilyError(f"model_type {config.get('model_type')!r} is not supported; choose one of {sorted(FAMILIES)}")
    try:
        return family.shape(config)
    except KeyError as error:
        raise FamilyError(f"config.json of a {config['model_type']} model lacks {error.args[0]}") from error


@lru_cache(maxsize=8)  # DeepSeek-V3 has 45,000
def params_of(shape: ModelShape) -> tuple[Param, ...]:
    """Return every parameter of the model, in the order of the forward pass."""
    return FAMILIES[shape.family].params(shape)


def forward_flops(shape: ModelShape, lengths: list[int]) -> float:
    """Return the FLOPs of one forward pass over sequences of these lengths."""
    flops: Callable[[ModelShape, int, int], float] = getattr(FAMILIES[shape.family], "flops", dense_flops)
    total = flops(shape, sum(lengths), sum(length * length for length in lengths))
    unseen = sum(max(0, length - window) ** 2 for window in shape.windows if window for length in lengths)
    return total - 2.0 * shape.num_heads * shape.head_dim * unseen


def parameter_count(shape: ModelShape) -> int:
    """Return the number of parameters, tied embeddings counted once."""
    return sum(tensor.numel for param in params_of(shape) if not param.copy for tensor in param.hf)
