"""Mixers with fused kernels equal those in plain PyTorch, forward and backward (the kernels: kernel_stand_ins.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.parallel import test_delta, test_mamba
from tests.unit.parallel.kernel_stand_ins import KERNELS

LIMITS = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the stand-ins in the place of the packages. Return the list that the names of called ones are added to."""
    calls: list[str] = []

    def recorded(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(kernel.__name__)
            return kernel(*args, **kwargs)

        return call

    for name, kernel in KERNELS.items():
        module = ModuleType(name)
        setattr(module, kernel.__name__, recorded(kernel))
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@LIMITS
def test_a_mamba_mixer(monkeypatch: pytest.MonkeyPatch, stand_ins: list[str], dtype: torch.dtype, limit: float) -> None:
    plain, fused = (test_mamba.small_mixer(monkeypatch, dtype, fused=fused) for fused in (False, True))
    row = torch.randn(sum(test_mamba.LENGTHS), sum(test_mamba.SHAPE.projected_parts)).to(dtype)
    expected = values_and_gradients(test_mamba.run, plain, row)
    assert not stand_ins
    assert largest_error(values_and_gradients(test_mamba.run, fused, row), expected) < limit
    assert stand_ins == ["causal_conv1d_fn", "mamba_chunk_scan_combined"]


@LIMITS
def test_a_delta_mixer(monkeypatch: pytest.MonkeyPatch, stand_ins: list[str], dtype: torch.dtype, limit: float) -> None:
    plain, fused = (test_delta.small_mixer(monkeypatch, dtype, fused=fused) for fused in (False, True))
    row = test_delta.projected_row().to(dtype)
    expected = values_and_gradients(test_delta.run, plain, row)
    assert not stand_ins
    assert largest_error(values_and_gradients(test_delta.run, fused, row), expected) < limit
    assert stand_ins == ["causal_conv1d_fn", "chunk_gated_delta_rule"]


def values_and_gradients(run: Callable[[Any, Tensor], Tensor], mixer: torch.nn.Module, row: Tensor) -> list[Tensor]:
    """Return the mixer's output for a row, and the gradients of the row and of the mixer's parameters."""
    row = row.clone().requires_grad_()
    out = run(mixer, row)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.device)
    return [out, *torch.autograd.grad((out * weights).sum(), [row, *mixer.parameters()])]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(test_mamba.relative_error(one, other) for one, other in zip(found, expected, strict=True))
