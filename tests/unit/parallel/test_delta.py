"""The delta rule of policy and CPU engine against its recurrence in float64, over a packed row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.families import DeltaShape
from grpo_mcore.generation.cpu_kernels import gated_delta_net
from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from grpo_mcore.parallel import delta as delta_module  # noqa: E402
from grpo_mcore.parallel.delta import DeltaMixer, delta_rule, unit  # noqa: E402
from grpo_mcore.parallel.packed_row import chunks_of  # noqa: E402

LENGTHS = (5, 16, 1, 11)
KEYS, HEADS, D, E = 2, 4, 6, 3
SHAPE = DeltaShape((0,), KEYS, HEADS, key_dim=16, value_dim=16, kernel=4, chunk=4)


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t', output S_t q_t, for one sequence, in float64."""
    q, k = (x.double().repeat_interleave(v.size(1) // x.size(1), 1) for x in (q, k))
    state, out = torch.zeros(*v.shape[1:], k.size(-1), dtype=torch.float64), []
    for t in range(len(q)):
        state = state * log_decay[t].double().exp()[:, None, None]
        error = v[t].double() - torch.einsum("hed,hd->he", state, k[t])
        state = state + torch.einsum("h,he,hd->hed", strength[t].double(), error, k[t])
        out.append(torch.einsum("hed,hd->he", state, q[t]))
    return torch.stack(out)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, *size, generator=generator) for size in ((KEYS, D), (KEYS, D), (HEADS, E)))
    return [
        unit(q) * D**-0.5,
        unit(k),
        v,
        -torch.rand(total, HEADS, generator=generator),
        torch.rand(total, HEADS, generator=generator),
    ]


def test_chunks_of_a_packed_row_equal_the_recurrence_forward_and_backward() -> None:
    ours = [x.requires_grad_() for x in inputs()]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    out = delta_rule(*ours, chunks_of(LENGTHS, 4, ours[0].device), 4)
    expected = torch.cat([recurrence(*(x[a:b] for x in theirs)) for a, b in zip(ends, ends[1:], strict=False)])
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(out.shape)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_an_engine_continues_a_sequence_from_its_state() -> None:
    """With a convolution that passes its last input on: prompts of all sequences, then one token of each."""
    torch.manual_seed(0)
    total, channels = sum(LENGTHS), 2 * KEYS * D + HEADS * E
    x, decay, strength = torch.randn(total, channels), torch.rand(total, HEADS), torch.rand(total, HEADS)
    weight = torch.zeros(channels, 4)
    weight[:, -1] = 1.0
    q, k, v = torch.nn.functional.silu(x).split([KEYS * D, KEYS * D, HEADS * E], -1)
    parts = unit(q.unflatten(-1, (KEYS, D))) * D**-0.5, unit(k.unflatten(-1, (KEYS, D))), v.unflatten(-1, (HEADS, E))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    spans = list(zip(ends.tolist(), ends.tolist()[1:], strict=False))
    expected = torch.cat([recurrence(*(y[a:b] for y in (*parts, decay.log(), strength))) for a, b in spans])
    window, state = torch.zeros(len(LENGTHS), channels, 3), torch.zeros(len(LENGTHS), HEADS, E, D)
    for rows in ([row for a, b in spans for row in range(a, b - 1)], [b - 1 for _, b in spans]):
        counts = [sum(a <= row < b for row in rows) for a, b in spans]
        starts = torch.tensor([0, *counts]).cumsum(0)
        found = gated_delta_net(x[rows], decay[rows], strength[rows], weight, window, state, starts)
        torch.testing.assert_close(found.double(), expected[rows], atol=1e-5, rtol=1e-4)


def small_mixer(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, fused: bool = False) -> DeltaMixer:
    """Build a mixer without projections."""
    group = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(delta_module.parallel_state, "get_tensor_model_parallel_group", lambda: group)
    monkeypatch.setattr(delta_module, "copy_to_tensor_model_parallel_region", lambda weight: weight)
    config: Any = SimpleNamespace(
        layernorm_epsilon=1e-6, params_dtype=dtype, hidden_size=8, init_method=None, output_layer_init_method=None
    )

    class Nothing(torch.nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    mixer = DeltaMixer(config, 1, SHAPE, column=Nothing, row=Nothing, fused=fused)
    torch.manual_seed(7)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def projected_row() -> Tensor:
    width = sum(SHAPE.convolved_parts) + SHAPE.values + 2 * HEADS
    return torch.randn(sum(LENGTHS), width, generator=torch.Generator().manual_seed(1))


def run(mixer: DeltaMixer, row: Tensor) -> Tensor:
    """Return what the mixer makes of projected tokens, before its output projection."""
    ends = torch.tensor([0, *LENGTHS], device=row.device).cumsum(0).int()
    packed: Any = SimpleNamespace(ends=ends, lengths=list(LENGTHS), chunks=None)
    return mixer._mix(row, packed)
