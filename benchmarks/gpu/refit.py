"""A refit between two processes on one device: the sender of the policy, and a reader in place of an engine.

Bytes go through the refit buffer bucket by bucket, the next being filled while one is read. On a GPU by CUDA IPC,
through pinned shared memory (as with several ranks), and through pageable shared memory for comparison.
"""

from __future__ import annotations

import multiprocessing
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kit import Row, Setting, number
from grpo_mcore.families import params_of, shape_of
from grpo_mcore.families.known import known_config
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.parts import parts_of
from grpo_mcore.refit.plan.plan import RefitPlan, plan_refit
from grpo_mcore.refit.plan.proof import checksum, first_difference
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.transport.board import Seat
from grpo_mcore.refit.transport.buffer import attach_buffer, block_view
from grpo_mcore.refit.transport.shared_memory import SharedMemoryBuffer


class Weights:
    """Random parameters of the shapes that a plan reads."""

    def __init__(self, plan: RefitPlan, device: torch.device) -> None:
        ends: dict[str, list[int]] = {}
        for block in plan.blocks():
            known = ends.setdefault(block.param, [0] * len(block.box))
            ends[block.param] = [max(end, stop) for end, (_, stop) in zip(known, block.box, strict=True)]
        generator, kind = torch.Generator(device).manual_seed(4), getattr(torch, plan.dtype)
        self._values = {
            name: torch.randn(shape, device=device, generator=generator).to(kind) for name, shape in ends.items()
        }

    def parameters(self) -> dict[str, Tensor]:
        return self._values


def send(pipe: Any, plan: RefitPlan, device: torch.device, through_host: bool, pinned: bool) -> None:
    """The process of a policy rank: fill the buckets that it is asked for. None ends it."""
    if not pinned:
        SharedMemoryBuffer.pin = lambda self: None  # type: ignore[method-assign]
    sender = RefitSender(Weights(plan, device), 0, uuid.uuid4().hex[:8], through_host=through_host)
    part = parts_of(plan, 1, (), (), ()).senders[0]
    pipe.send(sender.open_refit(part, Seat(1, 0, 1, 1, 600.0))["transport"]["buffer"])
    while (asked := pipe.recv()) is not None:
        pipe.send(sender.fill_bucket(*asked))
    sender.close_refit()


def run(setting: Setting) -> Iterator[Row]:
    """Yield the rows of this part."""
    config = dict(known_config("Qwen/Qwen2.5-1.5B") or {})
    if setting.tiny:
        config |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 131}
        config |= {"num_attention_heads": 4}
    shape = shape_of(config)
    plan = plan_refit(
        params_of(shape), shape, PolicyLayout(), EngineLayout(2), dtype="bfloat16",
        buffer_bytes=2**16 if setting.tiny else 2**30,
    )  # fmt: skip
    ways = [("shared memory", True, True)]
    if setting.platform.on_gpu:
        ways = [("CUDA IPC", False, True), ("pinned memory", True, True), ("pageable memory", True, False)]
    for name, through_host, pinned in ways:
        seconds, difference = one_way(plan, setting, through_host, pinned)
        expected = f"{plan.block_bytes / 1e9:.3g} GB in {len(plan.buckets)} buckets"
        yield Row("refit", name, number(plan.block_bytes / seconds / 1e9, "GB/s"), expected)
        yield Row("refit", f"{name}: checksums", "agree" if difference is None else difference, "", difference is None)
    size = 2**20 if setting.tiny else 2**30
    source = torch.empty(size, dtype=torch.uint8, device=setting.torch_device)
    target = torch.empty_like(source)
    copy = setting.seconds(lambda: target.copy_(source))
    yield Row("refit", "the device's own copy", number(size / copy / 1e9, "GB/s"), "bytes copied, not read + written")
    summed = setting.seconds(lambda: checksum(source, torch.uint8))
    yield Row("refit", "checksum", number(size / summed / 1e9, "GB/s"))


def one_way(plan: RefitPlan, setting: Setting, through_host: bool, pinned: bool) -> tuple[float, str | None]:
    """Return (seconds of a refit without checksums, the first difference in one with all of them)."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    arguments = (other, plan, setting.torch_device, through_host, pinned)
    process = context.Process(target=send, args=arguments, daemon=True)
    process.start()
    other.close()
    before = SharedMemoryBuffer.pin
    if not pinned:
        SharedMemoryBuffer.pin = lambda self: None  # type: ignore[method-assign]
    buffer = attach_buffer(pipe.recv(), setting.torch_device)
    SharedMemoryBuffer.pin = before  # type: ignore[method-assign]
    try:
        _, sent, found = transfer(plan, pipe, buffer, setting, verify=True)
        difference = first_difference(plan, sent, {"the reader": found}) if sent else "no checksums"
        return min(transfer(plan, pipe, buffer, setting, verify=False)[0] for _ in range(2)), difference
    finally:
        pipe.send(None)
        process.join(60)
        buffer.close()


def transfer(
    plan: RefitPlan, pipe: Any, buffer: Any, setting: Setting, *, verify: bool
) -> tuple[float, dict[Any, int], dict[Any, int]]:
    """Move all buckets as `refit.refit` does. Return (seconds, checksums sent, checksums found)."""
    sent: dict[Any, int] = {}
    found: dict[Any, int] = {}
    kind, level = getattr(torch, plan.dtype), "full" if verify else "off"
    targets: dict[tuple[int, str], Tensor] = {}
    for block in plan.blocks():
        for read in block.reads:
            ends = [stop for _, stop in read.box]
            known = targets.get((read.rank, read.param))
            shape = list(map(max, ends, known.shape)) if known is not None else ends
            targets[read.rank, read.param] = torch.empty(shape, dtype=kind, device="meta")
    targets = {key: torch.empty(t.shape, dtype=kind, device=setting.torch_device) for key, t in targets.items()}
    setting.synchronize()
    began = time.perf_counter()
    pipe.send((0, level, 1, plan.dtype))
    for index, bucket in enumerate(plan.buckets):
        sent |= pipe.recv()["sums"]
        if index + 1 < len(plan.buckets):
            pipe.send((index + 1, level, 1, plan.dtype))
        for at, block in enumerate(bucket.blocks):
            view = block_view(buffer, plan, index, block)
            for copy, read in enumerate(block.reads):
                place = targets[read.rank, read.param][tuple(slice(*span) for span in read.box)]
                place.copy_(view.view(place.shape))
                if verify:
                    found[index, at, copy] = checksum(place, kind)
        buffer.synchronize()
    setting.synchronize()
    return time.perf_counter() - began, sent, found
