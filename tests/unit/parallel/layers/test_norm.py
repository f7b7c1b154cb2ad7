"""RMS norm against float64 and against autograd's derivative."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from grpo_mcore.parallel.layers import norm  # noqa: E402
from grpo_mcore.parallel.layers.norm import CpuRMSNorm, RMSNorm, rms_norm  # noqa: E402

EPS = 1e-6


def by_definition(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(len(shape))
    return torch.randn(shape, dtype=dtype) * 3, torch.rand(shape[-1], dtype=dtype) + 0.5


@pytest.fixture(autouse=True, params=[1, 300, norm.SLICE_BYTES], ids=["row by row", "few rows", "one slice"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "SLICE_BYTES", request.param)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(7, 12), (5, 1, 12), (5, 3, 4)])
def test_the_derivative(shape: tuple[int, ...]) -> None:
    x, weight = (tensor.requires_grad_() for tensor in inputs(shape, torch.float64))
    torch.testing.assert_close(rms_norm(x, weight, EPS), by_definition(x, weight), rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, EPS), (x, weight))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.bfloat16, 2**-8)])
def test_against_float64(dtype: torch.dtype, tolerance: float) -> None:
    """Outputs are within one rounding; gradients are within one rounding of their largest element."""
    x, weight = inputs((70, 2, 24), dtype)
    grad = torch.randn(x.shape).to(dtype)
    before = x.clone(), weight.clone(), grad.clone()
    found = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    rms_norm(*found, EPS).backward(grad)
    by_definition(*exact).backward(grad.double())
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), by_definition(x, weight), rtol=tolerance, atol=0)
    for mine, reference in zip(found, exact, strict=True):
        assert mine.grad is not None and mine.grad.dtype == dtype and reference.grad is not None
        largest = reference.grad.abs().max()
        torch.testing.assert_close(mine.grad.double() / largest, reference.grad / largest, rtol=tolerance, atol=2e-7)
    assert all(torch.equal(was, now) for was, now in zip(before, (x, weight, grad), strict=True)), "inputs changed"


def test_the_gpu_module_equals_the_cpu_module() -> None:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False, layernorm_zero_centered_gamma=False)
    x, weight = inputs((7, 12), torch.float32)
    outputs = []
    for module in (RMSNorm(config, 12, EPS), CpuRMSNorm(config, 12, EPS)):
        module.weight.data.copy_(weight)
        outputs.append(module(x))
    torch.testing.assert_close(*outputs)


def test_rows_that_are_not_contiguous() -> None:
    """Query and key are such views, of the output of one projection."""
    whole, weight = inputs((9, 2, 24), torch.float64)
    whole.requires_grad_()
    part = whole[:, :, 8:16]
    out = rms_norm(part.transpose(0, 1), weight[:8], EPS)
    torch.testing.assert_close(out, by_definition(part, weight[:8]).transpose(0, 1))
    out.sum().backward()  # an expanded gradient
    expected = torch.autograd.grad(by_definition(part, weight[:8]).sum(), whole)[0]
    torch.testing.assert_close(whole.grad, expected)
    assert rms_norm(part[:0], weight[:8], EPS).shape == (0, 2, 8)
