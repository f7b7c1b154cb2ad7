from __future__ import annotations

import random

import pytest

from grpo_mcore.data.gym.histogram import MOST_VALUES, Histogram


def test_few_values_are_counted_exactly() -> None:
    histogram = Histogram()
    histogram.add({1.0: 2, 0.0: 3})
    histogram.add({1.0: 1, -2.0: 1, 0.9999999999999998: 1})
    assert histogram.bins() == [("-2", 1), ("0", 3), ("1", 1), ("1", 3)]
    assert (histogram.total, histogram.low, histogram.high) == (8, -2.0, 1.0)
    assert histogram.mean == pytest.approx((3 + 0.9999999999999998 - 2) / 8)
    assert len(histogram.lines()) == 4 and histogram.lines()[1].count("#") == 40


def test_nothing() -> None:
    histogram = Histogram()
    histogram.add({})
    assert histogram.lines() == [] and histogram.total == 0


def test_many_values_are_binned_and_take_bounded_memory() -> None:
    histogram, rng = Histogram(), random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(60_000)]
    for start in range(0, len(values), 1000):
        histogram.add({value: 1 for value in values[start : start + 1000]})
        assert len(histogram.counts) <= MOST_VALUES + 1000
    assert (histogram.low, histogram.high) == (min(values), max(values))
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    counts = [count for _, count in histogram.bins()]
    low, width = min(values), (max(values) - min(values)) / 10
    exact = [0] * 10
    for value in values:
        exact[min(int((value - low) / width), 9)] += 1
    assert sum(counts) == len(values)
    assert all(abs(one - other) < 0.01 * len(values) for one, other in zip(counts, exact, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_quantiles(share: float) -> None:
    histogram = Histogram()
    values = list(range(1, 101))
    histogram.add({float(value): 1 for value in values})
    assert histogram.quantile(share) == max(1, share * 100)


@pytest.mark.parametrize(
    "values", [[1e308, -1e308], [5e-324, 0.0], [1e300 * n for n in range(12)], [1.0 + n * 2e-16 for n in range(15)]]
)
def test_extreme_values(values: list[float]) -> None:
    histogram = Histogram()
    histogram.add({value: 1 for value in values})
    assert sum(count for _, count in histogram.bins()) == len(set(values)) and histogram.lines()


def test_one_outlier_among_many() -> None:
    histogram = Histogram()
    histogram.add({n / 1000: 1 for n in range(5000)})
    histogram.add({1e308: 1})
    histogram.add({n / 1000: 1 for n in range(5000)})
    assert sum(count for _, count in histogram.bins()) == histogram.total == 10001
