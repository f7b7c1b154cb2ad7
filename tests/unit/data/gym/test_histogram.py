from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from grpo_mcore.data.gym.summary import Histogram


def histogram(values: Iterable[float]) -> Histogram:
    made = Histogram()
    for value in values:
        made.add(value)
    return made


def test_few_values_are_counted_one_by_one() -> None:
    made = histogram([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, -2.0, 0.25, 0.9999999999999998])
    assert made.bins() == [("-2", 1), ("0", 3), ("0.25", 1), ("1", 4)]
    assert (made.total, made.low, made.high) == (9, -2.0, 1.0)
    assert made.mean == pytest.approx((4 + 0.25 - 2) / 9)
    assert len(made.lines()) == 4 and made.lines()[3].count("#") == 40


def test_without_values_there_is_nothing_to_show() -> None:
    assert Histogram().lines() == [] and Histogram().total == 0


def test_many_values_are_binned() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(60_000)]
    made = histogram(values)
    assert (made.low, made.high) == pytest.approx((min(values), max(values)), rel=1e-3)
    assert made.mean == pytest.approx(sum(values) / len(values))
    counts = [count for _, count in made.bins()]
    low, width = min(values), (max(values) - min(values)) / 10
    exact = [0] * 10
    for value in values:
        exact[min(int((value - low) / width), 9)] += 1
    assert sum(counts) == len(values)
    assert all(abs(one - other) < 0.01 * len(values) for one, other in zip(counts, exact, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_quantiles(share: float) -> None:
    assert histogram(range(100_001, 100_101)).quantile(share) == 100_000 + max(1, share * 100)


@pytest.mark.parametrize(
    "values", [[1e308, -1e308], [5e-324, 0.0], [1e300 * n for n in range(12)], [1.0 + n * 2e-16 for n in range(15)]]
)
def test_extreme_values(values: list[float]) -> None:
    made = histogram(values)
    assert sum(count for _, count in made.bins()) == len(values) and made.lines()


def test_one_outlier_among_many() -> None:
    made = histogram([*(n / 1000 for n in range(5000)), 1e308])
    assert sum(count for _, count in made.bins()) == made.total == 5001
