"""Bytes that a decoder keeps for its backward pass, as the kernels of parallel/ save them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from grpo_mcore.families.spec import Block, DeltaShape, LatentShape, MambaShape, ModelShape

Kernels = Literal["cpu", "torch", "transformer_engine"]
"""cpu: attention in float32 on gathered rows. torch: the same layers on a GPU, with fused norm and variable-length
attention. transformer_engine: also fused SwiGLU and rotary embedding."""

TILES = {"cpu": 2048, "gpu": 16384}
"""Rows of the output layer that have logits at a time (parallel/logprobs.py): on CPU their logits stay in a core's
cache, on GPU the kernels are large enough to be efficient."""

LOSS_BYTES_PER_TOKEN = 60
"""Masks and float64 columns that the clipped loss keeps."""


@dataclass(frozen=True)
class Rank:
    """Layout of the layers over ranks, and the kernels that compute them. `element`: bytes per activation (2 or 4)."""

    tensor: int = 1
    sequence_parallel: bool = False
    element: int = 2
    kernels: Kernels = "transformer_engine"
    context: int = 1
    expert_tensor: int = 1
    own_attention: bool = False  # attention and rotary embedding are ours beside TransformerEngine's layers
    grouped: bool = False  # experts are computed together
    expert: int = 1

    @property
    def attention(self) -> Kernels:
        """The kernels of attention and rotary embedding."""
        return "torch" if self.own_attention and self.kernels == "transformer_engine" else self.kernels

    @property
    def share(self) -> float:
        """Share of the tokens that a rank has between the tensor-parallel regions."""
        return 1.0 / self.tensor if self.sequence_parallel else 1.0

    @property
    def keys(self) -> float:
        """Keys that attention reads per token of the rank's queries. Under context parallelism, both chunks of a
        sequence read the sequence up to their own ends."""
        return self.context + 0.5 if self.context > 1 else 1.0


def layer_bytes(
    shape: ModelShape,
    rank: Rank,
    tokens: float,
    layer: int = 0,
    *,
    length: float = 0.0,
    padding: float = 1.0,
    recomputed: Collection[str] = (),
) -> float:
    """Return the bytes kept for the backward pass of one layer over `tokens` tokens of this rank. `length`: tokens per
    sequence. `padding`: on CPU, gathered positions per real token (sequences of similar length share a batch).
    `recomputed`: parts of the layer that are not kept. Only mlp and moe are subtracted; with other parts the result is
    too high."""
    norms = 2 if shape.sandwich_norms else 1
    entry = rank.share * (norms * _norm(shape.hidden_size, 1, rank) + rank.element * shape.hidden_size)
    parts = _parts(shape, rank, layer, length, padding)
    return tokens * sum(entry + (0.0 if name in recomputed else part) for name, part in parts.items())


def forward_bytes(shape: ModelShape, rank: Rank, tokens: float, layer: int = 0, *, length: float = 0.0) -> float:
    """Return the bytes of one layer's forward pass over `tokens` tokens of this rank if nothing is kept: the larger of
    its mixer and its network, beside the hidden state that the model, the layer, its norm and its residual hold.

    Of attention an upper bound: a kernel's inputs are gone before the last of its outputs is there.
    """
    parts = {name: tokens * nbytes for name, nbytes in _parts(shape, rank, layer, length, 1.0).items()}
    if "moe" in parts:
        parts["moe"] = _experts_forward(shape, rank, tokens)
    if "mamba" in parts:
        assert shape.mamba is not None
        parts["mamba"] = tokens * rank.context * _mamba_forward(shape.mamba.local(rank.tensor), rank)
    if "delta" in parts:
        assert shape.delta is not None
        parts["delta"] = tokens * rank.context * _delta_forward(shape.delta.local(rank.tensor), rank, length)
    return tokens * 4 * rank.share * rank.element * shape.hidden_size + max(parts.values())


def working_bytes(shape: ModelShape, rank: Rank, tokens: float, layer: int = 0) -> float:
    """Return the bytes of the largest temporaries of a layer's backward pass, and of the forward pass if it is done
    again, beside what the layer keeps: of a Mamba mixer when its gate and norm are computed backwards; of a network the
    gradients of the last product's input and weight; of experts tokens and results in the dispatcher's order."""
    b, parts = rank.element, _parts(shape, rank, layer, 0.0, 1.0)
    needed = [0.0]
    if "mamba" in parts:
        assert shape.mamba is not None
        needed.append(tokens * rank.context * 5 * 4 * shape.mamba.local(rank.tensor).inner)
    if "mlp" in parts:
        needed.append(b * (tokens + shape.hidden_size) * shape.ffn_hidden_size / rank.tensor)
    if "moe" in parts:
        assert shape.experts is not None
        rows = tokens * _copies(shape, rank) * b * (shape.experts.latent_size or shape.hidden_size)
        needed.append(6 * rows if shape.experts.clamp else 2 * rows + max(2 * rows, _joined_experts(shape, rank)))
    return max(needed)


def _parts(shape: ModelShape, rank: Rank, layer: int, length: float, padding: float) -> dict[str, float]:
    """Return the bytes per token that the parts of a layer keep, without their norms and residuals."""
    block = shape.blocks[layer] if shape.blocks else None
    parts = {}
    if block is Block.MAMBA:
        assert shape.mamba is not None
        parts["mamba"] = _mamba(shape.mamba.local(rank.tensor), rank)
    elif shape.is_delta_layer(layer):
        assert shape.delta is not None
        parts["delta"] = _delta(shape.delta.local(rank.tensor), rank, length)
    elif block in (None, Block.ATTENTION):
        latent = shape.latent is not None
        parts["attention"] = _latent(shape, rank, padding, length) if latent else _attention(shape, rank, padding)
    if block is Block.EXPERTS or (block is None and shape.is_expert_layer(layer)):
        parts["moe"] = _experts(shape, rank)
    elif block in (None, Block.MLP):
        parts["mlp"] = rank.element * _network(shape, rank) * shape.ffn_hidden_size / rank.tensor
    return parts


def _network(shape: ModelShape, rank: Rank) -> int:
    """Return the number of tensors of the feed-forward width that a network keeps: SwiGLU's two inputs, its parts and
    its output, or squared ReLU's output before and after the square."""
    fused = rank.kernels == "transformer_engine" and not shape.blocks and shape.activation == "silu"
    return 3 if fused else 2 if shape.blocks else 5


