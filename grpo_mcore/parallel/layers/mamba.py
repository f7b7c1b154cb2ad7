"""The Mamba2 mixer over packed rows: neither state nor convolution crosses a sequence boundary.

In plain PyTorch, or with the kernels of `mamba_ssm` and `causal_conv1d`; the parameters are the same. Under context
parallelism every rank scans whole sequences and keeps its own tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from grpo_mcore.families import MambaShape
from grpo_mcore.parallel.layers.packed_row import PackedRow
from grpo_mcore.parallel.layers.sharded_parts import sharded_in_parts


class MambaMixer(torch.nn.Module):
    """Takes the place of a layer's attention. Heads and their groups are split over tensor-parallel ranks.

    Parameters have the names of the Hugging Face checkpoint. `column`, `row`: classes of Megatron-Core's linear layers.
    `fused`: use `mamba_ssm` and `causal_conv1d`.

    Dao and Gu, arXiv 2405.21060: state h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, output y_t = C_t h_t + D x_t.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        mamba: MambaShape,
        column: type,
        row: type,
        fused: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.eps, dtype = config.layernorm_epsilon, config.params_dtype
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.mamba = local = mamba.local(self.group.size())
        both = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False, "tp_group": self.group}
        self.in_proj = column(
            config.hidden_size, sum(mamba.projected_parts), init_method=config.init_method, gather_output=False, **both
        )
        self.out_proj = row(
            mamba.inner, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True, **both
        )
        self.conv1d = Weights(weight=(local.convolved, 1, local.kernel), bias=(local.convolved,), dtype=dtype)
        self.norm = Weights(weight=(local.inner,), dtype=dtype)
        self.dt_bias, self.A_log, self.D = (split_over_heads(torch.empty(local.heads, dtype=dtype)) for _ in range(3))

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, packed_seq_params: PackedRow | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [t, 1, hidden] -> the same shape, and no bias; t / TP under sequence parallelism."""
        row = packed_seq_params
        assert row is not None and row.ends is not None, "the policy feeds packed rows only"
        projected = self.in_proj(hidden_states)[0][:, 0]
        projected, kept = whole_sequences(projected, row)
        mixed = self._mix(projected, row.ends)[kept]
        return self.out_proj(mixed.to(hidden_states.dtype)[:, None])[0], None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron-Core's sharded tensors, by position in the whole model."""
        assert metadata is not None
        linear = {"in_proj.": self.in_proj, "out_proj.": self.out_proj}
        plain = {name: value for name, value in self.state_dict(keep_vars=True).items() if "_proj." not in name}
        sharded = make_sharded_tensors_for_checkpoint(
            plain,
            prefix,
            dict.fromkeys(plain, 0),
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, layer in linear.items():
            sharded |= layer.sharded_state_dict(prefix + name, sharded_offsets, metadata)
        projected, convolved = self.mamba.projected_parts, self.mamba.convolved_parts
        for name, parts in (("in_proj.weight", projected), ("conv1d.weight", convolved), ("conv1d.bias", convolved)):
            sharded[prefix + name] = sharded_in_parts(sharded[prefix + name], parts)
        return sharded

    def _mix(self, projected: Tensor, cu_seqlens: Tensor) -> Tensor:
        mamba = self.mamba
        gate, convolved, dt = projected.split([mamba.inner, mamba.convolved, mamba.heads], -1)
        sequence = sequence_of_token(cu_seqlens, projected.size(0))
        x = convolve(
            convolved, self.conv1d.weight, self.conv1d.bias, sequence, cu_seqlens.numel() - 1, fused=self.fused
        )
        x, b, c = (x if self.fused else x.float()).split(mamba.convolved_parts, -1)
        x = x.unflatten(-1, (mamba.heads, mamba.head_dim))
        b, c = (t.unflatten(-1, (mamba.groups, -1)) for t in (b, c))
        y = (self._fused_scan if self.fused else self._plain_scan)(x, dt, -self.A_log.float().exp(), b, c, sequence)
        y = (y.flatten(1) * torch.nn.functional.silu(gate.float())).unflatten(-1, (mamba.groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.norm.weight * y.flatten(1).to(projected.dtype)

    def _plain_scan(self, x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, sequence: Tensor) -> Tensor:
        y = scan(x, self.time_steps(dt), decay, b, c, sequence, self.mamba.chunk)
        return y + self.D[:, None].float() * x

    def _fused_scan(self, x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, sequence: Tensor) -> Tensor:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        y: Tensor = mamba_chunk_scan_combined(  # it computes what `time_steps` does, in float32
            x[None], dt[None], decay, b[None], c[None], self.mamba.chunk,
            D=self.D.float(), dt_bias=self.dt_bias.float(), seq_idx=sequence[None], dt_softplus=True,
        )  # fmt: skip
        return y[0]

    def time_steps(self, dt: Tensor) -> Tensor:
        """Return softplus(dt + bias) in float32, as vLLM's and mamba_ssm's kernels compute it.

        There is no lower limit: the engine has none. transformers limits dt to `time_step_min`.
        """
        return torch.nn.functional.softplus(dt.float() + self.dt_bias.float())


def whole_sequences(projected: Tensor, row: PackedRow) -> tuple[Tensor, Tensor | slice]:
    """Return the tokens of all context-parallel ranks in the order of the row, and where those of this rank are. Each
    sample gets its prefix, also a shared one."""
    part, group = projected.size(0), row.context_group
    if group is not None:
        projected = gather_from_sequence_parallel_region(projected, tensor_parallel_output_grad=True, group=group)
    if row.whole is not None:
        order, kept = row.whole
        return projected.index_select(0, order), kept
    if group is None or row.key_order is None:
        return projected, slice(None)
    kept = row.key_order.argsort()[group.rank() * part : (group.rank() + 1) * part]
    return projected.index_select(0, row.key_order), kept


def sequence_of_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the index of each token's sequence, int32 [tokens]."""
    places = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True, out_int32=True)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, sequence: Tensor, count: int, *, fused: bool = False
) -> Tensor:
    """Apply a depthwise causal convolution within each of `count` sequences, and SiLU: x [T, channels], weight
    [channels, 1, kernel], `sequence` int32 [T]. `fused`: use `causal_conv1d`.

    In float32, as vLLM's and causal-conv1d's kernels; zeros between the sequences keep them apart.
    """
    if fused:
        from causal_conv1d import causal_conv1d_fn

        # With `seq_idx` the kernel wants the channels of a token side by side, and as the second dimension.
        row = x.contiguous().T[None]
        out: Tensor = causal_conv1d_fn(row, weight.squeeze(1), bias, seq_idx=sequence[None], activation="silu")
        return out[0].T
    kernel = weight.size(-1)
    places = torch.arange(len(x), device=x.device) + (kernel - 1) * (sequence + 1)
    apart = x.new_zeros(len(x) + (kernel - 1) * count, x.size(1)).index_copy(0, places, x)
    factors = weight.float(), None if bias is None else bias.float()
    out = torch.nn.functional.conv1d(apart.float().T[None], *factors, groups=x.size(1))[0].T
    return torch.nn.functional.silu(out.index_select(0, places - (kernel - 1))).to(x.dtype)


class Weights(torch.nn.Module):
    """A module that only holds parameters."""

    def __init__(self, dtype: torch.dtype, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, split_over_heads(torch.empty(shape, dtype=dtype)))


def split_over_heads(values: Tensor) -> Parameter:
    """Mark a parameter as split by rows over tensor-parallel ranks, for Megatron-Core's gradient norm."""
    parameter = Parameter(values)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def scan(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, sequence: Tensor, chunk: int) -> Tensor:
    """Scan the sequences of a row: x [T, heads, d], dt [T, heads], decay [heads], b and c [T, groups, n] -> [T, heads,
    d]. `sequence` [T]: the sequence of each token; those of one sequence are adjacent. In float32.

    Quadratic within a chunk of tokens and between chunks, for all chunks at once (Dao and Gu, section 6), so that the
    number of kernels depends neither on the row's length nor on its sequences. Masks keep the sequences apart.
    """
    tokens, heads = dt.shape
    pad = -tokens % chunk
    x, dt, b, c = (torch.nn.functional.pad(t, (0, 0) * (t.dim() - 1) + (0, pad)) for t in (x, dt, b, c))
    seq = torch.nn.functional.pad(sequence, (0, pad), value=-1).unflatten(0, (-1, chunk))  # [chunks, i]
    # Axes of einsum: k, m chunks; i, j tokens of a chunk; g groups; h heads of a group; p, n sizes of x and b.
    grouped = (b.size(1), heads // b.size(1))
    b, c = (t.unflatten(0, (-1, chunk)) for t in (b, c))
    x = (x * dt[..., None]).unflatten(0, (-1, chunk)).unflatten(2, grouped)

    seen = (seq[:, :, None] == seq[:, None]).tril()
    # Sums since the start of the chunk or sequence, so that not even their rounding depends on other sequences.
    log_decay = torch.einsum("kij,kjh->khi", seen.float(), (dt * decay).unflatten(0, (-1, chunk))).unflatten(1, grouped)
    between = log_decay[..., :, None] - log_decay[..., None, :]
    between = between.masked_fill(~seen[:, None, None], -torch.inf).exp()
    weights = torch.einsum("kign,kjgn->kgij", c, b)[:, :, None] * between
    y = torch.einsum("kghij,kjghp->kighp", weights, x)

    first, last, whole = seq[:, :1], seq[:, -1:], log_decay[..., -1]
    kept = (whole[..., None] - log_decay).masked_fill((seq != last)[:, None, None], -torch.inf).exp()
    states = torch.einsum("kjgn,kjghp->kghpn", b, x * kept.movedim(-1, 1)[..., None])  # at the end of each chunk
    ends = whole.double().cumsum(0)  # float64: differences of long sums
    carried = ends[:, None] - whole[:, None].double() - ends  # from the end of chunk m to the start of chunk k
    reached = (first == last.T).tril(-1)[..., None, None]
    carried = carried.masked_fill(~reached, -torch.inf).exp().float()
    incoming = torch.einsum("kmgh,mghpn->kghpn", carried, states)
    read = log_decay.masked_fill((seq != first)[:, None, None], -torch.inf).exp().movedim(-1, 1)
    y = y + torch.einsum("kign,kghpn->kighp", c, incoming) * read[..., None]
    return y.flatten(2, 3).flatten(0, 1)[:tokens]
