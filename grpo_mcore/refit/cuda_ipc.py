"""The refit buffer in the memory of one GPU, shared by CUDA IPC: the GPU transport of a colocated refit.

Every rank of the node writes to, or reads from, the one buffer; ranks on other GPUs do so over NVLink or
PCIe, and must see that GPU (no CUDA_VISIBLE_DEVICES that hides it).
"""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from grpo_mcore.refit.plan import RefitError

_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the device index, which differs between processes


class CudaIpcBuffer:
    """See `RefitBuffer`. The creator must outlive the others' use of it."""

    def __init__(self, flat: Tensor, description: dict[str, Any]) -> None:
        self.flat = flat
        self.description = description

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> CudaIpcBuffer:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(flat)
        return cls(flat, {
            "kind": "cuda_ipc",
            "gpu": _uuid(flat.device.index),
            "nbytes": nbytes,
            "host": socket.gethostname(),
            "handle": arguments,
        })  # fmt: skip

    @classmethod
    def attach(cls, description: dict[str, Any]) -> CudaIpcBuffer:
        visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
        if description["gpu"] not in visible:
            raise RefitError(
                f"the refit buffer is on GPU {description['gpu']} of {description['host']}, which this "
                f"process on {socket.gethostname()} does not see (it sees {sorted(visible) or 'none'}): a "
                "colocated refit needs policy ranks and engines on one node, each seeing all GPUs of it"
            )
        arguments = list(description["handle"])
        arguments[_DEVICE_ARGUMENT] = visible[description["gpu"]]
        return cls(rebuild_cuda_tensor(*arguments), description)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.flat.device)
        if (here := torch.cuda.current_device()) != self.flat.device.index:
            torch.cuda.synchronize(here)  # copies from another GPU run on that GPU's stream

    def close(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8)
        torch.cuda.ipc_collect()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
