"""The proof of a refit: each copy of the plan has a checksum, computed at its source and at its destination.

The two are independent: a policy rank checks its own parameter, an engine rank the place that the plan names.
"""

from __future__ import annotations

import zlib
from typing import Literal

import torch
from torch import Tensor

from grpo_mcore.refit.plan import Block, RefitPlan

Verify = Literal["off", "sample", "full"]
SAMPLE_PERIOD = 16
"""Sampling checks one in this many parameters; after as many refits each was checked once."""

Sums = dict[tuple[int, int, int], int]
"""(bucket, block of the bucket, copy of the block) -> checksum."""


def checked_parameters(plan: RefitPlan, verify: Verify, version: int) -> set[str]:
    """Return the engine parameters whose copies are checked in the refit to `version`."""
    if verify == "off":
        return set()
    names = plan.destinations
    return set(names if verify == "full" else names[version % SAMPLE_PERIOD :: SAMPLE_PERIOD])


def sum_dtype(plan: RefitPlan, block: Block, engine_dtype: str) -> torch.dtype:
    """Return the dtype of the checksums of a block: the engine's, or float32 for a block that always is float32."""
    return getattr(torch, engine_dtype if block.dtype == plan.dtype else block.dtype)


def checksum(values: Tensor, dtype: torch.dtype) -> int:
    """Return the CRC-32 of the values in row-major order, converted to `dtype`."""
    flat = values.to(dtype).contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.cpu().numpy())


def first_difference(plan: RefitPlan, sent: Sums, found: dict[str, Sums]) -> str | None:
    """Describe the first copy that did not arrive as sent. `found`: checksums by the engine rank's name."""
    for rank, sums in found.items():
        for key, value in sums.items():
            bucket, block, copy = key
            if sent.get(key) != value:
                source, read = plan.buckets[bucket].blocks[block], plan.buckets[bucket].blocks[block].reads[copy]
                return (
                    f"{read.param} {_text(read.box)} on {rank} is not what policy rank {source.source} holds in "
                    f"{source.param}: checksum {value:08x}, expected {sent.get(key, 0):08x}"
                )
    return None


def _text(box: tuple[tuple[int, int], ...]) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
