"""The kernels of mamba_ssm, causal_conv1d and fla against our own mixers, in bfloat16 over a packed row."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from grpo_mcore.base.imports import NOT_INSTALLED, why_not_imported
from grpo_mcore.families import MambaShape
from grpo_mcore.parallel.platform import Platform
from tests.unit.parallel.kernel_stand_ins import KERNELS, largest_error, values_and_gradients
from tests.unit.parallel.layers import delta_cases, mamba_cases

MAMBA = MambaShape(heads=8, head_dim=64, groups=2, state_size=64, kernel=4, chunk=16)
LIMIT = 3e-2


@pytest.mark.parametrize("name", KERNELS)
def test_stand_ins_have_the_kernels_signatures(name: str) -> None:
    """So that the tests on CPU call the kernels as they are."""
    if why_not_imported(name) == NOT_INSTALLED:
        pytest.skip(f"{name.partition('.')[0]} is not installed (docs/gpu.md, fused kernels)")
    kernel = getattr(importlib.import_module(name), KERNELS[name].__name__)
    ours, theirs = (
        [(parameter.name, parameter.default) for parameter in inspect.signature(function).parameters.values()]
        for function in (KERNELS[name], kernel)
    )
    assert ours == theirs


@pytest.mark.skipif(not Platform.detect().mamba_kernels, reason="mamba_ssm or causal_conv1d is not installed")
def test_a_mamba_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = (
        mamba_cases.small_mixer(monkeypatch, torch.bfloat16, MAMBA, fused=fused).cuda() for fused in (False, True)
    )
    row = torch.randn(sum(mamba_cases.LENGTHS), sum(MAMBA.projected_parts)).bfloat16().cuda()
    expected = values_and_gradients(mamba_cases.run, plain, row)
    assert largest_error(values_and_gradients(mamba_cases.run, fused, row), expected) < LIMIT


@pytest.mark.skipif(not Platform.detect().delta_kernels, reason="fla or causal_conv1d is not installed")
def test_a_delta_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = (delta_cases.small_mixer(monkeypatch, torch.bfloat16, fused=fused).cuda() for fused in (False, True))
    row = delta_cases.projected_row().bfloat16().cuda()
    expected = values_and_gradients(delta_cases.run, plain, row)
    assert largest_error(values_and_gradients(delta_cases.run, fused, row), expected) < LIMIT
