"""The proof of a refit: each copy of the plan has a checksum, computed at its source and at its destination.

The two are independent: a policy rank checks its own parameter, an engine rank the place that the plan names.
"""

import zlib
from typing import Literal

import torch
from torch import Tensor

from grpo_mcore.refit.plan.parts import Fill, Load, Part
from grpo_mcore.refit.plan.plan import RefitPlan

Verify = Literal["off", "sample", "full"]
SAMPLE_PERIOD = 16
"""Sampling checks one in this many blocks; after as many refits each was checked once."""

SUMMED_WORDS = 1 << 22
"""Words that `word_sum` works on at a time; they bound its memory."""

_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd numbers with about as many ones as zeros, as signed 64-bit integers."""

BlockSums = dict[tuple[int, int], int]
"""(bucket, block of the bucket) -> checksum, at the source."""
Sums = dict[tuple[int, int, int], int]
"""(bucket, block of the bucket, copy of the block) -> checksum, at the destination."""


def is_checked(verify: Verify, version: int, bucket: int, block: int) -> bool:
    """Return whether the copies of a block are checked in the refit to `version`."""
    return verify == "full" or (verify == "sample" and (bucket + block - version) % SAMPLE_PERIOD == 0)


def sum_dtype(part: Part, block: Fill | Load, engine_dtype: str) -> torch.dtype:
    """Return the dtype of the checksums of a block: the engine's, or float32 for a block that always is float32."""
    return getattr(torch, engine_dtype if block.dtype == part.dtype else block.dtype)


def checksum(values: Tensor, dtype: torch.dtype) -> int:
    """Return a checksum of the values in row-major order, converted to `dtype` of the sums: on the host their CRC-32,
    on a GPU the `word_sum`, so that no byte leaves it. Both sides of a refit are on the same kind of device."""
    flat = values.to(dtype).contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy()) if flat.device.type == "cpu" else word_sum(flat)


def word_sum(flat: Tensor) -> int:
    """Return the sum modulo 2^64 of a hash of each eight bytes of `flat` (uint8 [n]) and their place.

    The hash is two rounds of a multiplication and a shift, as SplitMix64 ends. It is one-to-one for each place:
    a change within eight bytes always changes the sum."""
    missing = -len(flat) % 8
    if missing or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, missing)) if missing else flat.clone()
    words, total = flat.view(torch.int64), torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), SUMMED_WORDS):
        part = words[start : start + SUMMED_WORDS]
        mixed = torch.arange(start + 1, start + 1 + len(part), device=flat.device).mul_(_FACTORS[0])
        mixed.bitwise_xor_(part)
        for factor in _FACTORS[1:]:
            mixed.mul_(factor)
            mixed.bitwise_xor_((mixed >> 29).bitwise_and_((1 << 35) - 1))  # int64 shifts copies of the sign in
        total += mixed.sum()
    return int(total.item()) % 2**64


def first_difference(plan: RefitPlan, sent: BlockSums, arrived: dict[str, Sums]) -> str | None:
    """Describe the first copy that did not arrive as sent. `arrived`: checksums by the engine rank's name."""
    for rank, sums in arrived.items():
        for (bucket, number, copy), value in sums.items():
            if sent.get((bucket, number)) != value:
                block = plan.buckets[bucket].blocks[number]
                read = block.reads[copy]
                return (
                    f"{read.param} {_text(read.box)} on {rank} is not what policy rank {block.source} holds in "
                    f"{block.param}: checksum {value:08x}, expected {sent.get((bucket, number), 0):08x}"
                )
    return None


def _text(box: tuple[tuple[int, int], ...]) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
