"""Copies of tensors in host memory that is allocated once; pages are locked if the tensors are on a GPU."""

import faulthandler
import mmap
import os
import resource
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from grpo_mcore.base import host_memory
from grpo_mcore.base.host_memory import HostCopies, lend


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The memory that is locked now. Locking itself needs a GPU: tests/gpu."""
    found: list[Tensor] = []
    monkeypatch.setattr(host_memory, "pin", found.append)
    monkeypatch.setattr(host_memory, "unpin", lambda flat: found.remove(next(t for t in found if t is flat)))
    return found


def some_tensors() -> list[Tensor]:
    return [torch.randn(3, 5).bfloat16(), torch.randn(7), torch.empty(0), torch.tensor(2.5), torch.randn(4, 6)[:, 1:3]]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_copies_come_back_bit_for_bit_through_the_same_memory(on_gpu: bool, pinned: list[Tensor]) -> None:
    tensors = some_tensors()
    room = HostCopies(tensors, pinned=on_gpu)
    addresses = [copy.data_ptr() for copy in room.tensors]
    assert len(pinned) == on_gpu
    for _ in range(2):
        expected = [tensor.clone() for tensor in tensors]
        room.store(tensors)
        for tensor in tensors:
            tensor.zero_()
        room.restore(tensors)
        assert all(torch.equal(now, was) for now, was in zip(tensors, expected, strict=True))
        for tensor in tensors:
            tensor.add_(1)
    assert [copy.data_ptr() for copy in room.tensors] == addresses and len(pinned) == on_gpu
    if on_gpu:
        assert pinned[0].data_ptr() % 4096 == 0, "cudaHostRegister locks whole pages"
        assert pinned[0].numel() == room.nbytes < sum(t.numel() * t.element_size() for t in tensors) + 64 * len(tensors)
    room.close()
    room.close()
    assert not pinned


def test_a_traced_room_may_be_larger_than_the_machine() -> None:
    size = 4 * psutil.virtual_memory().total
    room = HostCopies([torch.empty(size, dtype=torch.uint8, device="meta")], pinned=False, traced=True)
    assert room.nbytes >= size


def test_the_room_fits_tensors_of_the_same_shapes_and_dtypes_only(pinned: list[Tensor]) -> None:
    room = HostCopies(some_tensors(), pinned=True)
    assert room.fit(some_tensors())
    assert not room.fit(some_tensors()[:-1]) and not room.fit([tensor.double() for tensor in some_tensors()])
    del room
    assert not pinned, "the memory is unlocked when nobody uses it"
    HostCopies([], pinned=True).close()
    assert not pinned


def test_a_forked_process_never_shares_the_room(pinned: list[Tensor]) -> None:
    """It has a copy of its own; pinned memory it does not have at all: touching that ends it."""
    for on_gpu in (False, True):
        tensors = some_tensors()
        room = HostCopies(tensors, pinned=on_gpu)
        room.store(tensors)
        if not (child := os.fork()):
            faulthandler.disable()  # the end of this process is expected
            room.tensors[1].fill_(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) == on_gpu
        assert torch.equal(room.tensors[1], tensors[1]), "what the child wrote is not seen here"
        room.close()


def test_a_failure_of_the_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        cudaHostRegister = staticmethod(lambda address, nbytes, flags: 1)
        cudaHostUnregister = staticmethod(lambda address: 0)

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: (_ for _ in ()).throw(RuntimeError(str(status))))
    with pytest.raises(RuntimeError, match="1"):
        host_memory.pin(torch.zeros(4))


def test_lent_memory_is_the_machines_until_it_is_written_again() -> None:
    def of_the_machine() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("LazyFree"))

    def lent_and_kept() -> bool:
        """Return whether all pages are lent, and none has been taken when they are written again."""
        tensor, before = torch.ones(1 << 20), of_the_machine()
        assert lend(tensor)
        lent = of_the_machine() - before >= tensor.nbytes - 2 * mmap.PAGESIZE
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        tensor.numpy().fill(2)
        return lent and resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults < 100

    assert any(lent_and_kept() for _ in range(20)), "the machine may take them at any time, but not every time"
    assert lend(torch.ones(3)), "less than a page"
    shared = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.uint8)
    assert not lend(shared)
