"""The fitting algorithms behind `pack`: put samples into bins of `room` tokens.

Every function takes the sizes (1 <= size <= room) and returns bins of indices, none empty, in O(n log n).
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence

Bins = list[list[int]]


def concatenative(sizes: Sequence[int], room: int, seed: int) -> Bins:
    """Fill bins in order; a sample that does not fit opens the next bin."""
    bins: Bins = []
    left = 0
    for sample, size in enumerate(sizes):
        if size > left:
            bins.append([])
            left = room
        bins[-1].append(sample)
        left -= size
    return bins


def first_fit_decreasing(sizes: Sequence[int], room: int, seed: int) -> Bins:
    """Put each sample, from the longest down, into the first bin with room."""
    return first_fit(decreasing(sizes), sizes, room)


def first_fit_shuffle(sizes: Sequence[int], room: int, seed: int) -> Bins:
    """Put each sample, in an order drawn from the seed, into the first bin with room."""
    order = list(range(len(sizes)))
    random.Random(seed).shuffle(order)
    return first_fit(order, sizes, room)


def modified_first_fit_decreasing(sizes: Sequence[int], room: int, seed: int) -> Bins:
    """Give each sample over half a bin a bin, top these up with smaller samples, and fit the rest by first fit.

    D. S. Johnson, M. R. Garey, "A 71/60 theorem for bin packing", Journal of Complexity 1, 1985.
    """
    order = decreasing(sizes)
    bins: Bins = [[i] for i in order if 2 * sizes[i] > room]
    left = [room - sizes[samples[0]] for samples in bins]
    medium = _Pool([i for i in order if 2 * sizes[i] <= room < 3 * sizes[i]], sizes)
    small = _Pool([i for i in order if 3 * sizes[i] <= room < 6 * sizes[i]], sizes)
    tiny = _Pool([i for i in order if 6 * sizes[i] <= room], sizes)

    def place(position: int, sample: int) -> None:
        bins[position].append(sample)
        left[position] -= sizes[sample]

    for position in range(len(bins)):  # forward: the largest medium sample that fits
        sample = medium.take_largest(left[position])
        if sample is not None:
            place(position, sample)
    for position in reversed(range(len(bins))):  # backward: two small samples where no medium one is
        if len(bins[position]) > 1:
            continue
        pair = small.take_pair(left[position])
        if pair is None:
            break  # bins further to the front have less room
        for sample in pair:
            place(position, sample)
    for position in range(len(bins)):  # forward: the largest of any class, for as long as one fits
        for pool in (medium, small, tiny):
            while (sample := pool.take_largest(left[position])) is not None:
                place(position, sample)
    rest = [sample for pool in (medium, small, tiny) for sample in pool.remaining()]
    return bins + first_fit(rest, sizes, room)


def padded(sizes: Sequence[int], room: int, multiple: int) -> Bins:
    """Fill bins from the longest sample down, as if they were padded: a bin takes its number of samples times the
    longest, rounded up to `multiple`."""
    bins: Bins = []
    padded_length = 0
    for sample in decreasing(sizes):
        if not bins or (len(bins[-1]) + 1) * padded_length > room:
            bins.append([])
            padded_length = -(-sizes[sample] // multiple) * multiple
        bins[-1].append(sample)
    return bins


def decreasing(sizes: Sequence[int]) -> list[int]:
    """Return indices from the longest to the shortest sample, equal ones in order."""
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])


def first_fit(order: Sequence[int], sizes: Sequence[int], room: int) -> Bins:
    """Put each sample, in order, into the first bin with room. A tree holds the greatest room below each node."""
    leaves = 1 << max(len(order) - 1, 0).bit_length()
    tree = [room] * (2 * leaves)
    bins: Bins = []
    for sample in order:
        size = sizes[sample]
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < size:
                node += 1
        position = node - leaves
        if position == len(bins):
            bins.append([])
        bins[position].append(sample)
        tree[node] -= size
        node //= 2
        while node:
            best = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == best:
                break
            tree[node] = best
            node //= 2
    return bins


class _Pool:
    """Samples sorted by size; the largest that fits is taken in nearly constant time."""

    def __init__(self, order: list[int], sizes: Sequence[int]) -> None:
        self._samples = order[::-1]
        self._sizes = [sizes[i] for i in self._samples]
        # _below[p] leads to the last sample left among the first p; it is p itself if that is sample p - 1.
        self._below = list(range(len(self._samples) + 1))
        self._smallest = 0

    def take_largest(self, limit: int) -> int | None:
        """Take the largest sample of at most `limit` tokens; None if there is none."""
        below = self._below
        end = bisect_right(self._sizes, limit)
        while below[end] != end:
            below[end] = below[below[end]]  # halves the path for the next search
            end = below[end]
        return self._take(end - 1) if end else None

    def take_pair(self, limit: int) -> tuple[int, int] | None:
        """Take the smallest sample and the largest that fits beside it; None if not even the two smallest fit."""
        self._smallest = first = self._next(self._smallest)
        second = self._next(first + 1)
        if second >= len(self._samples) or self._sizes[first] + self._sizes[second] > limit:
            return None
        smallest = self._take(first)
        largest = self.take_largest(limit - self._sizes[first])
        assert largest is not None, "the second smallest fits"
        return smallest, largest

    def remaining(self) -> list[int]:
        """Return the samples that are left, from the largest down."""
        return [self._samples[p] for p in reversed(range(len(self._samples))) if self._is_left(p)]

    def _is_left(self, position: int) -> bool:
        return self._below[position + 1] == position + 1

    def _take(self, position: int) -> int:
        self._below[position + 1] = position
        return self._samples[position]

    def _next(self, position: int) -> int:
        while position < len(self._samples) and not self._is_left(position):
            position += 1
        return position


FITTERS: dict[str, Callable[[Sequence[int], int, int], Bins]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}
"""Functions (sizes, room, seed) -> bins, by the recipe's names."""
