"""The norms of engines on CPU against the formula in float64."""

import subprocess
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from grpo_mcore.generation.cpu_kernels import (
    PROVIDER,
    register_cpu_kernels,
    rounded_rows,
    rounds_to_bfloat16,
    takes_norm,
)
from grpo_mcore.recipe.validation.rules import tables

EPSILON = 1e-6


def formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight.double()


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
def test_the_norms_are_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    register_cpu_kernels()
    register_cpu_kernels()  # a second plugin's load changes nothing
    from vllm import ir

    draw = torch.Generator().manual_seed(1)
    norm, add_norm = ir.ops.rms_norm.impls[PROVIDER], ir.ops.fused_add_rms_norm.impls[PROVIDER]
    weight = torch.rand(64, generator=draw).add(0.5).to(dtype)
    heads = torch.randn(17, 1024, generator=draw).to(dtype)[:, 128:640].view(17, 8, 64)  # of a fused projection
    right = dtype == torch.float32 or rounds_to_bfloat16()
    tolerance *= 1 if right else 2  # of a number that is cut
    assert norm.supports_args(heads, weight, EPSILON) == right and not heads.is_contiguous()
    found, expected = norm.impl_fn(heads, weight, EPSILON), formula(heads, weight)
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)

    x, residual = (torch.randn(17, 64, generator=draw).to(dtype) for _ in range(2))
    total = x.float() + residual.float()
    expected = formula(total, weight)
    assert add_norm.supports_args(x, residual, weight, EPSILON) == right
    found, kept = add_norm.impl_fn(x, residual, weight, EPSILON)
    assert torch.equal(kept, total.to(dtype)) or not right
    slack = 1 if dtype == torch.float32 else 2  # in bfloat16 the sum is rounded before it is normalised
    assert torch.allclose(found.double(), expected, rtol=slack * tolerance, atol=slack * tolerance)
    assert not norm.supports_args(heads, weight.double(), EPSILON) and not norm.supports_args(heads, None, EPSILON)


@pytest.mark.slow  # imports vLLM
def test_ranks_that_wait_leave_the_processor_to_those_that_compute(tmp_path: Path) -> None:
    register_cpu_kernels()
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    with zmq.Context() as context:
        reader = SpinCondition(is_reader=True, context=context, notify_address=f"ipc://{tmp_path}/messages")
        reader.record_read()
        asked, until = 0, time.monotonic() + 0.2
        while time.monotonic() < until:
            reader.wait(timeout_ms=20)
            asked += 1
        for socket in (reader.local_notify_socket, reader.read_cancel_socket, reader.write_cancel_socket):
            socket.close(linger=0)
    assert asked < 5000, "vLLM's own way asks some 100,000 times"


@pytest.mark.parametrize(
    ("dtype", "rounds", "takes"),
    [
        (torch.float32, False, True),
        (torch.float16, False, True),
        (torch.bfloat16, True, True),
        (torch.bfloat16, False, False),
    ],
)
def test_no_norm_is_left_to_a_kernel_that_cuts(dtype: torch.dtype, rounds: bool, takes: bool) -> None:
    x, weight = torch.ones(2, 4, dtype=dtype), torch.ones(4, dtype=dtype)
    assert takes_norm(x, weight, None, rounds) == takes
    assert not takes_norm(x, weight, 2, rounds) and not takes_norm(x, weight.double(), None, rounds)


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_refit_knows_which_layers_vllm_has_packed(dtype: torch.dtype) -> None:
    """vLLM drops the plain weight of those; on which processors it packs bfloat16 is its own affair."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from grpo_mcore.refit.engine_side.engine_weights import computes_with_plain_weight

    layer = torch.nn.Linear(64, 128, bias=False).to(dtype).requires_grad_(False)
    assert not computes_with_plain_weight(layer)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert computes_with_plain_weight(layer) == (layer.weight.numel() > 0)


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 96)])
def test_rounded_rows_change_no_bit_of_a_product(bias: torch.Tensor | None) -> None:
    register_cpu_kernels()
    from vllm import _custom_ops as ops

    draw = torch.Generator().manual_seed(3)
    weight, x = torch.randn(96, 64, generator=draw), torch.randn(150, 64, generator=draw)
    product = ops.create_onednn_mm(weight.t(), 32)
    expected = torch.empty(150, 96)
    torch.ops._C.onednn_mm(expected, x, bias, product.handler_tensor)  # vLLM's kernel, with all rows
    for rows in range(1, 150):
        assert torch.equal(ops.onednn_mm(product, x[:rows], bias), expected[:rows])
        assert rows <= rounded_rows(rows) <= rows * 9 / 8
    assert len({rounded_rows(rows) for rows in range(1, 2049)}) == 72
    assert ops.onednn_mm(product, x[:20].view(4, 5, 64), bias).shape == (4, 5, 96)


@pytest.mark.slow  # imports vLLM
def test_the_arguments_that_recipes_name_are_those_of_the_class() -> None:
    from vllm.engine.arg_utils import EngineArgs

    names = {name for table in ("set_by", "decided", "decided_of_policy") for name in tables()[table]}
    names |= set(" ".join(tables()["passed"].values()).split())
    assert names - {each.name for each in fields(EngineArgs)} == set()


@pytest.mark.slow  # imports vLLM
def test_a_kind_of_model_that_is_new_to_the_machine_is_looked_at_in_this_process(monkeypatch) -> None:
    register_cpu_kernels()
    from vllm import ModelRegistry

    kind = ModelRegistry.models["GPT2LMHeadModel"]
    monkeypatch.setattr(type(kind), "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it started a process"))
    assert kind.inspect_model_cls().architecture == "GPT2LMHeadModel"
