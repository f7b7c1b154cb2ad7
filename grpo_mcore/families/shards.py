"""The parameters of a rank with the padding of Megatron-Core's buffers."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Sizes of one rank's parameters as Megatron-Core's distributed optimizer lays them out.

    `numel`: elements without padding. `buffer`: elements of the weight and gradient buffers, with padding. `owned`:
    elements whose optimizer state each data-parallel rank of the stage keeps. `largest`: of them, the elements of one
    parameter at most.
    """

    numel: int
    buffer: int
    owned: tuple[int, ...]
    largest: int

    @property
    def most_owned(self) -> int:
        return max(self.owned)


def shard_of(sizes: Sequence[int], data: int, apart: Collection[int] = ()) -> Shard:
    """Compute the shard of a stage whose parameters have these numbers of elements. `apart`: indices of those that get
    their own bucket.

    Megatron-Core goes through the parameters backwards, starts each at a multiple of 64 elements and ends a bucket at
    a common multiple of 128 and the data-parallel size. Every data-parallel rank owns an equal part of each bucket.
    """
    bucket_multiple = math.lcm(data, 128)
    spans: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    start = bucket_start = 0

    def close(end: int) -> int:
        nonlocal bucket_start
        end = _up(end, bucket_multiple)
        buckets.append((bucket_start, end))
        bucket_start = end
        return end

    for index in reversed(range(len(sizes))):
        start = _up(start, 64)
        if index in apart and start > bucket_start:
            start = close(start)
        end = start + sizes[index]
        spans.append((start, end))
        start = close(end) if index in apart else end
    if start > bucket_start:
        close(start)
    owned = [0] * data
    for low, high in buckets:
        share = (high - low) // data
        for begin, end in spans:
            if begin >= high or end <= low:
                continue
            first, last = (begin - low) // share, (end - 1 - low) // share
            if first == last:  # most parameters lie on one rank; a search comes here a million times
                owned[first] += end - begin
                continue
            for rank in range(first, min(data, last + 1)):
                owned[rank] += min(end, low + (rank + 1) * share) - max(begin, low + rank * share)
    return Shard(sum(sizes), bucket_start, tuple(owned), min(max(sizes, default=0), max(owned)))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
