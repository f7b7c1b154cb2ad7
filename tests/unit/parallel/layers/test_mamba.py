"""The Mamba2 mixer: its scan against the recurrence, and the mixer against float64 and against vLLM's operators."""

from typing import Any

import pytest
import torch

from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from grpo_mcore.parallel.layers.mamba import MambaMixer, scan  # noqa: E402
from tests.unit.parallel.layers import mamba_cases  # noqa: E402
from tests.unit.parallel.layers.mamba_cases import LENGTHS, SHAPE, offsets, recurrence, relative_error, run, small_mixer  # noqa: E402


@pytest.mark.parametrize("lengths", [(1,), (7,), (8,), (30,), (3, 1, 8, 2, 17, 5), (16, 16), (8, 40, 1)], ids=str)
@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_scan_equals_the_recurrence(lengths: tuple[int, ...], chunk: int, groups: int) -> None:
    """Values and gradients, for sequences that begin and end anywhere in a chunk."""
    generator = torch.Generator().manual_seed(5)
    x, b, c = (torch.randn(sum(lengths), *s, generator=generator) for s in ((4, 3), (groups, 5), (groups, 5)))
    dt, decay = torch.rand(sum(lengths), 4, generator=generator), -torch.rand(4, generator=generator) * 3
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    inputs = [t.requires_grad_() for t in (x, dt, decay, b, c)]
    found = scan(*inputs, sequence, chunk)
    every_head = [*inputs[:3], *(t.repeat_interleave(4 // groups, 1) for t in (b, c))]
    parts = [[t if t is decay else t.split(lengths)[i] for t in every_head] for i in range(len(lengths))]
    expected = torch.cat([recurrence(*part) for part in parts])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(found.shape, generator=generator)
    ours, exact = (torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected))
    for gradient, formula in zip(ours, exact, strict=True):
        torch.testing.assert_close(gradient, formula, atol=1e-4, rtol=2e-5)


def test_the_scan_keeps_its_precision_over_a_long_row() -> None:
    """The decay is summed in float32 within a chunk of 128 tokens (to about 128, error 1e-5), but not over the row (to
    about 8,000, error 5e-4)."""
    torch.manual_seed(3)
    x, b, c = torch.randn(8192, 1, 2), torch.randn(8192, 1, 3), torch.randn(8192, 1, 3)
    dt, decay = torch.rand(8192, 1) + 0.5, torch.tensor([-1.0])
    dt[4090:4102] = 1e-3  # little decay across the border of two chunks, deep in the row
    found = scan(x, dt, decay, b, c, torch.zeros(8192, dtype=torch.int64), 128)
    torch.testing.assert_close(found.double(), recurrence(x, dt, decay, b, c), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("length", [200, 4096])
def test_the_number_of_operators_does_not_depend_on_the_row(length: int) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return function(*args, **(kwargs or {}))

    x, b, c = torch.randn(length, 2, 4), torch.randn(length, 1, 4), torch.randn(length, 1, 4)
    sequence = torch.arange(length) // 50
    with Count() as count:
        scan(x, torch.rand(length, 2), -torch.ones(2), b, c, sequence, 64)
    assert count.calls < 160


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_mixer_equals_the_formula_in_float64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: float
) -> None:
    mixer, row = small_mixer(monkeypatch, dtype), mamba_cases.projected_row().to(dtype)
    found = run(mixer, row)
    expected = torch.cat([reference(mixer, part) for part in row.double().split(LENGTHS)])
    assert relative_error(found, expected) < limit


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
def test_time_steps_equal_vllms(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: float) -> None:
    """vLLM adds the bias and applies softplus in float32, and does not limit dt. A state after one token with B = x = 1
    is dt itself."""
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import _mamba_chunk_scan_combined_fwd_cpu

    mixer = small_mixer(monkeypatch, dtype)
    for value in torch.linspace(-4, 4, 41):
        raw = torch.full((1, SHAPE.heads), value).to(dtype)
        ones = torch.ones(1, SHAPE.heads, SHAPE.head_dim)
        states = _mamba_chunk_scan_combined_fwd_cpu(
            ones,
            raw,
            torch.zeros(SHAPE.heads),
            *[torch.ones(1, SHAPE.groups, SHAPE.state_size)] * 2,
            SHAPE.chunk,
            torch.empty_like(ones),
            dt_bias=mixer.dt_bias.detach(),
            dt_softplus=True,
            cu_seqlens=torch.tensor([0, 1]),
        )
        assert relative_error(mixer.time_steps(raw)[0], states[0, :, 0, 0]) < limit


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_mixer_equals_vllms_operators(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: float) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import _mamba_chunk_scan_combined_fwd_cpu

    mixer, row = small_mixer(monkeypatch, dtype), mamba_cases.projected_row().to(dtype)
    gate, convolved, dt = row.split([SHAPE.inner, SHAPE.convolved, SHAPE.heads], -1)
    parts = [torch.nn.functional.silu(convolve(mixer, part)).to(dtype) for part in convolved.float().split(LENGTHS)]
    x, b, c = torch.cat(parts).split(SHAPE.convolved_parts, -1)
    y = torch.empty(len(row), SHAPE.heads, SHAPE.head_dim, dtype=dtype)
    _mamba_chunk_scan_combined_fwd_cpu(  # as vLLM's MambaMixer2 calls it, with its default dt_limit=(0, inf)
        x.unflatten(-1, (SHAPE.heads, -1)).contiguous(),
        dt,
        -mixer.A_log.detach().float().exp(),
        b.unflatten(-1, (SHAPE.groups, -1)).contiguous(),
        c.unflatten(-1, (SHAPE.groups, -1)).contiguous(),
        SHAPE.chunk,
        y,
        D=mixer.D.detach(),
        dt_bias=mixer.dt_bias.detach(),
        dt_softplus=True,
        cu_seqlens=offsets(),
    )
    assert relative_error(run(mixer, row), gated_norm(mixer, y.flatten(1), gate)) < limit


def convolve(mixer: MambaMixer, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (p.detach().to(x.dtype) for p in (mixer.conv1d.weight, mixer.conv1d.bias))
    padded = torch.nn.functional.pad(x.T, (SHAPE.kernel - 1, 0))
    return torch.nn.functional.conv1d(padded, weight, bias, groups=SHAPE.convolved).T


def gated_norm(mixer: MambaMixer, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    y = (y.double() * torch.nn.functional.silu(gate.double())).unflatten(-1, (SHAPE.groups, -1))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + mixer.eps)
    return mixer.norm.weight.detach().double() * y.flatten(1)


def reference(mixer: MambaMixer, row: torch.Tensor) -> torch.Tensor:
    """Return the mixer's output for one sequence in float64, of Dao and Gu's formula."""
    gate, convolved, dt = row.split([SHAPE.inner, SHAPE.convolved, SHAPE.heads], -1)
    x, b, c = torch.nn.functional.silu(convolve(mixer, convolved)).split(SHAPE.convolved_parts, -1)
    x = x.unflatten(-1, (SHAPE.heads, -1))
    b, c = (t.unflatten(-1, (SHAPE.groups, -1)).repeat_interleave(SHAPE.heads // SHAPE.groups, 1) for t in (b, c))
    dt_bias, a_log, d = (p.detach().double() for p in (mixer.dt_bias, mixer.A_log, mixer.D))
    dt = torch.log1p(torch.exp(dt + dt_bias))
    assert (dt < 0.001).any() and (dt > 0.001).any()
    y = recurrence(x, dt, -a_log.exp(), b, c) + d[:, None] * x
    return gated_norm(mixer, y.flatten(1), gate)