def _expert_network(shape: ModelShape, rank: Rank) -> int:
    """Return the same number for experts, whose output is scaled by the router's weight. In groups they copy no half of
    SwiGLU's input; gpt-oss's keep both halves with their biases, one limited, and what they are multiplied to."""
    assert shape.experts is not None
    if shape.experts.clamp:
        return 7
    return _network(shape, rank) + 1 if not rank.grouped else 3 if shape.blocks else 5


def _experts(shape: ModelShape, rank: Rank) -> float:
    """Return the bytes per token of an expert layer with perfectly even routing.

    These are the scores of all experts; `active` copies of the hidden state, each with its expert's activations, on
    every rank that has a slice of that expert; and the shared expert.
    """
    experts, b = shape.experts, rank.element
    assert experts is not None
    width = experts.latent_size or shape.hidden_size
    copy = b * (width + _expert_network(shape, rank) * experts.ffn_hidden_size / rank.expert_tensor)
    if experts.clamp:  # its biases are added before the router's weight scales it
        copy += b * width
    copies = _copies(shape, rank) * (copy + 8 + 4)  # with its origin and weight
    scores = rank.share * (experts.count * (4 + 4 + 1) + experts.active * (8 + 8 + 4))
    shared = b * _network(shape, rank) * experts.shared_ffn_hidden_size / rank.tensor
    projected = rank.share * b * experts.latent_size  # what the experts return, before it is projected back
    return scores + copies + shared + projected


def _copies(shape: ModelShape, rank: Rank) -> float:
    """Return how many copies of a token the experts of a rank get."""
    assert shape.experts is not None
    return rank.share * shape.experts.active * rank.expert_tensor


def _joined_experts(shape: ModelShape, rank: Rank) -> float:
    """Return the bytes of a layer's first matrices of all experts of a rank, which grouped products want in one tensor:
    in torch's the weights, in every one their gradients."""
    experts = shape.experts
    assert experts is not None
    ffn = (1 if shape.blocks else 2) * experts.ffn_hidden_size / rank.expert_tensor
    width = experts.latent_size or shape.hidden_size
    return rank.grouped * rank.element * experts.count / rank.expert * width * ffn


def _experts_forward(shape: ModelShape, rank: Rank, tokens: float) -> float:
    """Return the bytes of an expert layer if nothing is kept. The dispatcher holds its tokens as permuted, as sent, and
    sorted by expert. Beside them are the tensors of the feed-forward width, of which one is float32; or the results, by
    expert and in the dispatcher's order (scaled in float32 where that comes last); or the experts' weights in one
    tensor, and the first product."""
    experts, b = shape.experts, rank.element
    assert experts is not None
    width, ffn = experts.latent_size or shape.hidden_size, experts.ffn_hidden_size / rank.expert_tensor
    rows, gated = tokens * _copies(shape, rank), not shape.blocks
    beside = rows * b * (4 if experts.clamp else 2) * width
    if rank.grouped:
        first = _joined_experts(shape, rank) if rank.kernels == "torch" else 0.0
        beside = max(beside, rows * b * (6 if gated else 4) * ffn, rows * b * (1 + gated) * ffn + first)
    others = rank.share * (5 * experts.count + b * shape.hidden_size)
    return rows * (3 * b * width + 8 + 4) + beside + tokens * others


