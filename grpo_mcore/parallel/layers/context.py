"""Context parallelism: which tokens of a packed row each rank computes, and how their log-probs are joined again.

Every sequence is cut into 2 x size chunks. Each rank takes two, one from the front and one from the back, so that
causal attention costs every rank the same (the "zigzag" of Llama 3, arXiv 2407.21783, section 3.3.2). Positions and
the order of chunks are those that Megatron-Core's rotary embedding and TransformerEngine's attention assume.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mcore.batching.packing import round_up
from grpo_mcore.batching.shared_prefixes import SharedPrefixes


def padded_length(lengths: Sequence[int], size: int, multiple: int) -> int:
    """Return the tokens of a row of these sequences, padded for `size` context-parallel ranks."""
    return round_up(sum(round_up(length, 2 * size) for length in lengths), math.lcm(2 * size, size * multiple))


@dataclass(frozen=True)
class ContextShare:
    """One rank's part of a row of T tokens, every sequence padded to a multiple of 2 x size."""

    index: Tensor
    """int64 [t]: position in the row of each token of this rank; T for padding."""
    cu_seqlens: Tensor
    """int32 [n + 1]: cumulative padded lengths of the whole row."""
    key_order: Tensor
    """int64 [padded T]: index of each token of the padded row in the concatenation of the ranks' parts."""
    spans: tuple[tuple[int, int, int, int], ...]
    """For both chunks of each sequence: start and length in this rank's part; start of the sequence in the padded row,
    and the sequence's length up to the end of the chunk."""


def share_of_row(cu_seqlens: Tensor, rank: int, size: int, multiple: int = 1, length: int = 0) -> ContextShare:
    """Return the share of context-parallel rank `rank` of `size`: a multiple of `multiple` tokens.

    cu_seqlens: int32 [n + 1] of the row. Padding to that multiple, and to at least `length` tokens of the padded row,
    is added to the last sequence.
    """
    device, starts = cu_seqlens.device, cu_seqlens.long().cpu()
    lengths = starts.diff()
    unit = 2 * size
    padded = -(-lengths // unit) * unit
    total = int(padded.sum())
    padded[-1] += round_up(max(total, length), math.lcm(unit, size * multiple)) - total
    ends = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    chunk = padded // unit
    part = int(ends[-1]) // size  # tokens per rank
    part_starts = ends[:-1] // size

    def tokens_of(other: int) -> tuple[Tensor, Tensor]:
        """Return (sequence, position in it) of every token of rank `other`."""
        sequence = torch.repeat_interleave(torch.arange(len(chunk)), 2 * chunk)
        offset = torch.arange(part) - part_starts[sequence]
        size_here = chunk[sequence]
        back = (unit - 2 - other) * size_here + offset
        return sequence, torch.where(offset < size_here, other * size_here + offset, back)

    sequence, position = tokens_of(rank)
    index = torch.where(position < lengths[sequence], starts[sequence] + position, int(starts[-1]))
    key_order = torch.empty(int(ends[-1]), dtype=torch.int64)
    for other in range(size):
        owner, offset = tokens_of(other)
        key_order[ends[owner] + offset] = torch.arange(part) + other * part
    spans = []
    for start, part_start, length in zip(ends.tolist(), part_starts.tolist(), chunk.tolist(), strict=False):
        spans.append((part_start, length, start, (rank + 1) * length))
        spans.append((part_start + length, length, start, (unit - rank) * length))
    return ContextShare(index.to(device), ends.to(device, torch.int32), key_order.to(device), tuple(spans))


def computed_here(
    shared: SharedPrefixes | None, share: ContextShare | None, tokens: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return which tokens of a row of `tokens` this rank computes, and where each token of the row is among these.

    int64 [t], `tokens` for padding; int64 [tokens], -1 for those of other ranks. (None, None): all, in order. `share`:
    this rank's part of the computed tokens, if samples share prefixes.
    """
    if share is None:
        return (None, None) if shared is None else (shared.source, shared.places)
    count = tokens if shared is None else len(shared.source)
    places = share.index.new_full((count + 1,), -1)
    places[share.index] = torch.arange(len(share.index), device=places.device)
    if shared is None:
        return share.index, places[:-1]
    source = torch.cat([shared.source, shared.source.new_full((1,), tokens)])
    return source.index_select(0, share.index), places.index_select(0, shared.places)


def take(row: Tensor, index: Tensor) -> Tensor:
    """Select tokens of per-token rows: [k, T] -> [k, t]; 0 where the index is T."""
    return torch.cat([row, row.new_zeros(len(row), 1)], 1).index_select(1, index)
