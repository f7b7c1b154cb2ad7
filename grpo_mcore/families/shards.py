"""The layers of each pipeline stage, and the parameters of a rank with the padding of Megatron-Core's buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from grpo_mcore.families.spec import FamilyError, ModelShape, Param, Split, local_shape


def stage_layers(layers: int, stages: int, first: int | None = None, last: int | None = None) -> tuple[range, ...]:
    """Return the layers of each pipeline stage. `first`, `last`: number of layers of these stages, for uneven splits.

    Raises FamilyError if the layers do not divide or a stage would have none.
    """
    fixed = {0: first, stages - 1: last}
    given = {stage: count for stage, count in fixed.items() if count is not None and stages > 1}
    others, rest = stages - len(given), layers - sum(given.values())
    if rest < others or (rest % others if others else rest):
        among = f"the other {others} stages" if given else f"{others} stages"
        raise FamilyError(
            f"policy.megatron_cfg.pipeline_model_parallel_size {stages}: {rest} of {layers} layers do not divide over "
            f"{among}; set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
    counts = [given.get(stage, rest // others if others else 0) for stage in range(stages)]
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def chunk_layers(
    layers: int, stages: int, chunks: int, first: int | None = None, last: int | None = None
) -> tuple[tuple[range, ...], ...]:
    """Return the layers of each model chunk of each pipeline stage; a forward pass visits all stages `chunks` times.

    Raises FamilyError as `stage_layers` does, and if a stage's layers do not divide over its chunks.
    """
    counts = [len(found) for found in stage_layers(layers, stages, first, last)]
    if any(count % chunks for count in counts):
        raise FamilyError(
            f"policy.megatron_cfg.virtual_pipeline_model_parallel_size {chunks} does not divide the layers of every "
            f"stage ({', '.join(map(str, sorted(set(counts))))})"
        )
    sizes = [count // chunks for count in counts] * chunks
    ends = list(accumulate(sizes))
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return tuple(tuple(ranges[stage::stages]) for stage in range(stages))


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


def shard_of(params: Sequence[Param], shape: ModelShape, tensor: int, data: int, *, shared_apart: bool) -> Shard:
    """Compute the shard of a stage with these parameters. `shared_apart`: tied embeddings get their own bucket.

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

    for param in reversed(params):
        alone = shared_apart and param.split is Split.VOCAB
        start = _up(start, 64)
        if alone and start > bucket_start:
            start = close(start)
        end = start + math.prod(local_shape(param, shape, tensor))
        spans.append((start, end))
        start = close(end) if alone else end
    if start > bucket_start:
        close(start)
    owned = [0] * data
    for low, high in buckets:
        share = (high - low) // data
        for begin, end in spans:
            if begin >= high or end <= low:
                continue
            for rank in range((begin - low) // share, min(data, (end - 1 - low) // share + 1)):
                owned[rank] += min(end, low + (rank + 1) * share) - max(begin, low + rank * share)
    sizes = [end - begin for begin, end in spans]
    return Shard(sum(sizes), bucket_start, tuple(owned), min(max(sizes, default=0), max(owned)))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
