"""One file a model family. `shape_of` reads a Hugging Face config, `params_of` declares every parameter."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_mcore.families import deepseek_v3, llama, mixtral, nemotron_h, qwen2, qwen3, qwen3_moe
from grpo_mcore.families.adapters import AdapterShape, adapter_shape, adapters_of, is_adapted
from grpo_mcore.families.dense import dense_flops
from grpo_mcore.families.engine import check_engine_parallel, engine_pieces, engine_shape, missing_on_cpu
from grpo_mcore.families.fits import check_fit
from grpo_mcore.families.spec import (
    Block,
    Box,
    ExpertShape,
    FamilyError,
    HfTensor,
    MambaShape,
    ModelShape,
    Param,
    Piece,
    Split,
    Stage,
    check_tensor_parallel,
    local_shape,
    pieces,
)

FAMILIES: dict[str, Any] = {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "llama": llama,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "deepseek_v3": deepseek_v3,
    "nemotron_h": nemotron_h,
}


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The shape that a Hugging Face config describes. Raises FamilyError for a model type without a family, and for a
    config that lacks a key."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise FamilyError(f"model_type {config.get('model_type')!r} has no family here; there are {sorted(FAMILIES)}")
    try:
        return family.shape(config)
    except KeyError as error:
        raise FamilyError(f"config.json of a {config['model_type']} model lacks {error.args[0]}") from error


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a local Hugging Face folder. Raises FamilyError that says what is missing."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FamilyError(
            f"policy.model_name: {folder} holds no config.json; give a Hugging Face folder, or a name of the hub"
        )
    return json.loads(path.read_text())


@lru_cache(maxsize=8)  # of DeepSeek-V3 there are 45,000
def params_of(shape: ModelShape) -> tuple[Param, ...]:
    """Every parameter of the model, in the order of the forward pass."""
    return FAMILIES[shape.family].params(shape)


def forward_flops(shape: ModelShape, lengths: list[int]) -> float:
    """FLOPs of one forward pass over sequences of these lengths."""
    flops = getattr(FAMILIES[shape.family], "flops", dense_flops)
    return flops(shape, sum(lengths), sum(length * length for length in lengths))


def parameter_count(shape: ModelShape) -> int:
    """Number of parameters, tied embeddings counted once."""
    return sum(tensor.numel for param in params_of(shape) if not param.copy for tensor in param.hf)


__all__ = [
    "FAMILIES", "AdapterShape", "Block", "Box", "ExpertShape", "FamilyError", "HfTensor", "MambaShape", "ModelShape",
    "Param", "Piece", "Split", "Stage", "adapter_shape", "adapters_of", "check_engine_parallel", "check_fit",
    "check_tensor_parallel", "engine_pieces", "engine_shape", "forward_flops", "is_adapted", "local_shape",
    "missing_on_cpu", "parameter_count", "params_of", "pieces", "read_hf_config", "shape_of",
]  # fmt: skip
