"""A small Mamba2 mixer, and its recurrence token by token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.families import MambaShape
from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from grpo_mcore.parallel.layers import mamba as mamba_module  # noqa: E402
from grpo_mcore.parallel.layers.mamba import MambaMixer  # noqa: E402

SHAPE = MambaShape(heads=4, head_dim=8, groups=2, state_size=16, kernel=4, chunk=8)
LENGTHS = (13, 1, 22)


def small_mixer(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: MambaShape = SHAPE, *, fused: bool = False
) -> MambaMixer:
    """Build a mixer without projections, whose time steps lie on both sides of 0.001."""

    class Nothing(torch.nn.Identity):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x, None

    group = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(mamba_module.parallel_state, "get_tensor_model_parallel_group", lambda: group)
    config: Any = SimpleNamespace(
        layernorm_epsilon=1e-5, params_dtype=dtype, hidden_size=8, init_method=None, output_layer_init_method=None
    )
    mixer = MambaMixer(config, 1, shape, column=Nothing, row=Nothing, fused=fused)
    torch.manual_seed(7)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    torch.nn.init.uniform_(mixer.dt_bias, -9.0, -5.0)
    return mixer


def projected_row() -> torch.Tensor:
    return torch.randn(sum(LENGTHS), sum(SHAPE.projected_parts))


def run(mixer: MambaMixer, row: torch.Tensor) -> torch.Tensor:
    packed: Any = SimpleNamespace(ends=offsets().to(row.device), context_group=None, whole=None, key_order=None)
    return mixer(row[:, None], packed_seq_params=packed)[0][:, 0]


def offsets() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


def recurrence(
    x: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """Return the scan of one sequence, token by token in float64; shapes as for `scan`."""
    x, dt, decay, b, c = (t.double() for t in (x, dt, decay, b, c))
    state, found = x.new_zeros(*x.shape[1:], b.size(-1)), []
    for t in range(len(x)):
        kept = torch.exp(dt[t] * decay)[:, None, None]
        state = kept * state + torch.einsum("hp,hn->hpn", dt[t, :, None] * x[t], b[t])
        found.append(torch.einsum("hpn,hn->hp", state, c[t]))
    return torch.stack(found)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.detach().double() - expected).norm() / expected.double().norm()).item()
