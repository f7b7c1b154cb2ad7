"""The engine's half of a family's declaration: where each slice of a Hugging Face tensor lies in vLLM's parameters.
vLLM fuses the same tensors as Megatron-Core, in another order, and splits the vocabulary differently."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase, translate
from typing import Any, Protocol

from grpo_mcore.families.registry import params_of
from grpo_mcore.families.spec import Block, Box, HfTensor, ModelShape, Param, Piece, Split, local_shape, pieces

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


def engine_options(shape: ModelShape, *, gpu: bool = False, images: int = 0) -> dict[str, Any]:
    """Return the settings (generation.EngineConfig) that an engine needs for this model: on a GPU the same as on CPU,
    where they are tested, but for what a kernel of vLLM's CPU build lacks. `images`: most images of a prompt."""
    tower = (f"{shape.vision.engine_root}.",) if shape.vision is not None and images else ()
    return {
        "text_only": shape.engine_root != "model" and not images,
        "images": images,
        "kept": tower,
        "prefix_caching": shape.mamba is None and shape.delta is None,
        "torch_rotary": shape.latent is not None and not gpu,
    }


class QuantizationKeys(Protocol):
    """The keys of policy.generation.vllm_cfg that are read here."""

    num_first_layers_in_bf16: int
    num_last_layers_in_bf16: int
    quantization_ignored_layer_kws: list[str]
    quantization_ignore_patterns: list[str]


def unquantized_layers(shape: ModelShape, keys: QuantizationKeys | None = None) -> tuple[str, ...]:
    """Return vLLM's patterns for the linear layers of a quantised engine that stay in bfloat16: what chooses experts or
    gates them, what others are derived from, small projections and convolutions; and what the recipe's `keys` name.

    Raises ValueError for a key that names no weight, unless it is of an MTP layer, for one that names weights and not
    the engine's layer that they are in, and for more layers than there are.
    """
    names = ["gate", "shared_expert_gate"] if shape.experts is not None else []
    names += ["kv_b_proj"] if shape.latent is not None else []
    names += ["in_proj_ba", "in_proj_b", "in_proj_a"] if shape.delta is not None else []
    names += ["conv1d"] if shape.delta is not None or shape.mamba is not None else []
    patterns = [r"re:.*\.(" + "|".join(names) + r")$"] if names else []
    if keys is None:
        return tuple(patterns)
    first, last = keys.num_first_layers_in_bf16, keys.num_last_layers_in_bf16
    if first + last > shape.num_layers:
        raise ValueError(f"{first} first and {last} last layers: the model has {shape.num_layers}")
    if layers := [*range(first), *range(shape.num_layers - last, shape.num_layers)]:
        patterns.append(r"re:.*\.layers\.(" + "|".join(map(str, layers)) + r")\.")
    engine_layers = {
        tensor.name: _engine_layers(param, tensor.name) for param in params_of(shape) for tensor in param.hf
    }
    tensors = [*engine_layers]

    def keep(key: str, pattern: str, matching: Iterable[str]) -> None:
        for name in matching:
            if engine_layers[name] and not any(re.match(pattern, layer) for layer in engine_layers[name]):
                raise ValueError(
                    f"{key!r} names {name}; engines have it in {engine_layers[name][0]}, which {key!r} does not name"
                )
        patterns.append(f"re:{pattern}")

    for word in keys.quantization_ignored_layer_kws:
        if not (matching := [name for name in tensors if word in name]):
            raise ValueError(f"no tensor has {word!r} in its name; {tensors[1]} is one of {len(tensors)} names")
        keep(word, f".*{re.escape(word)}.*", matching)
    for pattern in keys.quantization_ignore_patterns:
        number = re.search(r"layers\.(\d+)\.", pattern)
        of_mtp = "mtp" in pattern or (number is not None and int(number[1]) >= shape.num_layers)
        matching = [name for name in tensors if fnmatchcase(name.removesuffix(".weight"), pattern)]
        if not of_mtp and not matching:
            raise ValueError(f"no layer has the name {pattern!r}; {tensors[1]} is one of {len(tensors)} tensors")
        keep(pattern, translate(pattern), matching)
    return tuple(patterns)


def _engine_layers(param: Param, tensor: str) -> list[str]:
    """Return the names by which vLLM looks for the layer of a tensor in its patterns: of experts that of all of them,
    of what it fuses that of the whole and that of the part. Empty for what is no layer's weight."""
    if param.engine is None or len(param.hf[0].shape) < 2:
        return []
    layer = param.engine.rpartition(".")[0]
    if layer.endswith(".routed_experts"):
        return [layer.removesuffix(".routed_experts")]
    return [layer, ".".join([layer.rpartition(".")[0], *tensor.split(".")[-2:-1]])]


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
