"""A histogram of any number of values in little memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

MOST_VALUES = 4096
"""Number of different values that are counted exactly."""
_LISTED = 10  # lines of a printed histogram
_BAR = 40


class Histogram:
    """Counts of values: exact as long as there are few different ones, then rounded to a grid that widens as needed.
    `low`, `high` and `mean` are always exact."""

    def __init__(self) -> None:
        self.counts: Counter[float] = Counter()
        self.total = 0
        self.sum = 0.0
        self.low = math.inf
        self.high = -math.inf
        self._grid = 0.0

    def add(self, values: Mapping[float, int]) -> None:
        """Add finite numbers with their counts."""
        if not values:
            return
        self.total += sum(values.values())
        self.sum += sum(value * count for value, count in values.items())
        self.low = min(self.low, *values)
        self.high = max(self.high, *values)
        for value, count in values.items():
            self.counts[self._rounded(value)] += count
        if len(self.counts) > MOST_VALUES:
            self._coarsen()

    @property
    def mean(self) -> float:
        return self.sum / self.total if self.total else math.nan

    def quantile(self, share: float) -> float:
        """Return the smallest value, rounded to the grid, that at least this share of all values does not exceed."""
        left = share * self.total
        for value, count in sorted(self.counts.items()):
            left -= count
            if left <= 0:
                return min(max(value, self.low), self.high)
        return self.high

    def _rounded(self, value: float) -> float:
        if not self._grid or abs(value) >= self._grid * 2**53:  # beyond, floats are further apart than the grid
            return value
        return round(value / self._grid) * self._grid

    def _coarsen(self) -> None:
        self._grid = max(self._grid * 2, 4 * (self.high / MOST_VALUES - self.low / MOST_VALUES))
        counts: Counter[float] = Counter()
        for value, count in self.counts.items():
            counts[self._rounded(value)] += count
        self.counts = counts

    def bins(self) -> list[tuple[str, int]]:
        """Return (label, count) of each value where they are few, else of ten ranges of equal width."""
        if len(self.counts) <= _LISTED and not self._grid:
            return [(f"{value:.4g}", count) for value, count in sorted(self.counts.items())]
        width = (self.high / _LISTED - self.low / _LISTED) or 1.0
        counts = [0] * _LISTED
        for value, count in self.counts.items():
            counts[min(max(int(value / width - self.low / width), 0), _LISTED - 1)] += count
        edges = [self.low + width * number for number in range(_LISTED + 1)]
        return [(f"{edges[number]:.4g} to {edges[number + 1]:.4g}", count) for number, count in enumerate(counts)]

    def lines(self) -> list[str]:
        """Return a line with a bar for each bin."""
        bins = self.bins()
        label = max((len(text) for text, _ in bins), default=0)
        most = max((count for _, count in bins), default=1)
        return [f"{text:>{label}}  {count:>11,}  {'#' * math.ceil(_BAR * count / most)}" for text, count in bins]
