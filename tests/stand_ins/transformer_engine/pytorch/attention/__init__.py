"""Attention over packed rows, in float32 and sequence by sequence."""

import math
from typing import Any

import torch

from transformer_engine.pytorch.kernels import communicate, on_cpu, row_positions
from transformer_engine.pytorch.module import Tracker, TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Tracker | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and not return_max_logit and attention_type == "self"
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.head_dims = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        assert num_attention_heads % (num_gqa_groups or num_attention_heads) == 0
        self.groups_here = (num_gqa_groups or num_attention_heads) // self.tp_size
        self.window_size, self.softcap, self.attn_mask_type = window_size, softcap, attn_mask_type
        self.cp_group, self.cp_comm_type, self.softmax_type = cp_group, cp_comm_type, softmax_type
        self.softmax_scale = 1.0 / math.sqrt(self.head_dims[0]) if softmax_scale is None else softmax_scale
        self.softmax_offset: torch.Tensor | None = None
        if softmax_type == "learnable":  # float32, whatever the other parameters are
            del self.softmax_offset
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // self.tp_size, device="cuda"))

    @on_cpu
    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Query [T, heads, d], key [T, groups, d], value [T, groups, e] -> [T, heads * e]; 0 for padding."""
        query, key, value = query_layer, key_layer, value_layer
        assert qkv_format == "thd" and (attn_mask_type or self.attn_mask_type) == "padding_causal"
        assert query.dtype == key.dtype == value.dtype and key.shape[:-1] == value.shape[:-1]
        assert (query.size(-1), value.size(-1)) == self.head_dims and query.size(-1) == key.size(-1)
        assert key.size(1) == self.groups_here, f"{key.size(1)} key-value heads, expected {self.groups_here}"
        assert cu_seqlens_q is not None and cu_seqlens_q.equal(cu_seqlens_kv) and cu_seqlens_q.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert max(lengths) <= max_seqlen_q == max_seqlen_kv
        row = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        left, _ = self.window_size if window_size is None and self.window_size else window_size or (-1, 0)
        rank, size = (self.cp_group.rank(), self.cp_group.size()) if self.cp_group is not None else (0, 1)
        if size > 1:
            assert cu_seqlens_q_padded is not None and cu_seqlens_kv_padded is not None
            assert left < 0 or self.cp_comm_type in ("a2a", "all_gather"), "no windows over a ring of ranks"
            assert self.softmax_type == "vanilla" or self.cp_comm_type == "a2a", "no sinks over a ring of ranks"
            key, value = (communicate(part, self.cp_group, "gather") for part in (key, value))
        starts = row[:-1].tolist()
        by_rank = [row_positions(row, other, size) for other in range(size)]
        order = [start + part for parts in by_rank for start, part in zip(starts, parts, strict=True)]
        places = torch.cat(order).argsort()  # of the whole row's tokens among the gathered ones
        assert len(places) == len(key) and len(query) * size == len(key)
        repeat = query.size(1) // key.size(1)
        key, value = (part[places].float().repeat_interleave(repeat, 1) for part in (key, value))
        outputs = []
        queries = query.float().split([len(part) for part in by_rank[rank]])
        for part, start, length, positions in zip(queries, starts, lengths, by_rank[rank], strict=True):
            keys, values = key[start : start + length], value[start : start + length]
            scores = torch.einsum("qhd,khd->hqk", part, keys) * self.softmax_scale
            if cap := self.softcap if softcap is None else softcap:
                scores = cap * torch.tanh(scores / cap)
            ahead = positions[:, None] - torch.arange(length)
            hidden = (ahead < 0) | ((ahead > left) & (left >= 0)) | (positions[:, None] >= length)
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.softmax_offset is not None:  # one more logit, whose key has no value
                sink = self.softmax_offset.float()[:, None, None].expand(-1, len(part), 1)
                scores = torch.cat([scores, sink], -1)
            weights = scores.softmax(-1)[..., :length].masked_fill(hidden, 0.0)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs).flatten(1).to(query.dtype)
