"""Reward scaling, the penalties on long answers against the paper's formula, the overlong filter, and group-relative
advantages against statistics.fmean and statistics.stdev, one group at a time."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.objective import (
    clip_advantages,
    group_index,
    group_stats,
    grpo_advantages,
    overlong_filter,
    scale_reward_values,
    shape_rewards,
)


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


def expected_advantage(
    rewards: list[float], ids: list[int], valid: list[bool], i: int, normalize: bool, leave_one_out: bool
) -> float:
    group = [j for j in range(len(rewards)) if ids[j] == ids[i] and valid[j]]
    values = [rewards[j] for j in group]
    if not valid[i] or len(group) < 2 or len(set(values)) == 1:
        return 0.0
    others = [rewards[j] for j in group if j != i] if leave_one_out else values
    advantage = rewards[i] - statistics.fmean(others)
    return advantage / (statistics.stdev(values) + 1e-6) if normalize else advantage


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(-4, 4).map(lambda x: x / 4), st.booleans()),
        min_size=1,
        max_size=16,
    ),
    normalize=st.booleans(),
    leave_one_out=st.booleans(),
)
def test_advantages_are_the_formula(rows, normalize: bool, leave_one_out: bool) -> None:
    ids, rewards, valid = (list(column) for column in zip(*rows, strict=True))
    given_rewards = torch.tensor([r if ok else math.nan for r, ok in zip(rewards, valid, strict=True)])
    result = grpo_advantages(
        given_rewards,
        torch.tensor(ids),
        torch.tensor(valid),
        normalize=normalize,
        leave_one_out=leave_one_out,
    )
    for i in range(len(rows)):
        expected = expected_advantage(rewards, ids, valid, i, normalize, leave_one_out)
        assert float(result.advantages[i]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("rewards", [[1.5e-8, 7e-9, 1.5e-8, 0.0], [0.35, 0.35 + 1e-8, 0.35, 0.35]])
def test_rewards_that_differ_by_rounding_are_equal_around_zero_too(rewards: list[float]) -> None:
    found = grpo_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), eps=0.0)
    assert found.advantages.tolist() == [0.0] * 4
    small_but_real = grpo_advantages(torch.tensor([0.350, 0.351]), torch.zeros(2, dtype=torch.int64))
    assert float(small_but_real.advantages.abs().min()) > 1


def test_group_stats_by_id() -> None:
    stats = group_stats(torch.tensor([1.0, 5.0, 3.0, 5.0, 9.0]), torch.tensor([40, 7, 40, 7, 7]))
    assert stats.index.tolist() == [1, 0, 1, 0, 0]  # ids in order
    assert stats.size.tolist() == [3, 2]
    torch.testing.assert_close(stats.mean, torch.tensor([19 / 3, 2.0], dtype=torch.float64))
    torch.testing.assert_close(
        stats.std, torch.tensor([[5, 5, 9], [1, 3, 2]]).double().std(1) * torch.tensor([1, 2**0.5])
    )
    assert stats.informative.tolist() == [True, True]


def test_group_of_one_and_failed_groups() -> None:
    rewards = torch.tensor([3.0, math.nan, 1.0, math.nan])
    valid = torch.tensor([True, False, True, False])
    result = grpo_advantages(rewards, torch.tensor([0, 1, 2, 2]), valid)
    assert result.advantages.tolist() == [0.0] * 4
    assert result.groups.size.tolist() == [1, 0, 1]
    assert not result.groups.informative.any()


def test_bad_rewards_are_named() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\[1\]"):
        grpo_advantages(torch.tensor([1.0, math.inf, 0.0]), ids)
    with pytest.raises(ValueError, match="one length"):
        grpo_advantages(torch.tensor([1.0]), ids)


def test_group_index_and_clipping() -> None:
    assert group_index(["b", "a", "b", ("a", 1)]).tolist() == [0, 1, 0, 2]
    advantages = torch.tensor([-3.0, 0.5, 3.0])
    assert clip_advantages(advantages, -1.0, None).tolist() == [-1.0, 0.5, 3.0]
    assert clip_advantages(advantages, None, 2.0).tolist() == [-3.0, 0.5, 2.0]
    assert clip_advantages(advantages) is advantages
    with pytest.raises(ValueError, match="advantage_clip_low"):
        clip_advantages(advantages, 1.0, -1.0)


@pytest.mark.parametrize(
    "rewards", [[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.5, 0.25], [0.3, 0.3, 0.3, 0.3], [1.0, 0.0], [0.95, 0.95, 0.95, 0.1]]
)
def test_the_deviation_of_the_others_is_that_of_each_samples_others(rewards: list[float]) -> None:
    """A lone winner, whose others are equal, is not divided; nor is a group of two."""
    failed = [*rewards, math.nan]
    ids, valid = torch.zeros(len(failed), dtype=torch.int64), torch.tensor([True] * len(rewards) + [False])
    estimate = grpo_advantages(torch.tensor(failed, dtype=torch.float64), ids, valid, std_of_others=True)
    for position, reward in enumerate(rewards):
        others = rewards[:position] + rewards[position + 1 :]
        std = statistics.stdev(others) if len(others) > 1 else 0.0
        difference = reward - statistics.fmean(others) if len(set(rewards)) > 1 else 0.0
        expected = difference / (std + 1e-6) if std > 1e-9 else difference
        assert estimate.advantages[position].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    whole = grpo_advantages(torch.tensor(failed), ids, valid, leave_one_out=False)
    same = grpo_advantages(torch.tensor(failed), ids, valid, leave_one_out=False, std_of_others=True)
    assert torch.equal(whole.advantages, same.advantages)
