"""The declaration of a model family: its shape, and for every parameter where each slice of the Hugging Face tensors
lies in Megatron-Core. It serves building, loading, exporting, refit and planning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, Literal

HEAD, VALUE_HEAD = "output_layer.weight", "score.weight"
"""Megatron-Core's name of the output layer, and transformers' name of one that has one output."""

Box = tuple[tuple[int, int], ...]  # (start, stop) of every dimension


class FamilyError(ValueError):
    """No family here can build this Hugging Face config, or the model does not allow a setting of the recipe."""


@contextmanager
def from_key(key: str) -> Iterator[None]:
    """Begin the message of a ValueError about a model's folder with the key of the recipe that names it."""
    try:
        yield
    except ValueError as error:
        error.args = (f"{key}: {error}",)
        raise


def require(config: dict[str, Any], **supported: Any) -> None:
    """Raise FamilyError if a key of the config has another value than the only one that its family supports.

    A missing key has that value; null equals false.
    """
    for key, value in supported.items():
        if (config.get(key, value) or None) != (value or None):
            raise FamilyError(
                f"config.json: {key} {config[key]!r} is not supported for {config['model_type']} models; only {value}"
            )


def require_words(config: dict[str, Any], key: str, *words: str) -> None:
    """Raise FamilyError if the config's list of a word for each layer, which may be missing, has one that its family
    does not know."""
    if others := sorted({*map(str, config.get(key) or ())} - {*words}):
        raise FamilyError(
            f"config.json: {key} {', '.join(others)} are not supported for {config['model_type']} models; only "
            f"{', '.join(words)}"
        )


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a mixture-of-experts model, and how tokens are routed to them."""

    count: int
    active: int  # experts per token
    ffn_hidden_size: int
    dense_layers: tuple[int, ...] = ()  # layers without experts
    normalized: bool = True  # the weights of a token's experts sum to one
    shared_ffn_hidden_size: int = 0  # of the shared expert; 0: there is none
    sigmoid: bool = False  # sigmoid scores instead of softmax, with a correction bias used only for the choice
    groups: int = 1  # groups of experts; a token's experts come from `active_groups` of them
    active_groups: int = 1
    scaling: float = 1.0  # factor on the experts' weights
    shared_gate: bool = False  # a sigmoid of the hidden states scales the shared expert's output
    clamp: float | None = None  # limit of gate and up, whose rows alternate, in experts with biases; None: plain SwiGLU
    latent_size: int = 0  # width of a projection of the hidden states that experts compute on; 0: no projection

    @property
    def one_of_weight_1(self) -> bool:
        """Whether each token has one expert, whose normalised weight is 1 whatever its score."""
        return self.active == 1 and self.normalized


@dataclass(frozen=True)
class YarnShape:
    """YaRN scaling of rotary frequencies (arXiv 2309.00071), named as in the Hugging Face config. `truncate`: the range
    of dimensions between those that are scaled and those that are not is rounded to whole ones."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): queries, keys, values come from low-rank latents."""

    query_rank: int | None  # None: queries come from the hidden states
    key_value_rank: int
    plain_dim: int  # part of a query or key head without position
    rotary_dim: int  # rotary part of a query head, and of the key, which all heads share
    value_dim: int
    yarn: YarnShape | None


class Block(Enum):
    """Kind of a layer of a hybrid model."""

    MAMBA = "mamba"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"


