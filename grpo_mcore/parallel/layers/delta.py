"""The Gated DeltaNet mixer over packed rows: neither state nor convolution crosses a boundary between sequences.

In plain PyTorch, or with the kernels of `fla` and `causal_conv1d`; the parameters are the same. Under context
parallelism every rank scans whole sequences and keeps its own tokens.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from grpo_mcore.families import DeltaShape
from grpo_mcore.parallel.layers.mamba import Weights, convolve, sequence_of_token, split_over_heads, whole_sequences
from grpo_mcore.parallel.layers.packed_row import Chunks, PackedRow, chunks_of
from grpo_mcore.parallel.layers.sharded_parts import sharded_in_parts


class DeltaMixer(torch.nn.Module):
    """Takes the place of a layer's attention. Heads are split over tensor-parallel ranks.

    Parameters have the names of the Hugging Face checkpoint, its four input projections in two. `column`, `row`:
    classes of Megatron-Core's linear layers. `fused`: use `fla` and `causal_conv1d`.

    Yang, Kautz, Hatamizadeh, arXiv 2412.06464, eq. 10: with the state S of a head, S_t = a_t S_{t-1} + b_t (v_t - a_t
    S_{t-1} k_t) k_t', output S_t q_t.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        delta: DeltaShape,
        column: type,
        row: type,
        fused: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.eps, dtype = config.layernorm_epsilon, config.params_dtype
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.delta = local = delta.local(self.group.size())
        both = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False, "tp_group": self.group}
        inputs = {"init_method": config.init_method, "gather_output": False, **both}
        self.in_proj_qkvz = column(config.hidden_size, sum(delta.convolved_parts) + delta.values, **inputs)
        self.in_proj_ba = column(config.hidden_size, 2 * delta.value_heads, **inputs)
        self.out_proj = row(
            delta.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **both,
        )
        self.conv1d = Weights(weight=(sum(local.convolved_parts), 1, local.kernel), dtype=dtype)
        self.A_log, self.dt_bias = (split_over_heads(torch.empty(local.value_heads, dtype=dtype)) for _ in range(2))
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.empty(local.value_dim, dtype=dtype))

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, packed_seq_params: PackedRow | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [t, 1, hidden] -> the same shape, and no bias; t / TP under sequence parallelism."""
        row = packed_seq_params
        assert row is not None and row.ends is not None, "the policy feeds packed rows only"
        projected = [layer(hidden_states)[0][:, 0] for layer in (self.in_proj_qkvz, self.in_proj_ba)]
        joined, kept = whole_sequences(torch.cat(projected, -1), row)
        mixed = self._mix(joined, row)[kept]
        return self.out_proj(mixed.to(hidden_states.dtype)[:, None])[0], None

    def _mix(self, projected: Tensor, row: PackedRow) -> Tensor:
        assert row.ends is not None
        delta, heads = self.delta, self.delta.value_heads
        qkv, gate, b, a = projected.split([sum(delta.convolved_parts), delta.values, heads, heads], -1)
        sequence = sequence_of_token(row.ends, projected.size(0))
        qkv = convolve(qkv, self.conv1d.weight, None, sequence, row.ends.numel() - 1, fused=self.fused)
        q, k, v = (qkv if self.fused else qkv.float()).split(delta.convolved_parts, -1)
        q, k = (x.unflatten(-1, (-1, delta.key_dim)) for x in (q, k))
        v, strength = v.unflatten(-1, (heads, -1)), b.float().sigmoid()
        log_decay = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias.float())
        if self.fused:
            out = fused_delta_rule(q, k, v, log_decay, strength, row.ends, row.lengths)
        else:
            if row.chunks is None:
                row.chunks = chunks_of(row.lengths, delta.chunk, projected.device)
            scale = delta.key_dim**-0.5
            out = delta_rule(unit(q) * scale, unit(k), v, log_decay, strength, row.chunks, delta.chunk)
        # Each rank has the norm's weight for its own heads, so that the gradient is the sum over the ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm.weight).float()
        normed = rms_norm(out.float(), (delta.value_dim,), weight, self.eps)
        return (normed * silu(gate.float().unflatten(-1, (heads, -1)))).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron-Core's sharded tensors, by position in the whole model."""
        assert metadata is not None
        plain = {name: value for name, value in self.state_dict(keep_vars=True).items() if "_proj" not in name}
        axes = {name: 0 for name in plain if name != "norm.weight"}
        sharded = make_sharded_tensors_for_checkpoint(
            plain, prefix, axes, sharded_offsets, tp_group=self.group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
            sharded |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        delta = self.delta
        for name, parts in (
            ("in_proj_qkvz.weight", (*delta.convolved_parts, delta.values)),
            ("in_proj_ba.weight", (delta.value_heads, delta.value_heads)),
            ("conv1d.weight", delta.convolved_parts),
        ):
            sharded[prefix + name] = sharded_in_parts(sharded[prefix + name], parts)
        return sharded


def unit(x: Tensor) -> Tensor:
    """Return x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def fused_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, ends: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Apply `delta_rule` to `unit` queries, scaled by 1 / sqrt(d), and `unit` keys, with the kernel of `fla`. `ends`:
    cumulative lengths of the sequences. The output has the dtype of q."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    on_host = torch.tensor([0, *accumulate(lengths)])  # without them the kernel would read `ends` from the device
    out: Tensor = chunk_gated_delta_rule(
        q[None], k[None], v[None], log_decay[None], strength[None],
        scale=q.size(-1) ** -0.5, use_qk_l2norm_in_kernel=True, cu_seqlens=ends.long(), cu_seqlens_cpu=on_host,
    )[0]  # fmt: skip
    return out[0]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, row: Chunks, size: int) -> Tensor:
    """Apply the gated delta rule to each sequence of a row: q and k [T, key heads, d], v [T, heads, e], log_decay (log
    a) and strength (b) [T, heads] -> [T, heads, e], in float32. `row`: its chunks of `size` tokens.

    Within a chunk, what a token writes into the state depends on what those before it wrote: one triangular system
    (section 3.3 of the paper). A chunk turns the state S into M S + N. M and N of all chunks are computed together, so
    that one matrix product per chunk is left to be done in turn, for the n-th chunks of all sequences at a time.
    """

    def chunked(x: Tensor) -> Tensor:  # [T, heads, ...] -> [chunks, heads, chunk, ...]; tokens that fill up are zero
        heads = x.repeat_interleave(v.size(1) // x.size(1), 1)
        apart = heads.new_zeros(sum(row.sizes) * size, *heads.shape[1:]).index_copy(0, row.places, heads)
        return apart.unflatten(0, (-1, size)).transpose(1, 2).contiguous()  # each product would copy it

    q, k, v, g, b = (chunked(x) for x in (q, k, v, log_decay, strength))
    g = g.cumsum(-1)
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    system = (b[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    sides = torch.cat([v, k * g.exp()[..., None]], -1) * b[..., None]
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, erased = solved.split([v.size(-1), k.size(-1)], -1)
    kept = (k * (g[..., -1:] - g).exp()[..., None]).transpose(-1, -2)
    eye = torch.eye(k.size(-1), device=q.device)
    factors, terms = eye * g[..., -1].exp()[..., None, None] - kept @ erased, kept @ written

    heads = q.size(1)
    spans = [count * heads for count in row.sizes]
    state, states = q.new_zeros(spans[0], q.size(-1), v.size(-1)), []
    for factor, term in zip(factors.flatten(0, 1).split(spans), terms.flatten(0, 1).split(spans), strict=True):
        state = state if len(state) == len(factor) else state[: len(factor)]
        states.append(state)
        state = torch.baddbmm(term, factor, state)
    before = torch.cat(states).unflatten(0, (-1, heads))
    scores, read = (q @ k.transpose(-1, -2)) * decay, q * g.exp()[..., None]
    whole = (read - scores @ erased) @ before + scores @ written
    return whole.transpose(1, 2).flatten(0, 1).index_select(0, row.places)
