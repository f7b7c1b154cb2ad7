"""What the layers need to know of a packed row: where its sequences are, and the indices to gather them by, made once
per row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from grpo_mcore.batching.shared_prefixes import SharedPrefixes
from grpo_mcore.parallel.layers.context import ContextShare
from grpo_mcore.parallel.platform import Platform


class ImagesHere(NamedTuple):
    """The images of the tokens that a rank computes."""

    axes: Tensor  # int64 [3, t], as in RowImages
    feature: Tensor  # int64: of the tokens whose hidden states this rank has, its part of t under sequence parallelism
    features: Tensor | None  # [features, 1 + levels of the deepstack, hidden size]; None: no layer here takes any


class Span(NamedTuple):
    """Adjacent queries of one sequence, and the keys up to the last of them. Token offsets and counts in their rows."""

    query_start: int
    query_length: int
    key_start: int
    key_length: int


@dataclass
class LengthBucket:
    """Spans of similar length, right-padded to a batch for torch's fused kernel."""

    queries: Tensor  # int64 [n, q]: position of each query in the row
    keys: Tensor  # int64 [n, k]
    mask: Tensor | None  # bool [n or 1, 1, q, k]: keys a query sees; None: plain causal, queries and keys are the same
    real: Tensor  # int64: which of the n * q queries are not padding
    last_seen: Tensor  # int64 [n or 1, q]: last key that each query sees

    def window(self, size: int) -> Tensor:
        """Return which keys each query sees, as `mask`, if it sees the last `size` only."""
        key, last = torch.arange(self.keys.size(1)), self.last_seen[:, :, None]
        return ((key <= last) & (key > last - size))[:, None]


@dataclass(frozen=True)
class Chunks:
    """The chunks of a row. Every sequence starts a new chunk, so that its sums hold nothing of another sequence.

    Chunks are ordered by index within their sequence: first all first chunks, then all second ones. Longer sequences
    come first. `sizes`: number of first, second, ... chunks. `places` int64 [T]: index of each token of the row among
    the tokens of all chunks.
    """

    sizes: tuple[int, ...]
    places: Tensor


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron-Core's description of a packed row, plus the indices that attention gathers by, made once per row.

    The inherited `cu_seqlens_*` are for TransformerEngine's kernels. Without it they are None: Megatron-Core's rotary
    embedding would read them back from the device in every layer.
    """

    ends: Tensor | None = None  # int32 [n + 1]: cumulative lengths of the sequences
    lengths: list[int] = field(default_factory=list)  # of the sequences, on the host
    positions: Tensor | None = None  # int64 [t]: place of each token in its sequence, for the rotary embedding
    buckets: list[LengthBucket] = field(default_factory=list)  # on CPU
    row_order: Tensor | None = None  # int64 [T]: index of each token of the row in the concatenated buckets
    context_group: ProcessGroup | None = None
    key_order: Tensor | None = None  # int64: index of each token of the whole row among the gathered keys
    whole: tuple[Tensor, Tensor] | None = None
    """With shared prefixes: index of each token of the row among the tokens that all ranks computed, int64 [T]; index
    in the row of each token of this rank, int64 [t]."""
    spans: tuple[Tensor, Tensor, Tensor, int, int] | None = None  # on GPU, see _kernel_spans
    images: ImagesHere | None = None  # None: all tokens are text
    chunks: Chunks | None = None  # made by the first layer that needs them


def describe_row(
    cu_seqlens: Tensor,
    platform: Platform,
    share: ContextShare | None = None,
    context_group: ProcessGroup | None = None,
    *,
    positions: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    index: Tensor | None = None,
    images: ImagesHere | None = None,
) -> PackedRow:
    """Describe a row with these cumulative lengths (int32 [n + 1]), or this rank's share of it.

    `positions`: see PackedRow; a network with a rotary embedding needs them. `shared`: the tokens that are computed, if
    not all are; a sample's queries are then its new tokens, its keys all of its tokens, `share` is one of the
    computed tokens, and `index` is needed: `computed_here` returns it.
    """
    if share is not None and shared is None:
        cu_seqlens = share.cu_seqlens
    starts = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
    longest = max(lengths)
    row = PackedRow(
        qkv_format="thd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        ends=cu_seqlens,
        lengths=lengths,
        positions=positions,
        images=images,
    )
    if platform.fused_attention:
        row.cu_seqlens_q = row.cu_seqlens_kv = cu_seqlens
        if share is not None:
            row.cu_seqlens_q_padded = row.cu_seqlens_kv_padded = cu_seqlens
    if share is not None:
        row.context_group, row.key_order = context_group, share.key_order
    if shared is not None:
        spans, key_order, places = _spans_of_samples(shared, lengths, share)
        assert index is not None
        row.whole = places.index_select(0, shared.places), index.clamp(max=len(shared.places) - 1)
    elif share is not None:
        spans, key_order = [Span(*span) for span in share.spans], share.key_order
    else:
        spans, key_order = [Span(start, n, start, n) for start, n in zip(starts, lengths, strict=False)], None
    if not platform.on_gpu:
        _fill_buckets(row, spans, key_order)
    elif key_order is not None:
        row.spans = _kernel_spans(spans, key_order)
    return row


def _spans_of_samples(
    shared: SharedPrefixes, lengths: Sequence[int], share: ContextShare | None
) -> tuple[list[Span], Tensor, Tensor]:
    """Return the spans of samples with shared prefixes and of the padding, the index of each of their keys among those
    of all ranks, and the same of each computed token."""
    device, new = shared.places.device, torch.tensor(shared.lengths)
    starts = torch.cat([new.new_zeros(1), new.cumsum(0)])
    if share is None:
        ends, order = starts.tolist(), torch.arange(len(shared.source), device=device)
        parts = [[(start, n, n)] for start, n in zip(ends, new.tolist(), strict=False)]
    else:  # a rank has two chunks of each, and each is padded
        ends, order = share.cu_seqlens.tolist(), share.key_order
        seen = [(start, length, keys) for start, length, _, keys in share.spans]
        parts = [seen[2 * i : 2 * i + 2] for i in range(len(new))]
    shifts = (torch.tensor(ends) - starts)[:-1].repeat_interleave(new)
    places = order[(torch.arange(len(shared.source)) + shifts).to(device)]
    by_sample = [*shared.places.split(list(lengths)), shared.places[:0]]
    prefixes = [*(whole - n for whole, n in zip(lengths, shared.new_tokens, strict=False)), 0]
    spans, keys, key_start = [], [], 0
    for i, part in enumerate(parts):
        spans += [Span(query, n, key_start, prefixes[i] + seen) for query, n, seen in part if n]
        keys += [places[by_sample[i][: prefixes[i]]], order[ends[i] : ends[i + 1]]]
        key_start += prefixes[i] + ends[i + 1] - ends[i]
    return spans, torch.cat(keys), places


def bucket_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences of similar length: inside a bucket the longest is at most about 1.25 times the shortest."""
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length:
            buckets.setdefault(math.floor(math.log(length, 1.25)), []).append(index)
    return [buckets[key] for key in sorted(buckets)]


