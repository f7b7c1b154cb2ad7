"""Causal attention over packed rows: every sequence of a row attends to itself only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron-Core's description of a packed row, plus what the CPU attention gathers by (made once a row)."""

    buckets: list[Tensor] = field(default_factory=list)  # int64 [n, longest]: token of (sequence, position)
    valid: list[Tensor] = field(default_factory=list)  # int64 [tokens]: which of the flattened positions are real
    row_order: Tensor | None = None  # int64 [T]: where each token of the row is in the concatenated buckets


def describe_row(cu_seqlens: Tensor) -> PackedRow:
    """PackedRow of a row with these cumulative lengths (int32 [n + 1])."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    longest = max(lengths)
    row = PackedRow(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    if cu_seqlens.device.type == "cpu":
        _gather_indices(row, lengths, cu_seqlens.long())
    return row


def bucket_by_length(lengths: list[int], growth: float = 1.25) -> list[list[int]]:
    """Sequences of similar length together: inside a bucket the longest is at most `growth` times the shortest."""
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length:
            buckets.setdefault(math.floor(math.log(length, growth)), []).append(index)
    return [buckets[key] for key in sorted(buckets)]


def _gather_indices(row: PackedRow, lengths: list[int], starts: Tensor) -> None:
    order = []
    for members in bucket_by_length(lengths):
        size = torch.tensor([lengths[i] for i in members])
        position = torch.arange(int(size.max()))
        # Padded positions repeat the last token: causal attention never lets a real token see them.
        index = starts[members][:, None] + torch.minimum(position, size[:, None] - 1)
        real = (position < size[:, None]).flatten().nonzero().squeeze(1)
        row.buckets.append(index)
        row.valid.append(real)
        order.append(index.flatten()[real])
    row.row_order = torch.argsort(torch.cat(order))


class PackedAttention(torch.nn.Module):
    """Core attention of the local layer spec, for THD rows, with Megatron-Core's constructor.

    forward: query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]. On CPU the sequences are gathered
    into a few right-padded batches of similar length for torch's fused kernel; on GPU torch's variable-length kernel
    takes the row as it is.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "the policy feeds packed rows only"
        if query.is_cuda:
            return self._on_gpu(query, key, value, packed_seq_params)
        return self._on_cpu(query, key, value, packed_seq_params)

    def _on_gpu(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query, key, value, row.cu_seqlens_q, row.cu_seqlens_kv, row.max_seqlen_q, row.max_seqlen_kv,
            scale=self.scale, window_size=(-1, 0), enable_gqa=query.size(1) != key.size(1),
        )  # fmt: skip
        return out.flatten(1)

    def _on_cpu(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        repeat = query.size(1) // key.size(1)
        dtype, outputs = query.dtype, []
        # float32: the backward pass of torch's fused CPU kernel is up to six times slower in bfloat16.
        query, key, value = query.float(), key.float(), value.float()
        for index, valid in zip(row.buckets, row.valid, strict=True):
            shape, flat = index.shape, index.flatten()
            q, k, v = (t.index_select(0, flat).view(*shape, *t.shape[1:]).transpose(1, 2) for t in (query, key, value))
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, valid))
        return torch.cat(outputs).index_select(0, row.row_order).flatten(1).to(dtype)
