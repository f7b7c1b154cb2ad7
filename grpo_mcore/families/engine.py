"""The engine's half of a family's declaration: where each slice of a Hugging Face tensor lies in vLLM's parameters.
vLLM fuses the same tensors as Megatron-Core, in another order, and splits the vocabulary differently."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from grpo_mcore.families.spec import (
    Block,
    Box,
    HfTensor,
    ModelShape,
    Param,
    Piece,
    Split,
    local_shape,
    pieces,
)

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this many rows before it splits it."""


def engine_shape(param: Param, shape: ModelShape, tp_size: int) -> tuple[int, ...]:
    """Return the shape of vLLM's parameter on one tensor-parallel rank, for experts without the expert dimension."""
    tail = param.hf[0].shape[1:]
    match param.engine_split:
        case Split.VOCAB:
            return (_vocabulary_rows(shape, tp_size), *tail)
        case Split.QKV:
            return (sum(count for _, _, count in _qkv_rows(param, shape, 0, tp_size)), *tail)
        case _:
            return local_shape(replace(param, split=param.engine_split), shape, tp_size)


def engine_pieces(param: Param, shape: ModelShape, tp_rank: int, tp_size: int) -> list[Piece]:
    """Return the slices of the Hugging Face tensors on a tensor-parallel rank of vLLM, and where they lie."""
    tail = tuple((0, size) for size in param.hf[0].shape[1:])
    form = param.engine_form
    match param.engine_split:
        case Split.VOCAB:
            per_rank = _vocabulary_rows(shape, tp_size)
            start = tp_rank * per_rank
            count = min(per_rank, max(0, shape.vocab_size - start))
            if not count:
                return []
            return [Piece(param.hf[0].name, ((start, start + count), *tail), ((0, count), *tail))]
        case Split.QKV:
            placed, row = [], 0
            for tensor, start, count in _qkv_rows(param, shape, tp_rank, tp_size):
                placed.append(Piece(tensor.name, ((start, start + count), *tail), ((row, row + count), *tail)))
                row += count
            return placed
        case split:
            placed = pieces(replace(param, split=split), shape, tp_rank, tp_size)
            return [replace(piece, local_box=_lower(piece.local_box, form.start)) for piece in placed]


def _lower(box: Box, rows: int) -> Box:
    (start, stop), *tail = box
    return ((start + rows, stop + rows), *tail)


def _vocabulary_rows(shape: ModelShape, tp_size: int) -> int:
    """Return the rows of the vocabulary on one rank, padding included."""
    return math.ceil(shape.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tp_size


def _qkv_rows(param: Param, shape: ModelShape, tp_rank: int, tp_size: int) -> list[tuple[HfTensor, int, int]]:
    """Return (tensor, first row, number of rows) of the rank's query heads, keys and values, in this order.

    With more ranks than key-value heads, neighbouring ranks hold the same head.
    """
    q, k, v = param.hf
    queries = q.shape[0] // tp_size
    copies = max(1, tp_size // shape.num_kv_heads)
    key_values = shape.local_kv_heads(tp_size) * shape.head_dim
    first = tp_rank // copies * key_values
    return [(q, tp_rank * queries, queries), (k, first, key_values), (v, first, key_values)]


def engine_sizes(shape: ModelShape, expert_parallel: bool = False) -> dict[str, int]:
    """Return the sizes, by name, that an engine's tensor-parallel size must divide, without key-value heads, which
    ranks may share. `expert_parallel`: experts stay whole and are distributed over the ranks.

    (vLLM could repeat a Mamba2 mixer's single group on every rank; that is not declared here.)
    """
    sizes, experts = {"num_attention_heads": shape.num_heads}, shape.experts
    if (delta := shape.delta) is not None:
        sizes["linear_num_key_heads"] = delta.key_heads
    if (mamba := shape.mamba) is not None:
        sizes |= {"mamba_num_heads": mamba.heads, "n_groups": mamba.groups}
    if Block.MLP in shape.blocks or (not shape.blocks and (experts is None or experts.dense_layers)):
        sizes["intermediate_size"] = shape.ffn_hidden_size
    if experts is not None and not expert_parallel:
        sizes["the experts' intermediate size"] = experts.ffn_hidden_size
    if experts is not None:
        sizes["the shared expert's size"] = experts.shared_ffn_hidden_size
    return sizes | {"the padded vocabulary": _vocabulary_rows(shape, 1)}


CPU_LATENT_HEAD = 576
"""The only size of key-value latent plus rotary part for which vLLM's CPU build compiles latent attention."""


def engine_options(shape: ModelShape, *, gpu: bool = False) -> dict[str, Any]:
    """Return the settings (generation.EngineConfig) that an engine needs for this model."""
    if gpu:
        return {"text_only": shape.engine_root != "model"}
    return {
        "text_only": shape.engine_root != "model",
        "prefix_caching": shape.mamba is None and shape.delta is None,
        "torch_rotary": shape.latent is not None,
    }


def needs_output_layer(shape: ModelShape) -> bool:
    """Return whether vLLM gives this model, whose embeddings are tied, an output layer of its own. Neither a file nor a
    refit fills it, so it would hold arbitrary values."""
    untied = shape.family in ("deepseek_v3", "glm4_moe", "minimax_m2", "gpt_oss")
    return shape.tied_embeddings and (untied or (shape.delta is not None and shape.delta.inputs_by_head))


def missing_on_cpu(shape: ModelShape, expert_parallel: bool = False) -> str | None:
    """Describe the kernel of this model that vLLM's CPU build lacks; None if it can run the model."""
    latent = shape.latent
    if shape.longest_sequence is not None:
        return "vLLM always gives it sparse attention, which has no CPU kernel"
    if expert_parallel:
        return "its experts cannot be distributed over an engine's ranks; set vllm_cfg.expert_parallel_size to 1"
    if latent is not None and (size := latent.key_value_rank + latent.rotary_dim) != CPU_LATENT_HEAD:
        return f"its latent attention needs kv_lora_rank + qk_rope_head_dim = {CPU_LATENT_HEAD}; here it is {size}"
    return None
