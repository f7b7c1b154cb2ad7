"""What the backward pass of a dense decoder keeps, in bytes, as the kernels of parallel/ save it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_mcore.families.spec import ModelShape

Kernels = Literal["cpu", "torch", "transformer_engine"]
"""cpu: attention in float32 on gathered rows. torch: the same layers on a GPU with fused norm and
variable-length attention. transformer_engine: fused SwiGLU and rotary embedding too."""

LOSS_BYTES_PER_TOKEN = 60
"""Masks and float64 columns that the clipped loss keeps."""


@dataclass(frozen=True)
class Rank:
    """What of a layer lies on one rank. `element`: bytes of an activation (2 or 4)."""

    tensor: int = 1
    sequence_parallel: bool = False
    element: int = 2
    kernels: Kernels = "transformer_engine"

    @property
    def share(self) -> float:
        """Part of the tokens between the tensor-parallel regions."""
        return 1.0 / self.tensor if self.sequence_parallel else 1.0


def layer_bytes(shape: ModelShape, rank: Rank, tokens: int, *, padding: float = 1.0) -> float:
    """Kept for the backward pass of one transformer layer over a row of `tokens`.

    `padding`: on CPU, gathered positions over real tokens (sequences of similar length share a batch).
    """
    b, heads = rank.element, shape.num_heads / rank.tensor
    query, key_value = heads * shape.head_dim, shape.num_kv_heads / rank.tensor * shape.head_dim
    ffn = shape.ffn_hidden_size / rank.tensor
    between = rank.share * (2 * _norm(shape.hidden_size, 1, rank) + 2 * b * shape.hidden_size)
    head_norms = _head_norms(query, key_value, shape, rank) if shape.qk_norm else 0.0
    swiglu = (3 if rank.kernels == "transformer_engine" else 5) * b * ffn
    return tokens * (between + head_norms + _attention(query, key_value, heads, shape, rank, padding) + swiglu)


def _attention(query: float, key_value: float, heads: float, shape: ModelShape, rank: Rank, padding: float) -> float:
    """Query, key, value, output and its log-sum-exp, the input of the output projection, sines and cosines."""
    b = rank.element
    rotary = 0.0 if rank.kernels == "transformer_engine" else 4 * b * shape.head_dim
    if rank.kernels == "cpu":  # float32, keys and values repeated for every query head
        return padding * (4 * 4 * query + 4 * heads) + b * query + rotary
    # The value is a view that keeps the whole output of linear_qkv.
    return b * (2 * query + key_value) + b * (query + 2 * key_value) + 4 * heads + rotary


def _head_norms(query: float, key_value: float, shape: ModelShape, rank: Rank) -> float:
    """Norms of query and key, one token. The query is a copy; the key is a view that keeps the whole output of
    linear_qkv, which attention keeps already on a GPU."""
    kept = query + (query + 2 * key_value if rank.kernels == "cpu" else 0.0)
    return rank.element * kept + 4 * (query + key_value) / shape.head_dim


def _norm(width: float, rows: float, rank: Rank) -> float:
    """RMS norm of one token: input and 1/rms."""
    return rank.element * width + 4 * rows


def layer_input_bytes(shape: ModelShape, rank: Rank, tokens: int) -> float:
    """All that is kept of a layer that is computed again in the backward pass."""
    return tokens * rank.share * rank.element * shape.hidden_size


def first_stage_bytes(tokens: int) -> float:
    """Token indices of the embedding."""
    return 8.0 * tokens


def last_stage_bytes(shape: ModelShape, rank: Rank, tokens: int) -> float:
    """Final norm, the hidden states that get log-probs, their targets and normalisers, and the loss."""
    norm = rank.share * _norm(shape.hidden_size, 1, rank)
    return tokens * (norm + rank.element * shape.hidden_size + 24 + LOSS_BYTES_PER_TOKEN)


def logits_bytes(shape: ModelShape, rank: Rank, chunk: int, *, backward: bool) -> float:
    """Largest temporary of the log-probs: logits of `chunk` tokens as they come and in float32; in the backward pass
    their gradient too, and the gradient of the output layer in float32 and in the weights' format."""
    rows = shape.padded_vocab_size(rank.tensor) / rank.tensor
    logits = chunk * rows * (4 + (rank.element if rank.element < 4 else 0))
    if not backward:
        return logits
    copy = rank.element if rank.element < 4 else 0
    return logits + rows * shape.hidden_size * (4 + copy)
