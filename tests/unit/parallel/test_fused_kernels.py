"""Mixers with fused kernels equal those in plain PyTorch, forward and backward (the kernels: kernel_stand_ins.py)."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.parallel.kernel_stand_ins import KERNELS, largest_error, values_and_gradients
from tests.unit.parallel.layers import delta_cases, mamba_cases

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
@pytest.mark.parametrize(
    ("cases", "scan"),
    [(mamba_cases, "mamba_chunk_scan_combined"), (delta_cases, "chunk_gated_delta_rule")],
    ids=["mamba", "delta"],
)
def test_a_mixer(
    monkeypatch: pytest.MonkeyPatch, stand_ins: list[str], cases: Any, scan: str, dtype: torch.dtype, limit: float
) -> None:
    plain, fused = (cases.small_mixer(monkeypatch, dtype, fused=fused) for fused in (False, True))
    row = cases.projected_row().to(dtype)
    expected = values_and_gradients(cases.run, plain, row)
    assert not stand_ins
    assert largest_error(values_and_gradients(cases.run, fused, row), expected) < limit
    assert stand_ins == ["causal_conv1d_fn", scan]
