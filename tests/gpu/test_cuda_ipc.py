"""The refit buffer in GPU memory, between two processes on one GPU."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from typing import Any

import torch

from grpo_mcore.families import HfTensor, Param, Split, Stage
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.plan import plan_refit
from grpo_mcore.refit.transport.buffer import attach_buffer, block_view, create_buffer
from tests.unit.refit.whole_split import make_shape

TENSOR_MIB, BUCKET_TENSORS, TENSORS = 128, 4, 64  # 8 GiB in all, through a buffer of 1 GiB
ROWS, COLUMNS = 2**10, TENSOR_MIB * 2**20 // 2 // 2**10


def values(number: int) -> torch.Tensor:
    """bfloat16 [ROWS, COLUMNS] on the GPU: every bit pattern, the same in every process."""
    pattern = torch.arange(number, ROWS * COLUMNS + number, device="cuda", dtype=torch.int32)
    return (pattern & 0xFFFF).to(torch.int16).view(torch.bfloat16).view(ROWS, COLUMNS)


def owner(pipe: Any, plan: Any) -> None:
    buffer = create_buffer(plan.buffer_bytes, torch.device("cuda", 0), "test")
    pipe.send(buffer.description)
    seconds = 0.0
    for index, bucket in enumerate(plan.buckets):
        for block in bucket.blocks:
            source = values(int(block.param))[tuple(slice(*span) for span in block.box)]
            torch.cuda.synchronize()
            began = time.perf_counter()
            block_view(buffer, plan, index, block).copy_(source)
            buffer.synchronize()
            seconds += time.perf_counter() - began
        pipe.send(index)
        assert pipe.recv() == index  # the reader is done with it
    pipe.send(seconds)
    pipe.recv()
    buffer.close()


def test_another_process_reads_every_bit() -> None:
    params = [
        Param(str(number), (HfTensor(str(number), (ROWS, COLUMNS)),), Split.ROWS, Stage.FIRST, engine=str(number))
        for number in range(TENSORS)
    ]
    plan = plan_refit(
        params, make_shape(), PolicyLayout(), EngineLayout(2), dtype="bfloat16",
        buffer_bytes=2 * BUCKET_TENSORS * TENSOR_MIB * 2**20,
    )  # fmt: skip
    assert plan.block_bytes == 8 * 2**30 and len(plan.buckets) == TENSORS // BUCKET_TENSORS
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=owner, args=(other_end, plan))
    process.start()
    other_end.close()
    buffer = attach_buffer(pipe.recv())
    seconds, seen = 0.0, Counter[tuple[int, str]]()
    for index, bucket in enumerate(plan.buckets):
        assert pipe.recv() == index
        for block in bucket.blocks:
            halves = values(int(block.param)).view(torch.int16).chunk(2)
            for read in block.reads:  # half of the rows for each of two engine ranks
                target = torch.zeros(ROWS // 2, COLUMNS, dtype=torch.bfloat16, device="cuda")
                torch.cuda.synchronize()
                began = time.perf_counter()
                view = block_view(buffer, plan, index, block)
                place = tuple(slice(*span) for span in read.box)
                target[place].copy_(view)
                torch.cuda.synchronize()
                seconds += time.perf_counter() - began
                assert torch.equal(target[place].view(torch.int16), halves[read.rank][place]), block.param
                seen[read.rank, read.param] += view.numel()
        pipe.send(index)
    written = pipe.recv()
    assert seen == {(rank, str(number)): ROWS // 2 * COLUMNS for rank in range(2) for number in range(TENSORS)}
    buffer.close()
    pipe.send("done")
    process.join(30)
    assert process.exitcode == 0
    print(f"\nown memory to buffer {gb_per_s(written):.0f} GB/s, buffer to own memory {gb_per_s(seconds):.0f} GB/s, ")
    print(f"the device itself {device_copy_gb_per_s():.0f} GB/s")


def gb_per_s(seconds: float) -> float:
    return 8 * 2**30 / seconds / 1e9


def device_copy_gb_per_s() -> float:
    source = torch.empty(TENSOR_MIB * 2**20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = 0.0
    for _ in range(TENSORS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds += time.perf_counter() - began
    return gb_per_s(seconds)
