"""Reward scaling, the penalties on long answers against the paper's formula, and the overlong filter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.objective import overlong_filter, scale_reward_values, shape_rewards


def test_scaled_rewards_are_clamped_and_hit_the_ends() -> None:
    rewards = torch.tensor([-3.0, 0.0, 0.25, 1.0, 7.0, math.nan])
    scaled = scale_reward_values(rewards, target_min=-1.0, target_max=0.1)
    assert scaled.dtype == rewards.dtype
    torch.testing.assert_close(scaled[:5], torch.tensor([-1.0, -1.0, -0.725, 0.1, 0.1]), rtol=0, atol=1e-7)
    assert scaled[4] == torch.tensor(0.1) and scaled[5].isnan()
    with pytest.raises(ValueError, match="source_max"):
        scale_reward_values(rewards, source_min=1.0, source_max=1.0)


def overlong(length: int, longest: int, buffer: int) -> float:
    """Return the reward of DAPO, eq. 13, as written in the paper."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    longest=st.integers(1, 200),
    share=st.floats(0, 1),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_overlong_penalty(lengths: list[int], longest: int, share: float, penalty: float) -> None:
    buffer = max(1, round(share * longest))
    rewards = torch.linspace(-1, 1, len(lengths), dtype=torch.float64)
    shaped = shape_rewards(
        rewards,
        generated_lengths=torch.tensor(lengths),
        truncated=torch.ones(len(lengths), dtype=torch.bool),
        max_response_length=longest,
        overlong_buffer_length=buffer,
        overlong_buffer_penalty=penalty,
    )
    expected = [r + penalty * overlong(n, longest, buffer) for r, n in zip(rewards.tolist(), lengths, strict=True)]
    assert shaped.tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)


def shaped(rewards: list[float], lengths: list[int], truncated: list[bool], **options) -> torch.Tensor:
    limits = {"max_response_length": 100, "overlong_buffer_length": 20} | options
    return shape_rewards(
        torch.tensor(rewards),
        generated_lengths=torch.tensor(lengths),
        truncated=torch.tensor(truncated),
        **limits,
    )


def test_the_penalty_has_a_floor_and_failed_samples_stay_failed() -> None:
    found = shaped([1.0, 1.0, math.nan, 0.0], [90, 100_000, 100, 80], [False, True, True, False])
    assert found.dtype == torch.float32
    assert found[[0, 1, 3]].tolist() == [0.5, 0.0, 0.0] and found[2].isnan()


def test_stop_properly_replaces_the_penalty_on_length() -> None:
    options = {"stop_properly_penalty_coef": 0.25}
    found = shaped([1.0, 1.0, math.nan, 0.5], [100, 100, 100, 10], [True, False, True, True], **options)
    assert found[[0, 1, 3]].tolist() == [0.25, 1.0, 0.125] and found[2].isnan()
    assert shaped([2.0], [500], [True], stop_properly_penalty_coef=0.0).tolist() == [0.0]


def test_limits_that_do_not_fit_are_rejected() -> None:
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="overlong_buffer_length"):
            shaped([1.0], [1], [False], overlong_buffer_length=buffer)
    with pytest.raises(ValueError, match="of one length"):
        shaped([1.0, 2.0], [1], [False])


def test_overlong_filter_masks_truncated_samples() -> None:
    mask = torch.tensor([1.0, 1.0, 0.0])
    assert overlong_filter(mask, torch.tensor([True, False, False])).tolist() == [0.0, 1.0, 0.0]
    assert mask.tolist() == [1.0, 1.0, 0.0]
