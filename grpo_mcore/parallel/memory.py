"""Memory that a policy rank holds: how much, and moving the optimizer's part between device and host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.parallel.platform import Platform


def storage_key(tensor: Tensor) -> int:
    """Identify the storage behind a tensor."""
    return tensor.untyped_storage().data_ptr()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the distinct storages behind `tensors`."""
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def resident_bytes(chunks: Iterable[Any], optimizer: Any) -> dict[str, int]:
    """Measure weights, gradients and optimizer: the storages behind them, including padding.

    `chunks`: model chunks wrapped for data parallelism. The optimizer's state exists after its first step.
    """
    chunks = list(chunks)
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    own = {storage_key(weight) for weight in weights}
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "weights": storage_bytes(weights),
        "gradients": storage_bytes(buffer.grad_data for buffer in buffers),
        "optimizer": storage_bytes(t for t in _optimizer_tensors(optimizer) if storage_key(t) not in own),
    }


def move_optimizer(optimizer: Any, weights: Iterable[Tensor], device: torch.device) -> None:
    """Move moments and float32 copies of weights to `device`.

    Views of weights stay: the optimizer updates float32 weights in place, and a copy of them would be one more. Scalars
    stay: torch's Adam counts its steps on the host. (Megatron-Core's `offload_to_cpu` moves both.)
    """
    own = {storage_key(weight) for weight in weights}
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            if storage_key(parameter) not in own:
                parameter.data = parameter.data.to(device, copy=True)
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():
                    state[name] = value.to(device, copy=True)


def accelerator(platform: Platform) -> dict[str, Any]:
    """Return the name, memory and peak use of this process's accelerator; {} without one."""
    if not platform.on_gpu:
        return {}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"device": found.name, "device bytes": found.total_memory, "peak": torch.cuda.max_memory_allocated()}


def _optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """Return the moments, and the float32 copies of the weights if there are any."""
    found: list[Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        found += [parameter for group in inner.param_groups for parameter in group["params"]]
        found += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return found
