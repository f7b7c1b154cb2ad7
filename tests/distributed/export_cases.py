"""The functions that test_export.py runs on the ranks."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.families import params_of
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.tools.export import export
from grpo_mcore.tools.parity.rank import LayoutCase
from tests.distributed.adapter_cases import adapted_policy, logprobs_of
from tests.distributed.adapter_cases import step as adapter_step
from tests.distributed.policy_state_cases import adam_policy, step


def train_and_save(
    address: Address, model: str, case: LayoutCase, folder: str, peft: dict[str, Any] | None
) -> dict[int, Tensor]:
    """Train one step and save. Return the log-probs of the trained policy by sequence (last stage)."""
    if peft is None:
        policy = adam_policy(address, model, case)
        step(policy)
    else:
        policy = adapted_policy(address, model, case, peft, adam=True)
        adapter_step(policy)
    policy.save(folder)
    return logprobs_of(policy)


def save_without(address: Address, model: str, case: LayoutCase, folder: str, suffix: str) -> None:
    """Save a checkpoint that lacks the tensors whose name ends with `suffix`."""
    from megatron.core import dist_checkpointing

    from grpo_mcore.parallel.weights.checkpoint import _plain_shape

    policy = adam_policy(address, model, case)
    assert params_of(policy.shape)
    found = policy.chunks[0].module.sharded_state_dict()
    kept = {name: entry for name, entry in found.items() if not name.endswith(suffix)}
    assert len(kept) < len(found)
    Path(folder).mkdir(parents=True)
    dist_checkpointing.save({"model": kept, "shape": _plain_shape(policy)}, folder)


def export_here(_: Address, checkpoint: str, output: str, options: dict[str, Any]) -> set[str]:
    """Export, and return which of the libraries are loaded that an export must do without."""
    export(Path(checkpoint), Path(output), **options)
    assert not torch.distributed.is_initialized()
    return {"ray", "vllm"} & sys.modules.keys()