def _attention(shape: ModelShape, rank: Rank, padding: float) -> float:
    """Return the bytes per token of query, key, value, output and its log-sum-exp, the input of the output projection,
    sines and cosines."""
    b, heads = rank.element, shape.num_heads / rank.tensor
    query, key_value = heads * shape.head_dim, shape.local_kv_heads(rank.tensor) * shape.head_dim
    projected: float = query + 2 * key_value
    if rank.tensor > shape.num_kv_heads:  # gathered from the ranks that share key-value heads
        projected = shape.projected_heads * shape.head_dim
    norms = _head_norms(query, key_value, projected, shape, rank) if shape.qk_norm else 0.0
    rotary = 0.0 if rank.attention == "transformer_engine" or shape.rope_theta is None else 4 * b * shape.head_dim
    if rank.kernels == "cpu":  # float32, keys and values repeated for every query head
        return norms + padding * (8 * query * (1 + rank.keys) + 4 * heads) + b * query + rotary
    # The value is a view that keeps the whole output of linear_qkv.
    nbytes = norms + b * (2 * query + key_value + projected) + 4 * heads + rotary
    gathered = rank.context > 1 and rank.attention == "torch"
    return nbytes + (2 * b * key_value * rank.keys if gathered else 0.0)


def _latent(shape: ModelShape, rank: Rank, padding: float, length: float) -> float:
    """Return the bytes per token of latent attention: both latents before and after their norms, and attention. Values
    are narrower than keys; torch has no fused CPU kernel for that, so every query's attention weights are kept."""
    latent, b, heads = shape.latent, rank.element, shape.num_heads / rank.tensor
    assert latent is not None
    query, value = heads * shape.head_dim, heads * latent.value_dim
    latents = _latents(latent, rank) + (0.0 if rank.attention == "transformer_engine" else 4 * b * latent.rotary_dim)
    if rank.kernels == "cpu":
        return latents + padding * (4 * (query + value) * (1 + rank.keys) + 4 * heads * length) + b * value
    return latents + b * (query + (query + value) * rank.keys + 2 * value) + 4 * heads


def _latents(latent: LatentShape, rank: Rank) -> float:
    queries = latent.query_rank or 0
    key_values = latent.key_value_rank
    return rank.element * (2 * queries + 2 * key_values + latent.rotary_dim) + 4 * ((queries > 0) + 1)


def _mamba(mamba: MambaShape, rank: Rank) -> float:
    """Return the bytes per token of the scan in plain PyTorch: the convolution's inputs and outputs, the states between
    chunks, and within a chunk the weights of every token for every later one, in float32."""
    b, f = rank.element, 4
    projected = b * (mamba.inner + mamba.convolved + mamba.heads)
    convolution = 3 * f * mamba.convolved
    inner = 9 * f * mamba.inner + (b * mamba.inner if b < f else 0)
    states = 2 * f * mamba.inner * mamba.state_size / mamba.chunk
    keys = f * mamba.groups * (mamba.chunk + 4 * mamba.state_size)
    within = 2 * f * mamba.heads * mamba.chunk + 8 * f * mamba.heads
    # Every context-parallel rank scans whole sequences and projects its own tokens.
    return rank.context * (projected + convolution + inner + states + keys + within) + b * mamba.inner


def _mamba_forward(mamba: MambaShape, rank: Rank) -> float:
    """Return the bytes per token of the scan in plain PyTorch if nothing is kept, when the states between the chunks
    are read: a chunk's weights before and after its keys are multiplied in; input, output, and what is read; states at
    the ends of chunks, at their starts, and these once more in another order; keys and queries."""
    within, states = 2 * mamba.heads * mamba.chunk, 3 * mamba.inner * mamba.state_size / mamba.chunk
    rows = mamba.convolved + 3 * mamba.inner + 3 * mamba.groups * mamba.state_size
    return 4 * (within + states + rows) + rank.element * (mamba.inner + mamba.convolved + mamba.heads)


def _delta(delta: DeltaShape, rank: Rank, length: float) -> float:
    """Return the bytes per token of the chunked delta rule in plain PyTorch, in float32. Kept are: the convolution's
    inputs and outputs; keys and queries, repeated for every value head; the weights of a chunk's tokens for one
    another; the sides of the triangular system; for each chunk the matrix that takes one state to the next; and the
    state, twice. A sequence of `length` leaves on average half of its last chunk empty."""
    b, f, heads, key = rank.element, 4, delta.value_heads, delta.value_heads * delta.key_dim
    padded = 1 + delta.chunk / (2 * length) if length else 1.0
    convolved = sum(delta.convolved_parts)
    projected = b * (convolved + delta.values + 2 * heads) + 3.1 * f * convolved + f * (2 * key + 6 * heads)
    within = padded * f * (6 * heads * delta.chunk + 11 * key + 3 * delta.values)
    states = padded * f * key * (delta.key_dim + 2 * delta.value_dim) / delta.chunk
    output = f * delta.values * (5 if b < f else 4)
    return rank.context * (projected + within + states + output) + b * delta.values


