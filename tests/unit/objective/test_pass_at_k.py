"""pass@k against the count over all subsets."""

from __future__ import annotations

from itertools import combinations

import pytest

from grpo_mcore.objective import pass_at_k, pass_numbers


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
