"""Bin packing: samples into rows of at most `capacity` tokens, by the recipe's algorithm names."""

import heapq
from collections.abc import Iterable, Sequence

from grpo_mcore.batching.fitting import FITTERS, Bins, decreasing, first_fit, padded

PACKING_ALGORITHMS: tuple[str, ...] = (*FITTERS, "balanced")
PADDED = "padded"
"""Algorithm of `pack` for dynamic batching: samples of similar length share a bin, and each counts as the longest."""


class PackingError(ValueError):
    """The samples cannot be packed with these arguments."""


def pack(
    lengths: Sequence[int], capacity: int, algorithm: str, multiple: int = 1, *, min_bins: int = 1, seed: int = 0
) -> Bins:
    """Return bins of sample indices: every sample exactly once, no bin empty or over its room. Deterministic.

    lengths: tokens of each sample. capacity: tokens of a bin. multiple: rows are padded to a multiple of it, so a bin
    may hold the capacity rounded up to it. min_bins: minimum number of bins. seed: for first_fit_shuffle. "balanced"
    takes as many bins as first-fit decreasing and fills them as evenly as the samples allow. PADDED batches by length:
    each sample counts as the longest of its bin, padded to a multiple of `multiple`. Raises PackingError for an
    unknown algorithm, a sample longer than a bin, a length below 1, or fewer samples than min_bins.
    """
    if algorithm not in (*PACKING_ALGORITHMS, PADDED):
        raise PackingError(f"unknown packing algorithm {algorithm!r}; choose one of: {', '.join(PACKING_ALGORITHMS)}")
    sizes = [int(length) for length in lengths]
    room = bin_room(capacity, multiple)
    check_sizes(sizes, room)
    if not sizes:
        return []
    if len(sizes) < min_bins:
        raise PackingError(f"{len(sizes)} samples cannot fill {min_bins} bins")
    if algorithm == "balanced":
        return _balanced(sizes, room, min_bins)
    bins = padded(sizes, room, multiple) if algorithm == PADDED else FITTERS[algorithm](sizes, room, seed)
    return _split(bins, sizes, min_bins)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def spread(order: Iterable[int], weights: Sequence[float], count: int) -> Bins:
    """Put each sample, in the given order, into the lightest of `count` bins.

    From the heaviest sample down this is LPT, whose heaviest bin is at most 4/3 of the best possible (Graham, 1969).
    """
    bins: Bins = [[] for _ in range(count)]
    heap: list[tuple[float, int]] = [(0.0, position) for position in range(count)]
    for sample in order:
        load, position = heap[0]
        bins[position].append(sample)
        heapq.heapreplace(heap, (load + weights[sample], position))
    return bins


def bin_room(capacity: int, multiple: int) -> int:
    """Return the tokens that a bin may hold: the capacity rounded up, since its row is padded to `multiple` anyway."""
    if capacity < 1 or multiple < 1:
        raise PackingError(f"capacity {capacity} and multiple {multiple} must be at least 1")
    return round_up(capacity, multiple)


def check_sizes(sizes: Sequence[int], room: int) -> None:
    """Raise PackingError, naming its position, for a sample without tokens or with more than `room`."""
    for sample, size in enumerate(sizes):
        if size < 1:
            raise PackingError(f"sample {sample} has {size} tokens; every sample needs at least one")
    too_long = [sample for sample, size in enumerate(sizes) if size > room]
    if too_long:
        sample = too_long[0]
        raise PackingError(
            f"sample {sample} has {sizes[sample]} tokens and a bin holds {room} ({len(too_long)} of "
            f"{len(sizes)} samples are too long): raise policy.sequence_packing.train_mb_tokens (or "
            "logprob_mb_tokens), or lower policy.max_total_sequence_length"
        )


def _balanced(sizes: list[int], room: int, min_bins: int) -> Bins:
    order = decreasing(sizes)
    fitted = first_fit(order, sizes, room)
    even = spread(order, sizes, max(len(fitted), min_bins))
    if all(sum(sizes[i] for i in samples) <= room for samples in even):
        return even
    return _split(fitted, sizes, min_bins)


def _split(bins: Bins, sizes: list[int], count: int) -> Bins:
    """Return at least `count` bins, halving the fullest bin with two samples each time, so that rows stay similar."""
    bins = list(bins)
    if len(bins) >= count:
        return bins
    heap: list[tuple[int, int]] = []

    def push(position: int) -> None:
        if len(bins[position]) > 1:
            heapq.heappush(heap, (-sum(sizes[i] for i in bins[position]), position))

    for position in range(len(bins)):
        push(position)
    while len(bins) < count:
        position = heapq.heappop(heap)[1]
        order = sorted(bins[position], key=lambda i: (-sizes[i], i))
        bins[position], other = spread(order, sizes, 2)
        bins.append(other)
        push(position)
        push(len(bins) - 1)
    return bins