def _delta_forward(delta: DeltaShape, rank: Rank, length: float) -> float:
    """Return the bytes per token of the chunked delta rule in plain PyTorch if nothing is kept, when the outputs are
    summed: queries, keys, values, both sides of the triangular system, what is read and written; what takes one state
    to the next; the states; weights within a chunk."""
    b, keys, values = rank.element, delta.value_heads * delta.key_dim, delta.values
    padded = 1 + delta.chunk / (2 * length) if length else 1.0
    states = keys * (delta.key_dim + 3 * delta.value_dim) / delta.chunk
    within = 6 * (keys + values) + 3 * delta.value_heads * delta.chunk + states
    convolved = sum(delta.convolved_parts)
    return 4 * (padded * within + convolved) + b * (2 * (convolved + values) + convolved)


def _head_norms(query: float, key_value: float, projected: float, shape: ModelShape, rank: Rank) -> float:
    """Return the bytes of the norms of one token's query and key. The query is a copy; the key is a view that keeps the
    whole output of linear_qkv, which on a GPU attention keeps anyway."""
    kept = query + (projected if rank.kernels == "cpu" else 0.0)
    return rank.element * kept + 4 * (query + key_value) / shape.head_dim


def _norm(width: float, rows: float, rank: Rank) -> float:
    """Return the bytes of the RMS norm of one token: its input and 1/rms."""
    return rank.element * width + 4 * rows


def layer_input_bytes(shape: ModelShape, rank: Rank, tokens: float) -> float:
    """Return the bytes kept of a layer that is recomputed in the backward pass: its input."""
    return tokens * rank.share * rank.element * shape.hidden_size


def first_stage_bytes(tokens: float) -> float:
    """Return the bytes of the embedding's token indices."""
    return 8.0 * tokens


def last_stage_bytes(shape: ModelShape, rank: Rank, tokens: float) -> float:
    """Return the bytes of final norm, hidden states that get log-probs, their targets and normalisers, and the loss."""
    norm = rank.share * _norm(shape.hidden_size, 1, rank)
    return tokens * (norm + rank.element * shape.hidden_size + 24 + LOSS_BYTES_PER_TOKEN)


def divergence_block(chunk: int, element: int) -> int:
    """Return how many tokens have logits of two models at a time in a divergence, where log-probs are computed of
    `chunk` tokens. `element`: bytes of two logits, one of each. A block's take 1.5 bytes for each token of the chunk
    and row of the output layer."""
    return max(1, 3 * chunk // (2 * element))


def divergence_bytes(shape: ModelShape, rank: Rank, chunk: int) -> int:
    """Return the bytes of the largest temporaries of a divergence from a teacher (parallel/divergence.py): both models'
    logits of a block; a tile of logits and of what is computed of them in float32; the output layer's gradient in
    float32, and in the weights' format when the blocks are done."""
    rows, block = shape.padded_vocab_size(rank.tensor) // rank.tensor, divergence_block(chunk, 2 * rank.element)
    tile = min(rows, TILES["cpu" if rank.kernels == "cpu" else "gpu"])
    gradient, copy = (rows * shape.hidden_size * element for element in (4, rank.element if rank.element < 4 else 0))
    return gradient + max(block * (2 * rows * rank.element + 5 * 4 * tile), copy)


def embedding_bytes(shape: ModelShape, rank: Rank) -> float:
    """Return the bytes of a rank's rows of the embedding, or of their gradient."""
    return shape.padded_vocab_size(rank.tensor) / rank.tensor * shape.hidden_size * rank.element


def logits_bytes(shape: ModelShape, rank: Rank, chunk: int, backward: float = 0) -> float:
    """Return the bytes of the largest temporary of the log-probs: logits of `chunk` tokens for a tile of the output
    layer's rows, as computed and in float32.

    In the backward pass, of so many tokens, also the output layer's gradient, a tile of it in float32, and the hidden
    states' gradient in float32.
    """
    rows = shape.padded_vocab_size(rank.tensor) / rank.tensor
    tile = min(rows, TILES["cpu" if rank.kernels == "cpu" else "gpu"])
    logits = chunk * tile * (4 + (rank.element if rank.element < 4 else 0))
    if not backward:
        return logits
    width = shape.hidden_size
    return logits + embedding_bytes(shape, rank) + tile * width * (4 + rank.element) + 4 * backward * width
