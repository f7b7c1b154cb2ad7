"""The refit buffer: bytes that several processes map, and a tensor view of each block."""

from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_mcore.refit.plan.parts import Fill, Load, Part
from grpo_mcore.refit.plan.plan import Block, RefitError, RefitPlan

CPU = torch.device("cpu")


class RefitBuffer(Protocol):
    """Bytes shared by the policy ranks and the engine ranks of one node, mapped once for the whole run."""

    flat: Tensor  # uint8 [nbytes]
    description: dict[str, Any]  # what another process needs to attach

    def synchronize(self) -> None:
        """Wait until everything written here is visible to the other processes."""

    def close(self) -> None:
        """Unmap the buffer; the process that created it also frees it. Idempotent."""


def create_buffer(nbytes: int, device: torch.device, run_id: str, *, through_host: bool = False) -> RefitBuffer:
    """Create a buffer in POSIX shared memory for weights on the host, by CUDA IPC for weights on a GPU.

    `through_host`: make it in shared memory in any case, pinned if the weights are on a GPU."""
    if device.type == "cpu" or through_host:
        from grpo_mcore.refit.transport.shared_memory import SharedMemoryBuffer

        buffer = SharedMemoryBuffer.create(nbytes, run_id)
        if device.type == "cuda":
            buffer.pin()
        return buffer
    if device.type == "cuda":
        from grpo_mcore.refit.transport.cuda_ipc import CudaIpcBuffer

        return CudaIpcBuffer.create(nbytes, device)
    raise RefitError(f"no refit transport for weights on {device}")


def attach_buffer(description: dict[str, Any], device: torch.device = CPU) -> RefitBuffer:
    """Map the buffer that another process created. `device`: where this process's weights are."""
    match description.get("kind"):
        case "shared_memory":
            from grpo_mcore.refit.transport.shared_memory import SharedMemoryBuffer

            buffer = SharedMemoryBuffer.attach(description)
            if device.type == "cuda":
                buffer.pin()
            return buffer
        case "cuda_ipc":
            from grpo_mcore.refit.transport.cuda_ipc import CudaIpcBuffer

            return CudaIpcBuffer.attach(description)
        case kind:
            raise RefitError(f"unknown refit transport {kind!r}")


def block_view(buffer: RefitBuffer, plan: RefitPlan | Part, bucket: int, block: Block | Fill | Load) -> Tensor:
    """Return the part of the buffer that holds `block`, as a view in the block's dtype and in the shape of its box."""
    start = plan.start(bucket) + block.offset
    if start + block.nbytes > buffer.flat.numel():
        raise RefitError(
            f"the block of {block.param!r} in bucket {bucket} ends at byte {start + block.nbytes:,} of a refit buffer "
            f"of {buffer.flat.numel():,}"
        )
    shape = [stop - first for first, stop in block.box]
    return buffer.flat[start : start + block.nbytes].view(getattr(torch, block.dtype)).view(shape)
