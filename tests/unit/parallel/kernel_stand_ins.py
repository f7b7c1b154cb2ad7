"""Stand-ins for the kernels of `causal_conv1d`, `mamba_ssm` and `fla`, which need a GPU, and what compares two mixers.

Each has the signature of the real one (causal_conv1d 1.7.0, mamba_ssm 2.3.0, fla 0.6.0; tests/gpu compares them),
refuses what that refuses, and computes from exactly its arguments, token by token in float64.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from tests.unit.parallel.layers import delta_cases, mamba_cases


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    seq_idx: Any = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    final_states_out: Any = None,
    activation: Any = None,
) -> Tensor:
    """x [batch, channels, T], weight [channels, width], bias [channels], seq_idx [batch, T]."""
    assert initial_states is None and final_states_out is None and not return_final_states
    batch, channels, length = x.shape
    width = weight.size(1)
    assert weight.shape == (channels, width) and 2 <= width <= 4
    assert bias is None or (bias.shape == (channels,) and bias.dtype == weight.dtype)
    if seq_idx is None:
        seq_idx = torch.zeros(batch, length, dtype=torch.int32)
    else:
        assert x.stride(1) == 1 and x.stride(2) > 1, "seq_idx is only supported for channel last layout"
        assert channels % 8 == 0 and x.stride(0) % 8 == 0 and x.stride(2) % 8 == 0
        assert seq_idx.shape == (batch, length) and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
    seen = pad(seq_idx, (width - 1, 0), value=-1).unfold(1, width, 1) == seq_idx[..., None]
    windows = pad(x.double(), (width - 1, 0)).unfold(2, width, 1) * seen[:, None]
    out = (windows * weight.double()[:, None]).sum(-1)
    if bias is not None:
        out = out + bias.double()[:, None]
    assert activation in (None, "silu", "swish")
    return (silu(out) if activation else out).to(x.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    seq_idx: Any = None,
    cu_seqlens: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor:
    """x [batch, T, heads, d], dt [batch, T, heads], A [heads], B and C [batch, T, groups, n], D [heads] or [heads, d],
    dt_bias [heads], seq_idx [batch, T]."""
    assert z is None and initial_states is None and cu_seqlens is None
    assert not return_final_states and not return_varlen_states and isinstance(chunk_size, int)
    batch, length, heads, size = x.shape
    assert batch == 1 and dt.shape == (batch, length, heads) and A.shape == (heads,) and B.shape == C.shape
    assert B.shape[:2] == (batch, length) and heads % B.size(2) == 0
    dt = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    every_head = (t.repeat_interleave(heads // B.size(2), 2) for t in (B, C))
    inputs = [t[0] for t in (x, dt, *every_head)]
    parts = zip(*(t.split(lengths_of(seq_idx, length)) for t in inputs), strict=True)
    y = torch.cat([mamba_cases.recurrence(part, step, A, b, c) for part, step, b, c in parts])[None]
    if D is not None:
        assert D.shape in ((heads,), (heads, size))
        y = y + (D[:, None] if D.dim() == 1 else D).double() * x.double()
    return y.to(x.dtype)


def lengths_of(seq_idx: Tensor | None, length: int) -> list[int]:
    if seq_idx is None:
        return [length]
    assert seq_idx.shape == (1, length)
    found: list[int] = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    return found


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """q and k [1, T, key heads, d], v [1, T, heads, e], g and beta [1, T, heads], cu_seqlens [n + 1]."""
    assert initial_state is chunk_indices is cp_context is None and not kwargs
    assert not (output_final_state or allow_neg_eigval or state_v_first)
    batch, length, keys, size, dtype = *q.shape, q.dtype
    heads = v.size(2)
    assert batch == 1 and k.shape == q.shape and v.shape[:2] == (1, length) and heads % keys == 0
    assert g.shape == beta.shape == (1, length, heads)
    q, k, v, g, beta = (t[0].double() for t in (q, k, v, g, beta))
    q, k = (delta_cases.delta_module.unit(t) if use_qk_l2norm_in_kernel else t for t in (q, k))
    q = q * (size**-0.5 if scale is None else scale)
    beta = beta.sigmoid() if use_beta_sigmoid_in_kernel else beta
    ends = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or (cu_seqlens.dtype == torch.int64 and ends[-1] == length)
    assert cu_seqlens_cpu is None or (cu_seqlens_cpu.dtype == torch.int64 and cu_seqlens_cpu.tolist() == ends)
    inputs, spans = (q, k, v, g, beta), zip(ends, ends[1:], strict=False)
    out = torch.cat([delta_cases.recurrence(*(t[a:b] for t in inputs)) for a, b in spans])
    return out[None].to(dtype), None


KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d": causal_conv1d_fn,
    "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
    "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
}


def values_and_gradients(run: Callable[[Any, Tensor], Tensor], mixer: torch.nn.Module, row: Tensor) -> list[Tensor]:
    """Return the mixer's output for a row, and the gradients of the row and of the mixer's parameters."""
    row = row.clone().requires_grad_()
    out = run(mixer, row)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.device)
    return [out, *torch.autograd.grad((out * weights).sum(), [row, *mixer.parameters()])]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(mamba_cases.relative_error(one, other) for one, other in zip(found, expected, strict=True))