@dataclass(frozen=True)
class MambaShape:
    """A Mamba2 mixer (arXiv 2405.21060)."""

    gpu_packages: ClassVar[tuple[str, ...]] = ("mamba_ssm", "causal_conv1d")  # optional, with its fused kernels

    heads: int
    head_dim: int
    groups: int  # groups of heads that share B and C
    state_size: int
    kernel: int  # width of the convolution, in tokens
    chunk: int  # tokens that the scan computes at a time
    state_bytes: int | None = 4  # of an element of the state that an engine keeps; None: as the engine's activations

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved_parts(self) -> tuple[int, ...]:
        """Channels of x, B and C."""
        return (self.inner, self.groups * self.state_size, self.groups * self.state_size)

    @property
    def projected_parts(self) -> tuple[int, ...]:
        """Rows of the input projection: gate, x, B, C and the time steps."""
        return (self.inner, *self.convolved_parts, self.heads)

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return sum(self.convolved_parts)

    def local(self, tp_size: int) -> MambaShape:
        """Return the part of one tensor-parallel rank: its heads, and its groups with their B and C."""
        return replace(self, heads=self.heads // tp_size, groups=self.groups // tp_size)

    def state(self, element: int) -> int:
        """Return the bytes of a layer's state of one sequence in an engine, whose activations have `element` bytes."""
        scanned = self.inner * self.state_size * (self.state_bytes or element)
        return scanned + self.convolved * (self.kernel - 1) * element


@dataclass(frozen=True)
class DeltaShape:
    """Gated DeltaNet mixers (arXiv 2412.06464), which take the place of attention in `layers`. Each key head serves
    several value heads."""

    gpu_packages: ClassVar[tuple[str, ...]] = ("fla", "causal_conv1d")  # optional, with its fused kernels

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # width of the convolution, in tokens
    inputs_by_head: bool = False  # one tensor has the input projections of key head after key head
    chunk: int = 64  # tokens that are computed at a time
    state_bytes: int | None = None  # of an element of the state that an engine keeps; None: as the engine's activations

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def convolved_parts(self) -> tuple[int, ...]:
        """Channels of queries, keys and values."""
        return (self.keys, self.keys, self.values)

    def local(self, tp_size: int) -> DeltaShape:
        """Return the part of one tensor-parallel rank: its heads."""
        return replace(self, key_heads=self.key_heads // tp_size, value_heads=self.value_heads // tp_size)

    def state(self, element: int) -> int:
        """Return the bytes of a layer's state of one sequence in an engine, whose activations have `element` bytes."""
        recurrent = self.values * self.key_dim * (self.state_bytes or element)
        return recurrent + sum(self.convolved_parts) * (self.kernel - 1) * element


@dataclass(frozen=True)
class VisionShape:
    """The tower of a vision model, which turns an image into features, and how the tokens of an image are placed.

    An image of t x h x w patches (its grid) has t * h * w / merge_size^2 tokens. Each takes three positions, by its
    time, row and column; of the angles of a head, the first of `rotary_sections` turn by time, the others by row and
    column: in blocks, or alternating (`rotary_interleaved`).
    """

    tower: str  # transformers' class
    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side that become one token
    temporal_patch_size: int  # frames of a patch; an image is repeated
    rotary_sections: tuple[int, int, int]
    rotary_interleaved: bool
    deepstack: int  # further features of each token, which are added to the outputs of this many first layers
    image_token: int  # id that stands for each token of an image
    start_token: int  # id before an image
    end_token: int
    root: str  # first part of the tower's names in the checkpoint
    engine_root: str  # and in vLLM
    parameters: int


STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": None, None: None}
"""Bytes of an element of a state, by its name in config.json; None: as the engine's activations."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, as plain values, of the whole model and not of one rank."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float | None  # None: attention without positions
    rope_scaling_factor: float | None  # Llama 3 frequency scaling; None is plain RoPE
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    wide_qk_norm: bool = False  # norms of queries and keys take all heads together; qk_norm is then False
    rotary_fraction: float = 1.0  # part of each head that rotates with the position; the rest has no position
    experts: ExpertShape | None = None  # None: no layer has experts
    latent: LatentShape | None = None  # None: grouped-query attention
    blocks: tuple[Block, ...] = ()  # hybrid models: kind of each layer; networks have squared ReLU and no gate
    mamba: MambaShape | None = None  # None: no layer is a Mamba2 mixer
    delta: DeltaShape | None = None  # None: no layer is a Gated DeltaNet mixer
    output_gate: bool = False  # attention's output is scaled by a sigmoid, whose rows q_proj has after each head's own
    centered_norms: bool = False  # norms scale by 1 + weight
    attention_scale: float | None = None  # of queries times keys; None: head_dim^-0.5
    windows: tuple[int, ...] = ()  # by layer: how many keys a query sees, its own included, or 0 for all; (): all
    window_rope_theta: float | None = None  # of layers with a window; None: as the others
    rope_interpolation: float | None = None  # divides the positions, in layers without a window
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of gated networks
    biases: bool = False  # output projections, routers and experts have biases
    sinks: bool = False  # attention sinks: one extra learned logit per head, with no value
    yarn: YarnShape | None = None  # scaling of rotary frequencies outside of latent attention
    sandwich_norms: bool = False  # the outputs of attention and network are normed too, before they are added
    embedding_scale: float = 1.0  # factor on the embeddings
    root: str = "model"  # first part of the tensors' names in the checkpoint
    engine_root: str = "model"  # and of the parameters' names in vLLM
    stacked_experts: bool = False  # the checkpoint has one tensor of all experts' gates and ups, and one of their downs
    vision: VisionShape | None = None  # None: the model reads no images, or its tower is not known here
    carried: tuple[str, ...] = ()  # parts of the names of tensors that are not trained; an export copies them
    longest_sequence: int | None = None  # tokens up to which attention is dense; beyond, an indexer would choose keys
    head: Literal["tokens", "value"] = "tokens"  # the output layer: a logit for each token, or one output

    def is_expert_layer(self, layer: int) -> bool:
        """Whether the layer has experts instead of one feed-forward network."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def is_delta_layer(self, layer: int) -> bool:
        """Whether the layer's mixer is a Gated DeltaNet instead of attention."""
        return self.delta is not None and layer in self.delta.layers

    def is_attention_layer(self, layer: int) -> bool:
        """Whether the layer's mixer is attention."""
        return self.blocks[layer] is Block.ATTENTION if self.blocks else not self.is_delta_layer(layer)

    def window(self, layer: int) -> int:
        """Return how many keys a query of the layer sees, its own included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def projected_heads(self) -> int:
        """Heads of the query, key and value projection, with those of the output gate."""
        return (1 + self.output_gate) * self.num_heads + 2 * self.num_kv_heads

    def local_kv_heads(self, tensor_parallel: int) -> int:
        """Return the key-value heads that a tensor-parallel rank attends to: its share of them, or one that it shares
        with others."""
        return max(1, self.num_kv_heads // tensor_parallel)

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Return Megatron-Core's number of vocabulary rows: the next multiple of the tensor-parallel size."""
        return math.ceil(self.vocab_size / tensor_parallel) * tensor_parallel


class Split(Enum):
    """How Megatron-Core splits one parameter over the tensor-parallel ranks."""

    REPLICATED = "replicated"  # whole on every rank
    ROWS = "rows"  # ColumnParallelLinear: output rows of the weight
    COLUMNS = "columns"  # RowParallelLinear: input columns of the weight
    VOCAB = "vocab"  # rows, the last rank padded with zeros
    QKV = "qkv"  # q, k, v interleaved by key-value group: [q of group | k | v] per group
    GATED_QKV = "gated_qkv"  # as QKV, with the rows of the output gate: [q of group | gates of group | k | v] per group
    GATE_UP = "gate_up"  # [gate rows of this rank | up rows of this rank]
    PARTS = "parts"  # the tensors consist of blocks of rows (`Param.parts`), each split by itself


class Stage(Enum):
    """Which pipeline stage holds a parameter."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the Hugging Face checkpoint: its name and whole shape."""

    name: str
    shape: tuple[int, ...]
    float32: bool = False  # in policy and engine, regardless of the precision of the others
    stack: tuple[int, int] | None = None  # (expert, number of experts) of a part of `stored`

    @property
    def stored(self) -> HfTensor:
        """Return the tensor in the file: itself, or the stack of all experts' transposed tensors."""
        if self.stack is None:
            return self
        expert, count = self.stack
        name = self.name.replace(f".experts.{expert}.", ".experts.")
        return HfTensor(name, (count, *reversed(self.shape)), self.float32)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class EngineForm:
    """How vLLM's form of a parameter differs from Megatron-Core's.

    `split`: split over the tensor-parallel ranks; None: as in Megatron-Core. `start`: first row in vLLM's parameter,
    which holds another tensor before it. `negative_exp`: vLLM holds -exp(values), in float32.
    """

    split: Split | None = None
    start: int = 0
    negative_exp: bool = False


SAME_FORM = EngineForm()


@dataclass(frozen=True)
class Param:
    """One Megatron-Core parameter and the Hugging Face tensors that it consists of.

    `megatron`: its name, with placeholders `{layer}` for the stage-local layer index and `{expert}` for the rank-local
    expert index. `copy`: it duplicates a tensor that another parameter owns (the output layer of tied embeddings on the
    last stage), so it is loaded but never exported. `expert`: (index, number of experts) of an expert's weight, which
    belongs to one expert-parallel rank and is split over expert-tensor-parallel ranks. `engine`: vLLM's parameter that
    these tensors fill, alone or fused (see `families.engine`), in the form `engine_form`; None if only vLLM's own
    loading can place them. `buffer`: not trained. `parts`: rows of the blocks of Split.PARTS. `groups`: groups of rows
    that the tensor has, each with an equal share of every block; in the parameter the blocks are whole.
    """

    megatron: str
    hf: tuple[HfTensor, ...]
    split: Split
    stage: Stage
    layer: int | None = None
    copy: bool = False
    expert: tuple[int, int] | None = None
    engine: str | None = None
    engine_form: EngineForm = SAME_FORM
    buffer: bool = False
    parts: tuple[int, ...] = ()
    groups: int = 1

    @property
    def engine_split(self) -> Split:
        """How vLLM splits the parameter."""
        return self.engine_form.split or self.split

    @cached_property
    def form(self) -> tuple[object, ...]:
        """Everything that decides how the parameter is cut, here and in vLLM, apart from names and ranks. Parameters
        that are cut alike have equal forms."""
        shapes = tuple(tensor.shape for tensor in self.hf)
        cut = (self.split, self.engine_form, shapes, self.parts, self.groups)
        return (*cut, self.expert is not None, self.engine is None)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the parameter's tensors."""
        return sum(tensor.numel for tensor in self.hf)

    @cached_property
    def travels_in_float32(self) -> bool:
        """Whether a refit sends the parameter in float32, whatever the precision of the others."""
        return self.engine_form.negative_exp or any(tensor.float32 for tensor in self.hf)


@dataclass(frozen=True)
class Piece:
    """`local[local_box] == hf[hf_box]`: one contiguous slice, on one tensor-parallel rank."""

    hf: str
    hf_box: Box
    local_box: Box


def local_shape(param: Param, shape: ModelShape, tp_size: int) -> tuple[int, ...]:
    """Return the shape of the parameter on one tensor-parallel rank."""
    first = param.hf[0].shape
    match param.split:
        case Split.REPLICATED:
            return first
        case Split.COLUMNS:
            return (first[0], first[1] // tp_size)
        case Split.VOCAB:
            return (shape.padded_vocab_size(tp_size) // tp_size, *first[1:])
        case _:
            return (sum(tensor.shape[0] for tensor in param.hf) // tp_size, *first[1:])


def pieces(param: Param, shape: ModelShape, tp_rank: int, tp_size: int) -> list[Piece]:
    """Return the slices of the Hugging Face tensors that a tensor-parallel rank holds, and where it holds them."""
    tail = tuple((0, size) for size in param.hf[0].shape[1:])

    def rows(tensor: HfTensor, start: int, count: int, local_start: int) -> Piece:
        return Piece(tensor.name, ((start, start + count), *tail), ((local_start, local_start + count), *tail))

    match param.split:
        case Split.REPLICATED:
            return [rows(param.hf[0], 0, param.hf[0].shape[0], 0)]
        case Split.ROWS:
            count = param.hf[0].shape[0] // tp_size
            return [rows(param.hf[0], tp_rank * count, count, 0)]
        case Split.COLUMNS:
            out, width = param.hf[0].shape[0], param.hf[0].shape[1] // tp_size
            columns = (tp_rank * width, (tp_rank + 1) * width)
            return [Piece(param.hf[0].name, ((0, out), columns), ((0, out), (0, width)))]
        case Split.VOCAB:
            per_rank = shape.padded_vocab_size(tp_size) // tp_size
            count = min(per_rank, max(0, shape.vocab_size - tp_rank * per_rank))
            return [rows(param.hf[0], tp_rank * per_rank, count, 0)] if count else []
        case Split.GATE_UP:
            gate, up = param.hf
            count = gate.shape[0] // tp_size
            return [rows(gate, tp_rank * count, count, 0), rows(up, tp_rank * count, count, count)]
        case Split.PARTS:
            if param.groups > 1:
                return _grouped_pieces(param, tp_rank, tp_size, rows)
            return _part_pieces(param, tp_rank, tp_size, rows)
        case Split.QKV | Split.GATED_QKV:
            return _qkv_pieces(param, shape, tp_rank, tp_size, rows)


def _part_pieces(
    param: Param, tp_rank: int, tp_size: int, rows: Callable[[HfTensor, int, int, int], Piece]
) -> list[Piece]:
    tensors = iter(param.hf)
    tensor, placed, whole, local_row = next(tensors), [], 0, 0
    for part in param.parts:
        if whole == tensor.shape[0]:
            tensor, whole = next(tensors), 0
        count = part // tp_size
        placed.append(rows(tensor, whole + tp_rank * count, count, local_row))
        whole, local_row = whole + part, local_row + count
    return placed


def _grouped_pieces(
    param: Param, tp_rank: int, tp_size: int, rows: Callable[[HfTensor, int, int, int], Piece]
) -> list[Piece]:
    local, shares = param.groups // tp_size, [part // param.groups for part in param.parts]
    placed = []
    for group in range(local):
        whole, local_row = (tp_rank * local + group) * sum(shares), 0
        for share in shares:
            placed.append(rows(param.hf[0], whole, share, local_row + group * share))
            whole, local_row = whole + share, local_row + local * share
    return placed


def _qkv_pieces(
    param: Param, shape: ModelShape, tp_rank: int, tp_size: int, rows: Callable[[HfTensor, int, int, int], Piece]
) -> list[Piece]:
    """Cut the rows of all key-value groups, group after group, into equal parts. With more ranks than groups a part is
    less than a group: Megatron-Core's attention then gathers what the ranks projected and takes its heads from it, so
    every row has one owner and its gradient is the sum over the ranks that used it."""
    q, k, v = param.hf
    width, query_rows = shape.head_dim, q.shape[0] // shape.num_kv_heads
    first = tp_rank * (whole := shape.num_kv_heads * (query_rows + 2 * width)) // tp_size
    last, row, placed = first + whole // tp_size, 0, []
    for group in range(shape.num_kv_heads):
        blocks = [(q, group * query_rows, query_rows)]
        if param.split is Split.GATED_QKV:  # [q | gate] per head becomes [q of all heads | gates of all heads]
            heads = range(group * query_rows, (group + 1) * query_rows, 2 * width)
            blocks = [(q, head + part, width) for part in (0, width) for head in heads]
        for tensor, start, count in [*blocks, (k, group * width, width), (v, group * width, width)]:
            begin, end = max(row, first), min(row + count, last)
            if begin < end:
                placed.append(rows(tensor, start + begin - row, end - begin, begin - first))
            row += count
    return placed


def tensor_parallel_sizes(shape: ModelShape) -> dict[str, int]:
    """Return the sizes, by name, that the policy's tensor-parallel size must divide: heads, heads and groups of other
    mixers, and feed-forward sizes. Ranks may share key-value heads."""
    sizes = {"num_attention_heads": shape.num_heads}
    if shape.latent is None:
        sizes["the rows of queries, keys and values"] = shape.projected_heads * shape.head_dim
    if shape.mamba is not None:
        sizes |= {"mamba_num_heads": shape.mamba.heads, "n_groups": shape.mamba.groups}
    if shape.delta is not None:
        sizes |= {"linear_num_key_heads": shape.delta.key_heads, "linear_num_value_heads": shape.delta.value_heads}
    if not shape.experts or shape.experts.dense_layers:
        sizes["intermediate_size"] = shape.ffn_hidden_size
    if shape.experts and shape.experts.shared_ffn_hidden_size:
        sizes["the shared expert's size"] = shape.experts.shared_ffn_hidden_size
    return sizes
