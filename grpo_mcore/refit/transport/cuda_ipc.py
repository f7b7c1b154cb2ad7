"""The refit buffer in the memory of one GPU, shared by CUDA IPC: the GPU transport of a colocated refit.

All ranks of the node share the one buffer. Ranks on other GPUs access it over NVLink or PCIe and must see its GPU
(CUDA_VISIBLE_DEVICES must not hide it).
"""

from __future__ import annotations

import socket
import uuid
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from grpo_mcore.refit.plan.plan import RefitError

_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the device index, which differs between processes


class CudaIpcBuffer:
    """A `RefitBuffer` on one GPU. The creator must live as long as any other process uses it."""

    _created: WeakValueDictionary[str, CudaIpcBuffer] = WeakValueDictionary()
    """Buffers created by this process, by id: CUDA cannot open an IPC handle in the process that exported it."""

    def __init__(self, flat: Tensor, description: dict[str, Any]) -> None:
        self.flat = flat
        self.description = description

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> CudaIpcBuffer:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(flat)
        buffer = cls(flat, {
            "kind": "cuda_ipc",
            "id": uuid.uuid4().hex,
            "gpu": _uuid(flat.device.index),
            "nbytes": nbytes,
            "host": socket.gethostname(),
            "handle": arguments,
        })  # fmt: skip
        cls._created[buffer.description["id"]] = buffer
        return buffer

    @classmethod
    def attach(cls, description: dict[str, Any]) -> CudaIpcBuffer:
        if (tensor := cls._created.get(description["id"])) is not None:
            return cls(tensor.flat, description)
        visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
        if description["gpu"] not in visible:
            raise RefitError(
                f"the refit buffer is on GPU {description['gpu']} of {description['host']}, which this "
                f"process on {socket.gethostname()} does not see (it sees {sorted(visible) or 'none'}): a "
                "colocated refit needs policy ranks and engines on one node, and each must see all its GPUs"
            )
        arguments = list(description["handle"])
        arguments[_DEVICE_ARGUMENT] = visible[description["gpu"]]
        return cls(rebuild_cuda_tensor(*arguments), description)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.flat.device)
        if (device := torch.cuda.current_device()) != self.flat.device.index:
            torch.cuda.synchronize(device)  # copies from another GPU run on that GPU's stream

    def close(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8)
        torch.cuda.ipc_collect()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
