"""Variants of the optimizer on one GPU: where its state lies, and that offloads and checkpoints do not change it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.base.processes import free_port
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase

TP1 = LayoutCase("TP1")
HAS_TE = Platform.detect().transformer_engine
PLAIN = {"use_precision_aware_optimizer": False}
FUSED = {"use_precision_aware_optimizer": True}
FUSED_IF_THERE = pytest.param(
    FUSED, marks=pytest.mark.skipif(not HAS_TE, reason="TransformerEngine, whose FusedAdam it is, is not installed")
)
HOST = {"optimizer_cpu_offload": True}
HALF = HOST | {"optimizer_offload_fraction": 0.5}
OVERLAPPED = HALF | {"overlap_cpu_optimizer_d2h_h2d": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), head_dim=64))


def on_the_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    from grpo_mcore.parallel.mesh import Address, leave_mesh

    try:
        return function(Address(0, 1, 0, "127.0.0.1", free_port()), *arguments)
    finally:
        leave_mesh()


def train(address: Any, model: str, variant: dict[str, Any], offload: bool) -> tuple[list[Any], dict[str, Any], bool]:
    """Train four steps: (their norms and losses, the policy's memory, all state lies where its weights are updated)."""
    from grpo_mcore.parallel.memory import host_tensors, optimizer_tensors
    from tests.distributed.policy_state_cases import adam_policy, step

    policy = adam_policy(address, model, TP1, precision="bfloat16", variant=variant)
    steps = []
    for _ in range(4):
        steps.append(step(policy))
        if offload:
            policy.offload()
            policy.onload()
    here = all(tensor.is_cuda for tensor in optimizer_tensors(policy.optimizer, policy.chunks) if tensor.dim())
    there = not any(tensor.is_cuda for tensor in host_tensors(policy.optimizer))
    return steps, policy.memory(), here and there


@pytest.mark.parametrize(
    "variant", [FUSED_IF_THERE, HOST, HALF, OVERLAPPED], ids=["fused", "host", "half", "overlapped"]
)
def test_a_variant_trains_as_the_plain_optimizer_also_with_offloads(model: str, variant: dict[str, Any]) -> None:
    plain, memory, _ = on_the_gpu(train, model, PLAIN, False)
    for offload in (False, True):
        steps, found, in_place = on_the_gpu(train, model, variant, offload)
        assert in_place
        for expected, got in zip(plain, steps, strict=True):
            assert got == pytest.approx(expected, rel=5e-3)
        on_host = found["optimizer on the host"]
        assert found["optimizer"] + 12 / 16 * on_host == pytest.approx(memory["optimizer"], rel=0.02)
        assert bool(on_host) == ("optimizer_cpu_offload" in variant)
        if variant == HOST:
            assert found["optimizer"] == 0


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("variant", [PLAIN, FUSED_IF_THERE, HOST, HALF], ids=["plain", "fused", "host", "half"])
def test_training_continues_from_a_checkpoint(
    model: str, tmp_path: Path, variant: dict[str, Any], in_parts: bool
) -> None:
    from tests.distributed.policy_state_cases import load_train, train_save_train

    through = on_the_gpu(train_save_train, model, TP1, str(tmp_path), in_parts, "bfloat16", variant)
    resumed = on_the_gpu(load_train, model, TP1, str(tmp_path), "bfloat16", variant)
    for expected, got in zip(through, resumed, strict=True):
        assert got == pytest.approx(expected, rel=1e-3)
