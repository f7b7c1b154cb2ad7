"""The functions that test_file_precision.py runs on the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.tools.export import export
from grpo_mcore.tools.parity.rank import LayoutCase, owned_slices
from tests.distributed.adapter_cases import PEFT
from tests.distributed.policy_state_cases import adam_config, step

Slices = list[tuple[str, Any, torch.Tensor]]


def bfloat16_policy(address: Address, model: str, case: LayoutCase, adapters: bool, freeze_router: bool) -> Policy:
    config = adam_config(model, case, "bfloat16")
    megatron = config.megatron_cfg
    megatron.freeze_moe_router = freeze_router
    megatron.peft = megatron.peft.model_copy(update=PEFT | {"enabled": adapters})
    return Policy(config, address, seed=1, timeout_s=60, reference=False)


def train_save_export(
    address: Address, model: str, case: LayoutCase, adapters: bool, freeze_router: bool, folder: str
) -> dict[str, Any]:
    """Train two steps in bfloat16, export, save, and train another."""
    policy = bfloat16_policy(address, model, case, adapters, freeze_router)
    found: dict[str, Any] = {"loaded": owned_slices(policy)}
    for _ in range(2):
        step(policy)
    policy.export_hf(f"{folder}/exported")
    policy.save(f"{folder}/step_1/policy")
    return found | {"trained": owned_slices(policy), "next": step(policy), "then": owned_slices(policy)}


def resume(
    address: Address, model: str, case: LayoutCase, adapters: bool, freeze_router: bool, folder: str
) -> dict[str, Any]:
    policy = bfloat16_policy(address, model, case, adapters, freeze_router)
    policy.load(f"{folder}/step_1/policy")
    return {"trained": owned_slices(policy), "next": step(policy), "then": owned_slices(policy)}


def export_here(_: Address, folder: str) -> None:
    export(Path(folder) / "step_1", Path(folder) / "merged")
