"""Majority votes against all that a reader can count, intervals against simulation, pass@k against the count over all
subsets."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from grpo_mcore.objective import majority_at_k, mean_interval, pass_at_k, pass_numbers

Z = 1.959963984540054


def test_the_answer_of_most_samples_decides() -> None:
    wrong_wins = [("7", False), ("8", True), ("7", False)]
    right_wins = [("8", True), (None, False), (None, False)]
    assert majority_at_k([wrong_wins], 3) == 0.0
    assert majority_at_k([right_wins], 3) == 1.0, "samples without an answer do not vote"
    assert majority_at_k([wrong_wins, right_wins], 3) == 0.5
    assert majority_at_k([wrong_wins], 1) == pytest.approx(1 / 3), "with k = 1 it is the accuracy"


def test_ties_go_to_the_first_and_a_rest_does_not_vote() -> None:
    samples = [("1", True), ("2", False), ("2", False), ("1", True), ("1", True)]
    assert majority_at_k([samples], 2) == 0.5  # 1 before 2, then 2 before 1; the fifth is left over
    assert majority_at_k([samples[:1]], 2) is None
    assert majority_at_k([[(None, True)] * 2], 2) is None, "an environment that names no answers"
    spellings = [("3", False), ("3", False), ("1/2", True), ("0.5", True), (r"\frac{1}{2}", True)]
    assert majority_at_k([spellings], 5) == 1.0, "right answers are one answer"
    assert majority_at_k([[(None, False)] * 2, [("1", True)] * 2], 2) == 0.5


def test_the_interval_of_one_sample_a_prompt_is_wilsons() -> None:
    n, right = 50, 35
    found = mean_interval([[1.0]] * right + [[0.0]] * (n - right))
    assert found is not None
    mean, low, high = found
    p, n = right / n, n - 1  # the unbiased variance p (1 - p) / (n - 1)
    half = Z * ((p * (1 - p) + Z * Z / (4 * n)) / n) ** 0.5
    centre = p + Z * Z / (2 * n)
    assert mean == pytest.approx(0.7)
    assert low == pytest.approx((centre - half) / (1 + Z * Z / n))
    assert high == pytest.approx((centre + half) / (1 + Z * Z / n))


def test_an_interval_of_prompts_that_agree_is_no_point() -> None:
    for score in (0.0, 1.0, 0.5):
        found = mean_interval([[score] * 4] * 20)
        assert found is not None
        mean, low, high = found
        assert mean == score and low <= score <= high and high - low > 0.1
    assert mean_interval([[], []]) is None
    assert mean_interval([[1.0], []]) == mean_interval([[1.0]])


@pytest.mark.parametrize("samples", [1, 8])
def test_about_95_percent_of_the_intervals_hold_the_mean(samples: int) -> None:
    """Prompts differ in difficulty, so samples of one prompt are alike: an interval that took them for independent
    would be far too narrow with 8 samples."""
    draw, held = random.Random(0), 0
    for _ in range(400):
        prompts = [draw.betavariate(0.6, 0.4) for _ in range(60)]
        found = mean_interval([[float(draw.random() < p) for _ in range(samples)] for p in prompts])
        assert found is not None
        held += found[1] <= 0.6 <= found[2]
    assert 0.92 <= held / 400 <= 0.98


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_one(k: int) -> None:
    result = [True, False, False, True, False]
    subsets = list(combinations(result, k))
    assert pass_at_k([result], k) == pytest.approx(sum(map(any, subsets)) / len(subsets), rel=1e-15)


def test_prompts_have_equal_weight_whatever_their_number_of_samples() -> None:
    assert pass_at_k([[True, False, False, False], [True]], 1) == pytest.approx((0.25 + 1) / 2)


def test_prompts_with_too_few_samples_are_left_out() -> None:
    assert pass_at_k([[True, False], [False], []], 2) == 1.0
    assert pass_at_k([[True, False], []], 3) is None
    assert pass_at_k([], 1) is None


def test_many_samples_do_not_overflow() -> None:
    assert pass_at_k([[True] + [False] * 4095], 1024) == pytest.approx(0.25, rel=1e-12)


@pytest.mark.parametrize(("samples", "numbers"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_numbers_k_of_pass_at_k(samples: int, numbers: list[int]) -> None:
    assert pass_numbers(samples) == numbers
