"""What a refit does on GPUs, on CPU tensors: its checksum, pinned shared memory, slices, and IPC within one process."""

import uuid
from typing import Any

import pytest
import torch

from grpo_mcore.refit.plan import proof
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.plan.proof import word_sum
from grpo_mcore.refit.transport import buffer as buffers
from grpo_mcore.refit.transport import cuda_ipc, shared_memory
from grpo_mcore.refit.transport.cuda_ipc import CudaIpcBuffer

GPU = torch.device("cuda", 0)
FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def expected_sum(data: bytes) -> int:
    """The same by Python's integers."""
    data, total = data + bytes(-len(data) % 8), 0
    for place in range(len(data) // 8):
        word = int.from_bytes(data[8 * place : 8 * place + 8], "little") ^ ((place + 1) * FACTORS[0] % 2**64)
        for factor in FACTORS[1:]:
            word = word * factor % 2**64
            word ^= word >> 29
        total += word
    return total % 2**64


@pytest.mark.parametrize("size", [0, 1, 8, 100, 1000])
def test_the_sum_on_a_gpu_is_that_of_its_formula(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SUMMED_WORDS", 7)
    data = torch.randint(0, 256, (size + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))[3:]
    assert word_sum(data) == expected_sum(data.numpy().tobytes())


def test_the_sum_sees_every_bit_and_every_exchange() -> None:
    data = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    found = {word_sum(data)}
    for place in range(64):
        for bit in range(8):
            changed = data.clone()
            changed[place] ^= 1 << bit
            found.add(word_sum(changed))
    found.add(word_sum(data.view(torch.int64).flip(0).view(torch.uint8)))  # words exchanged
    found.add(word_sum(data ^ 0x80))  # many sign bits at once
    assert len(found) == 1 + 64 * 8 + 2


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_shared_memory_is_pinned_for_weights_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    waited: list[int] = []
    monkeypatch.setattr(shared_memory, "pin", lambda flat: pinned.append(flat.data_ptr()))
    monkeypatch.setattr(shared_memory, "unpin", lambda flat: pinned.remove(flat.data_ptr()))

    class Stream:
        def synchronize(self) -> None:
            waited.append(len(pinned))

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    on_gpu = kind == "cuda"
    created = buffers.create_buffer(8192, torch.device(kind), f"test.{uuid.uuid4().hex[:8]}", through_host=True)
    attached = buffers.attach_buffer(created.description, torch.device(kind))
    assert created.description["kind"] == "shared_memory"
    assert pinned == [created.flat.data_ptr(), attached.flat.data_ptr()] * on_gpu
    created.flat[5] = 9
    created.synchronize()
    assert attached.flat[5] == 9 and waited == [2] * on_gpu
    attached.close()
    created.close()
    created.close()
    assert not pinned


class Process:
    """The CUDA calls of `cuda_ipc`, with CPU tensors. `opened`: the arguments with which handles were opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: list[str]) -> None:
        self.opened: list[tuple[Any, ...]] = []
        monkeypatch.setattr(cuda_ipc, "reduce_tensor", lambda flat: (None, tuple(range(9))))
        monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", self._open)
        monkeypatch.setattr(cuda_ipc, "_uuid", lambda index: gpus[index or 0])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)

    def _open(self, *arguments: Any) -> torch.Tensor:
        self.opened.append(arguments)
        return torch.zeros(16, dtype=torch.uint8)


def test_an_ipc_buffer_of_the_same_process_is_not_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """cluster.backend: local has policy and engine in one process, and CUDA opens no handle where it was exported."""
    process = Process(monkeypatch, ["GPU-a"])
    created = CudaIpcBuffer.create(16, torch.device("cpu"))
    assert buffers.attach_buffer(created.description, GPU).flat is created.flat and not process.opened
    description = created.description
    created.close()
    del created
    assert description["id"] not in CudaIpcBuffer._created


def test_an_ipc_buffer_of_another_process_is_opened_on_the_gpu_of_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ["GPU-a", "GPU-b"])
    description = CudaIpcBuffer.create(16, torch.device("cpu")).description | {"id": "another", "gpu": "GPU-b"}
    buffers.attach_buffer(description, GPU)
    assert process.opened == [(0, 1, 2, 3, 4, 5, 1, 7, 8)], "the device's index here, whatever it is there"
    with pytest.raises(RefitError, match=r"is on GPU GPU-c of .*\(it sees \['GPU-a', 'GPU-b'\]\)"):
        buffers.attach_buffer(description | {"gpu": "GPU-c"}, GPU)
