"""Which tensor lies where in the refit buffer, bucket by bucket: pure, torch-free, the same on both sides.

The buffer has two halves used in turn, so that one bucket is filled while the engines load the one before it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


class RefitError(RuntimeError):
    """A refit that cannot be planned, or that failed: the message names the tensor or bucket."""


class NamedShape(Protocol):
    """What the plan reads of a tensor: its Hugging Face name and whole shape (`families.HfTensor` is one)."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Slot:
    """One whole Hugging Face tensor in a bucket. `offset` and `nbytes` count bytes from the bucket's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """What is filled, and then loaded, in one go. `nbytes` includes the alignment gaps."""

    slots: tuple[Slot, ...]
    nbytes: int


@dataclass(frozen=True)
class RefitPlan:
    """Every tensor of the model exactly once, in buckets that fit half the buffer.

    `half_bytes`: the largest bucket. Bucket i lies in half i % 2 of the buffer.
    """

    buckets: tuple[Bucket, ...]
    half_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that the transport allocates: one half is enough for one bucket."""
        return self.half_bytes * min(2, len(self.buckets))

    @cached_property
    def slots(self) -> dict[str, tuple[int, Slot]]:
        """Name -> (bucket index, slot)."""
        return {slot.name: (index, slot) for index, bucket in enumerate(self.buckets) for slot in bucket.slots}

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without gaps."""
        return sum(slot.nbytes for bucket in self.buckets for slot in bucket.slots)

    def start(self, index: int) -> int:
        """First byte of bucket `index` in the buffer."""
        return index % 2 * self.half_bytes

    def to_json(self) -> str:
        """Canonical: two equal plans give the same text."""
        buckets = [
            [[slot.name, slot.dtype, list(slot.shape), slot.offset, slot.nbytes] for slot in bucket.slots]
            for bucket in self.buckets
        ]
        plain = {
            "half_bytes": self.half_bytes,
            "sizes": [bucket.nbytes for bucket in self.buckets],
            "buckets": buckets,
        }
        return json.dumps(plain, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RefitPlan:
        found: dict[str, Any] = json.loads(text)
        buckets = [
            tuple(Slot(name, dtype, tuple(shape), at, size) for name, dtype, shape, at, size in slots)
            for slots in found["buckets"]
        ]
        return cls(tuple(map(Bucket, buckets, found["sizes"])), found["half_bytes"])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan: both sides compare it before the first byte moves."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def plan_refit(tensors: Sequence[NamedShape], *, dtype: str, buffer_bytes: int, alignment: int = 512) -> RefitPlan:
    """Pack `tensors` in their order into buckets of at most `buffer_bytes // 2`.

    `dtype`: "bfloat16" or "float32", of the bytes that move; a tensor that says it is `float32` moves as it is.
    Each tensor starts at a multiple of `alignment` bytes. Raises RefitError for a tensor larger than half the buffer, a
    name given twice, or no tensors.
    """
    if not tensors:
        raise RefitError("nothing to refit: the plan was asked for no tensors")
    if dtype not in DTYPE_BYTES:
        raise RefitError(f"refit in {dtype!r} is not possible; use one of {sorted(DTYPE_BYTES)}")
    half = buffer_bytes // 2 // alignment * alignment
    buckets: list[Bucket] = []
    open_slots: list[Slot] = []
    seen: set[str] = set()
    end = 0

    for tensor in tensors:
        if tensor.name in seen:
            raise RefitError(f"refit tensor {tensor.name!r} is given twice")
        seen.add(tensor.name)
        moves_as = "float32" if getattr(tensor, "float32", False) else dtype
        nbytes = math.prod(tensor.shape) * DTYPE_BYTES[moves_as]
        room = math.ceil(nbytes / alignment) * alignment
        if room > half:
            raise RefitError(
                f"refit tensor {tensor.name!r} of {nbytes:,} bytes does not fit half of the refit buffer of "
                f"{buffer_bytes:,} bytes; the smallest policy.refit_buffer_size_gb that holds it is "
                f"{_gib_up(2 * room)} ({2 * room:,} bytes)"
            )
        if end + room > half:
            buckets.append(Bucket(tuple(open_slots), end))
            open_slots, end = [], 0
        open_slots.append(Slot(tensor.name, moves_as, tuple(tensor.shape), end, nbytes))
        end += room
    buckets.append(Bucket(tuple(open_slots), end))
    return RefitPlan(tuple(buckets), max(bucket.nbytes for bucket in buckets))


def _gib_up(nbytes: int) -> float:
    """GiB, rounded up to four decimals, so that the number in the message really is enough."""
    return math.ceil(nbytes / GIB * 10_000) / 10_000