def chunks_of(lengths: Sequence[int], size: int, device: torch.device) -> Chunks:
    """Cut sequences of these lengths into chunks of `size` tokens, without reading anything from the device."""
    counts = [-(-length // size) for length in lengths]
    sizes = [sum(count > nth for count in counts) for nth in range(max(counts))]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    places = [torch.empty(0)] * len(counts)
    for rank, index in enumerate(sorted(range(len(counts)), key=lambda index: -counts[index])):
        positions = torch.arange(lengths[index])
        places[index] = (starts[positions // size] + rank) * size + positions % size
    return Chunks(tuple(sizes), torch.cat(places).to(device))


MASKED_QUERIES = 256
"""Minimum number of queries in a block, where attention needs a mask. CPU only."""


def _blocks(span: Span) -> list[Span]:
    """Cut queries that also see keys before their own into at most four blocks. Their attention needs a mask, and under
    one torch's kernel computes all keys of a batch, also those after the last that a query sees."""
    query_start, length, key_start, key_length = span
    before = key_length - length
    size = max(MASKED_QUERIES, -(-length // 4)) if before else max(length, 1)
    stops = [min(start + size, length) for start in range(0, length, size)]
    return [
        Span(query_start + start, stop - start, key_start, before + stop)
        for start, stop in zip([0, *stops], stops, strict=False)
    ]


def _fill_buckets(row: PackedRow, spans: list[Span], key_order: Tensor | None) -> None:
    order, spans = [], [block for span in spans for block in _blocks(span)]
    # A batch is as large as its longest queries times its longest keys: both are to be of similar length.
    by_queries = bucket_by_length([span.query_length for span in spans])
    by_keys = [(some, bucket_by_length([spans[i].key_length for i in some])) for some in by_queries]
    for members in ([some[i] for i in few] for some, buckets in by_keys for few in buckets):
        query_start, query_length, key_start, key_length = (
            torch.tensor([spans[i] for i in members]).unsqueeze(-1).unbind(1)
        )
        query, key = torch.arange(int(query_length.max())), torch.arange(int(key_length.max()))
        # Padded positions repeat the last token: causal attention never lets a real token see them.
        queries = query_start + torch.minimum(query, query_length - 1)
        keys = key_start + torch.minimum(key, key_length - 1)
        before = key_length - query_length
        if len(before.unique()) == 1:  # as for the samples of a group: one mask serves them all
            before = before[:1]
        last_seen = query + before  # last key that each query sees
        mask = None if query_length.equal(key_length) else (key <= last_seen[:, :, None])[:, None]
        real = (query < query_length).flatten().nonzero().squeeze(1)
        keys = keys if key_order is None else key_order[keys]
        row.buckets.append(LengthBucket(queries, keys, mask, real, last_seen.clamp(max=len(key) - 1)))
        order.append(queries.flatten()[real])
    row.row_order = torch.argsort(torch.cat(order))


def _kernel_spans(spans: list[Span], key_order: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Return the variable-length kernel's cumulative query and key lengths, the keys' indices, both longest lengths."""
    sizes = torch.tensor([(span.query_length, span.key_length) for span in spans])
    ends = torch.cat([sizes.new_zeros(1, 2), sizes.cumsum(0)]).to(key_order.device, torch.int32)
    places = torch.cat([key_order[span.key_start : span.key_start + span.key_length] for span in spans])
    longest = sizes.amax(0).tolist()
    return ends[:, 0].contiguous(), ends[:, 1].contiguous(), places, longest[0], longest[1]
