"""Host memory that a GPU copies from and to at the full speed of its link, and copies of tensors kept in it."""

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap names since 3.13
_LIBC = ctypes.CDLL(None)
_ALIGNMENT = 64  # bytes; a multiple of every element size


def pin(flat: Tensor) -> None:
    """Lock the pages of host tensor `flat`, so that the GPU accesses them without a detour. It must start at a page.

    Locking takes about as long as writing the memory once: keep what is locked. `unpin` before the memory is freed.
    (torch's own pinned allocator rounds up to a power of two, and cannot lock memory shared with other processes.)
    """
    _check(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel() * flat.element_size(), 0))


def unpin(flat: Tensor) -> None:
    """Undo `pin`."""
    _check(torch.cuda.cudart().cudaHostUnregister(flat.data_ptr()))


def lend(tensor: Tensor) -> bool:
    """Let the machine take the memory of a host tensor, and with it the values, when it runs short of memory. Return
    whether it can: not memory of a file or one that processes share.

    Until then a write there is as fast as ever, where every page of fresh memory first costs a fault.
    """
    first, last = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    start, nbytes = first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE
    return nbytes <= 0 or not _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_FREE)


def _check(status: int) -> None:
    torch.cuda.check_error(int(status))


class HostCopies:
    """Room on the host for copies of some tensors, allocated once and used again for every copy of the same tensors.

    A forked process does not have the room if it is pinned: after a fork the first write to a page would move it away
    from where the GPU writes.
    """

    def __init__(self, tensors: Sequence[Tensor], *, pinned: bool, traced: bool = False) -> None:
        """Reserve room for tensors of these shapes and dtypes. `pinned`: they are on a GPU. `traced`: nothing will be
        written, so the machine need not have so much."""
        self._signature = _signature(tensors)
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.nbytes, self._pinned = end, pinned and end > 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NO_RESERVE if traced else 0)
        pages = mmap.mmap(-1, max(1, end), flags=flags)
        self._flat = torch.frombuffer(pages, dtype=torch.uint8)
        if self._pinned:
            pages.madvise(mmap.MADV_DONTFORK)
            pin(self._flat)
        self.tensors = [
            self._flat[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        """The copies, views of one block of memory."""

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the shapes and dtypes that the room was made for."""
        return self._signature == _signature(tensors)

    @torch.no_grad()
    def store(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of `tensors` here."""
        for copy, tensor in zip(self.tensors, tensors, strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Give `tensors` the values of the copies."""
        for copy, tensor in zip(self.tensors, tensors, strict=True):
            tensor.copy_(copy)

    def close(self) -> None:
        """Unlock the memory; it is freed with the last tensor that views it. Idempotent."""
        if self._pinned:
            self._pinned = False
            unpin(self._flat)

    def __del__(self) -> None:
        if getattr(self, "_pinned", False):
            self.close()


def _signature(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]
