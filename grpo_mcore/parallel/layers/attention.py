"""Causal attention over packed rows: every sequence of a row attends to itself only.

Under context parallelism a rank has the queries of two chunks of every sequence (`context.ContextShare`). Keys and
values are gathered from the context-parallel ranks, and each chunk attends to its sequence up to its own end.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from grpo_mcore.families import FamilyError, VisionShape
from grpo_mcore.parallel.layers.packed_row import PackedRow
from grpo_mcore.parallel.platform import Platform


class PackedAttention(torch.nn.Module):
    """Core attention of the local layer spec, for THD rows, with Megatron-Core's constructor.

    forward: query [T, heads, d], key [T, groups, d], value [T, groups, e] -> [T, heads * e]. On CPU the sequences are
    gathered into a few right-padded batches of similar length for torch's fused kernel; on GPU torch's variable-length
    kernel takes the row as it is.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        platform: Platform,
        **_: Any,
    ) -> None:
        super().__init__()
        self.platform = platform
        self.scale = softmax_scale or config.kv_channels**-0.5
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else 0
        self.softmax_offset: torch.nn.Parameter | None = None  # the sinks, named as in TransformerEngine
        if config.softmax_type == "learnable":
            if platform.on_gpu and not platform.traced:
                raise FamilyError(
                    "attention sinks on GPUs need the attention of TransformerEngine 2.8 or later; install it, and "
                    "leave policy.sequence_packing.shared_prefix.enabled null"
                )
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron-Core's sharded tensors: the sinks by head, if there are any."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(), dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip

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
        if packed_seq_params.context_group is not None:
            key, value = _gather_context(key, value, packed_seq_params.context_group)
        if self.platform.on_gpu:
            return self._on_gpu(query, key, value, packed_seq_params)
        return self._on_cpu(query, key, value, packed_seq_params)

    def _on_gpu(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self.softmax_offset is not None:
            # Only traced: TransformerEngine's kernel adds the sinks inside. Here they must get a gradient at least.
            query = query + 0 * self.softmax_offset.sum()
        repeat, grouped = query.size(1) // key.size(1), {}
        if repeat > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped, repeat = {"enable_gqa": True}, 1
        query_ends, key_ends = row.ends, row.ends
        longest_query, longest_key = row.max_seqlen_q, row.max_seqlen_kv
        if row.spans is not None:
            query_ends, key_ends, places, longest_query, longest_key = row.spans
            key, value = key.index_select(0, places), value.index_select(0, places)
        width = value.size(-1)
        if width != query.size(-1):  # the kernel needs one head size; latent attention has narrower values
            value = torch.nn.functional.pad(value, (0, query.size(-1) - width))
        if repeat > 1:  # torch 2.11 has no grouped-query attention in this kernel
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        out = varlen_attn(
            query, key, value, query_ends, key_ends, longest_query, longest_key,
            scale=self.scale, window_size=(self.window - 1, 0), **grouped,
        )  # fmt: skip
        return out[..., :width].flatten(1)

    def _on_cpu(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        repeat = query.size(1) // key.size(1)
        dtype, outputs = query.dtype, []
        # float32: the backward pass of torch's fused CPU kernel is up to six times slower in bfloat16.
        query, key, value = query.float(), key.float(), value.float()
        for bucket in row.buckets:
            q, k, v = _take(query, bucket.queries), _take(key, bucket.keys), _take(value, bucket.keys)
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            mask = bucket.window(self.window) if self.window else bucket.mask
            if self.softmax_offset is not None:
                mask = bucket.window(self.window or k.size(2)) if mask is None else mask
                q, k, v, mask = _with_sink(q, k, v, mask, self.softmax_offset.float() / self.scale)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
            outputs.append(out[..., : value.size(-1)].transpose(1, 2).flatten(0, 1).index_select(0, bucket.real))
        return torch.cat(outputs).index_select(0, row.row_order).flatten(1).to(dtype)


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put a key before the others that every query sees, with this logit [heads] before scaling and a value of 0.

    query [n, heads, q, d], key and value [n, heads, k, d] and [n, heads, k, e]: a dimension of each head multiplies the
    query's 1 with the new key's logit and the other keys' 0.
    """
    n, heads, _, d = key.shape
    sink = torch.cat([logits.new_zeros(heads, d), logits[:, None]], -1)[None, :, None].expand(n, -1, -1, -1)
    pad = torch.nn.functional.pad
    key = torch.cat([sink, pad(key, (0, 1))], 2)
    return pad(query, (0, 1), value=1.0), key, pad(value, (0, 1, 1, 0)), pad(mask, (1, 0), value=True)


def _take(row: Tensor, index: Tensor) -> Tensor:
    """row [T, heads, d], index [n, length] -> [n, heads, length, d]."""
    return row.index_select(0, index.flatten()).view(*index.shape, *row.shape[1:]).transpose(1, 2)


def _gather_context(key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of all context-parallel ranks, rank after rank; gradients go back to the rank that owns them."""
    joined = torch.cat([key, value], -1)
    gathered = gather_from_sequence_parallel_region(joined, tensor_parallel_output_grad=True, group=group)
    key, value = gathered.split([key.size(-1), value.size(-1)], -1)
    return key, value


class RotaryByPosition(torch.nn.Module):
    """One of Megatron-Core's rotary embeddings, evaluated at the position of each token of a packed row.

    Megatron-Core's own way for packed rows cuts the row into its sequences, whose lengths it reads back from the device
    in every layer.
    """

    def __init__(self, embedding: torch.nn.Module, vision: VisionShape | None = None) -> None:
        super().__init__()
        self.embedding = embedding
        self.axes = None if vision is None else axis_of_angles(vision)  # int64 [dim / 2]

    def get_rotary_seq_len(self, *arguments: Any) -> PackedRow:
        """Return the row, which comes last of Megatron-Core's arguments; the result is what `forward` gets."""
        row: PackedRow = arguments[-1]
        return row

    def forward(self, row: PackedRow, **_: Any) -> Any:
        """Return the angles, float32 [t, 1, dim]; of YaRN also its factor for sine and cosine."""
        # Megatron-Core keeps the tables of 32 lengths: powers of two, so that these are few.
        rotary = self.embedding(1 << (row.max_seqlen_q - 1).bit_length(), packed_seq=True)
        angles, *factor = rotary if isinstance(rotary, tuple) else (rotary,)
        if row.images is None or self.axes is None:
            angles_of_row = angles[:, 0].index_select(0, row.positions)
        else:
            by_axis = torch.stack([angles[:, 0, 0].index_select(0, axis) for axis in row.images.axes])  # [3, t, dim]
            axes = torch.cat([self.axes, self.axes]).to(by_axis.device).expand(1, by_axis.size(1), -1)
            angles_of_row = by_axis.gather(0, axes)[0, :, None]
        return (angles_of_row, *factor) if factor else angles_of_row


def axis_of_angles(vision: VisionShape) -> Tensor:
    """Return int64 [dim / 2]: the axis (0 time, 1 row, 2 column) whose position turns each of a head's angles."""
    if not vision.rotary_interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(vision.rotary_sections))
    angle = torch.arange(sum(vision.rotary_sections))
    axis = angle % 3
    return torch.where(angle < 3 * torch.tensor(vision.rotary_sections)[axis], axis, 0)


class WindowAttention(SelfAttention):
    """Self-attention of layers whose rotary embedding has a base of their own."""

    def __init__(self, config: TransformerConfig, *args: Any, rotary_base: float, platform: Platform, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        rotary: torch.nn.Module = RotaryEmbedding(
            config.kv_channels, 1.0, rotary_base=rotary_base, use_cpu_initialization=config.use_cpu_initialization
        )
        self.rotary_pos_emb = rotary if platform.fused_attention else RotaryByPosition(rotary)

    def forward(self, hidden_states: Tensor, attention_mask: None, **how: Any) -> Any:
        row = how["packed_seq_params"]
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, self.config, row)
        how["rotary_pos_emb"] = self.rotary_pos_emb(length, packed_seq=True)
        return super().forward(hidden_states, attention_mask, **how)


class GatedAttention(SelfAttention):
    """Self-attention with an output gate. Where tensor-parallel ranks share a key-value head, Megatron-Core 0.16 takes
    the rank's own queries out of those of the head, but leaves the gates of all."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        heads = query.size(2)
        first = parallel_state.get_tensor_model_parallel_rank() * heads % gate.size(2)
        return query, key, value, gate[:, :, first : first + heads]


class WholeLinear(torch.nn.Module):
    """A linear layer with its whole weight on every tensor-parallel rank, as TransformerEngine's "duplicated" mode."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention of the local layer spec: MLASelfAttention with whole down projections on every rank.

    Without TransformerEngine, Megatron-Core 0.16 splits them over the tensor-parallel ranks. The rotary part of the
    keys is shared by all heads, and its gradient would then come from the rank's own heads only.
    """

    rotary_pos_emb: torch.nn.Module

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotary_pos_emb = RotaryByPosition(self.rotary_pos_emb)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width)
