"""A small Gated DeltaNet mixer, and its recurrence token by token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.families import DeltaShape
from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from grpo_mcore.parallel.layers import delta as delta_module  # noqa: E402
from grpo_mcore.parallel.layers.delta import DeltaMixer  # noqa: E402

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
