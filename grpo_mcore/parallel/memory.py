"""Memory that a policy rank holds: how much, and moving the optimizer's part between device and host."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.base.host_memory import HostCopies
from grpo_mcore.parallel.platform import Platform


def host_copies(platform: Platform, tensors: Sequence[Tensor]) -> HostCopies:
    """Reserve room on the host for copies of tensors on the platform's device."""
    return HostCopies(tensors, pinned=platform.pins_memory, traced=platform.traced)


def storage_key(tensor: Tensor) -> int:
    """Identify the storage behind a tensor."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the distinct storages behind `tensors`."""
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def resident_bytes(chunks: Iterable[Any], optimizer: Any) -> dict[str, int]:
    """Measure weights, gradients and optimizer: the storages behind them, including padding.

    `chunks`: model chunks wrapped for data parallelism. The optimizer's state exists after its first step.
    """
    chunks = list(chunks)
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "weights": storage_bytes(weights),
        "gradients": storage_bytes(buffer.grad_data for buffer in buffers),
        "optimizer": storage_bytes(optimizer_tensors(optimizer, chunks)),
        "optimizer on the host": storage_bytes(host_tensors(optimizer)),
    }


class OptimizerOffload:
    """Moves moments and float32 copies of weights to the host and back. The room on the host is kept and used again.

    Views of weights stay: the optimizer updates float32 weights in place, and a copy of them would be one more. Scalars
    stay: torch's Adam counts its steps on the host. (Megatron-Core's `offload_to_cpu` moves both, to pageable memory.)
    """

    def __init__(self, optimizer: Any, chunks: Iterable[Any], platform: Platform) -> None:
        self._optimizer, self._chunks, self._platform = optimizer, list(chunks), platform
        self._room: HostCopies | None = None

    def offload(self) -> None:
        """Move them to the host, into pinned memory if they are on a GPU."""
        moved = self._tensors()
        if self._room is None or not self._room.fit(moved):  # the first time, and after the first optimizer step
            if self._room is not None:
                self._room.close()
            self._room = host_copies(self._platform, moved)
        self._room.store(moved)
        for tensor, copy in zip(moved, self._room.tensors, strict=True):
            tensor.data = copy

    def leave_room(self) -> None:
        """Put copies in ordinary memory in place of those in the room, for a forked process to write them to disk: it
        does not have pinned memory, and the next `offload` fills the room anew."""
        for tensor in self._tensors():
            tensor.data = tensor.data.clone()

    def onload(self, device: torch.device) -> None:
        """Move them to `device`."""
        for tensor in self._tensors():
            tensor.data = tensor.data.to(device, copy=True)

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in optimizer_tensors(self._optimizer, self._chunks) if tensor.dim()]


class WeightsOffload:
    """Moves the weights of a model that does not train to the host and back. They are copied to the host once."""

    def __init__(self, weights: Sequence[Tensor], platform: Platform) -> None:
        self._weights = list(weights)
        self._room = host_copies(platform, self._weights)
        self._room.store(self._weights)

    def offload(self) -> None:
        """Move them to the host."""
        for weight, copy in zip(self._weights, self._room.tensors, strict=True):
            weight.data = copy

    def onload(self, device: torch.device) -> None:
        """Move them to `device`."""
        for weight in self._weights:
            weight.data = weight.data.to(device, copy=True)


def free_gradients(optimizer: Any) -> None:
    """Free the float32 copies that an update made of bfloat16 gradients on the device. Those on the host are used
    again."""
    optimizer.zero_grad()
    for inner in on_device(optimizer):
        inner.zero_grad()


def accelerator(platform: Platform) -> dict[str, Any]:
    """Return the name, memory and peak use of this process's accelerator; {} without one."""
    if not platform.on_gpu:
        return {}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"device": device.name, "device bytes": device.total_memory, "peak": torch.cuda.max_memory_allocated()}


def on_device(optimizer: Any) -> list[Any]:
    """Return torch's optimizers of the weights that are updated on this rank's device. Megatron-Core's
    HybridDeviceOptimizer has one of them, or none, and others on the host."""
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    optimizers = [getattr(optimizer, "gpu_optimizer", optimizer) for optimizer in inner]
    return [optimizer for optimizer in optimizers if optimizer is not None]


def on_host(optimizer: Any) -> list[Any]:
    """Return torch's optimizers of the weights that are updated on the host (optimizer_cpu_offload)."""
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [part for hybrid in inner for part in getattr(hybrid, "cpu_optimizers", [])]


def optimizer_tensors(optimizer: Any, chunks: Iterable[Any]) -> list[Tensor]:
    """Return the moments on the device, and the float32 copies of the weights of `chunks` if there are any."""
    weights = {storage_key(weight) for chunk in chunks for weight in chunk.parameters()}
    tensors = (tensor for part in on_device(optimizer) for tensor in _tensors_of(part))
    return [tensor for tensor in tensors if storage_key(tensor) not in weights]


def host_tensors(optimizer: Any) -> list[Tensor]:
    """Return the weights' float32 copies that are updated on the host, with moments and gradients."""
    tensors = [tensor for part in on_host(optimizer) for tensor in _tensors_of(part)]
    return tensors + [tensor.grad for tensor in tensors if tensor.grad is not None]


def _tensors_of(inner: Any) -> list[Tensor]:
    """Return what an optimizer updates, and its state, in which its float32 weights may be once more."""
    tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
    tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return list({id(tensor): tensor for tensor in tensors}.values())
