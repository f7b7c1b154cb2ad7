"""Each estimator against its paper's formula, sample by sample (REINFORCE++: token by token) in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mcore.objective import AdvantageEstimate, SampleKL, estimate_advantages, group_stats

EIGHTHS = st.integers(-16, 16).map(lambda x: x / 8)
SAMPLES = st.lists(
    st.tuples(st.integers(0, 3), EIGHTHS, EIGHTHS, st.booleans(), st.lists(EIGHTHS, max_size=5)),
    min_size=1,
    max_size=14,
)
"""Group, reward, another reward, valid, KL of each trained token."""


def mean(values: list) -> Fraction:
    return sum(map(Fraction, values), Fraction(0)) / len(values)


def std(values: list, correction: int) -> float:
    centre = mean(values)
    return math.sqrt(sum((Fraction(v) - centre) ** 2 for v in values) / (len(values) - correction))


def sample_kl(kls: list[list[float]]) -> SampleKL:
    """Return the statistics of the KL of each token, in exact arithmetic."""
    rows = []
    for kl in kls:
        to_go = [sum(map(Fraction, kl[t:])) for t in range(len(kl))]
        centre = mean(to_go) if kl else 0
        rows.append([sum(map(Fraction, kl)), sum(to_go), sum((g - centre) ** 2 for g in to_go)])
    columns = [[float(x) for x in column] for column in zip(*rows, strict=True)]
    return SampleKL(*(torch.tensor(column, dtype=torch.float64) for column in columns))


def columns(rows: list) -> tuple[Tensor, Tensor, Tensor, Tensor, list[list[float]]]:
    """Return ids, rewards and other rewards (NaN for failed samples), valid, KL by token."""
    ids, first, second, valid, kls = (list(column) for column in zip(*rows, strict=True))
    ok = torch.tensor(valid)
    rewards = [torch.where(ok, torch.tensor(r, dtype=torch.float64), math.nan) for r in (first, second)]
    return torch.tensor(ids), *rewards, ok, kls


def others(rows: list, i: int, itself: bool) -> list[int]:
    return [j for j, row in enumerate(rows) if row[0] == rows[i][0] and row[3] and (itself or j != i)]


@settings(deadline=None, max_examples=60)
@given(rows=SAMPLES, name=st.sampled_from(["grpo", "dr_grpo", "rloo"]), beta=st.sampled_from([0.0, 0.25]))
def test_group_baselines_with_the_kl_in_the_reward(rows: list, name: str, beta: float) -> None:
    ids, rewards, _, valid, kls = columns(rows)
    kl = sample_kl(kls) if beta else None
    found = estimate_advantages(name, rewards, ids, valid, leave_one_out=False, kl=kl, kl_penalty=beta)
    assert found.kl_weight == 0
    r = [Fraction(row[1]) - Fraction(beta) * sum(map(Fraction, row[4])) for row in rows]
    for i, row in enumerate(rows):
        members = others(rows, i, itself=name != "rloo")
        expected = 0.0
        if row[3] and members:
            expected = float(r[i] - mean([r[j] for j in members]))
            spread = std([r[j] for j in members], 1) if len(members) > 1 else 0
            if name == "grpo" and spread:
                expected /= spread + 1e-6
        assert found.advantages[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def reference_reinforce_plus_plus(rows: list, minus_baseline: bool, beta: float) -> list[list[float]]:
    """Return the advantage of every token of every valid sample: eq. 8 to 10 of the paper, token by token."""
    tokens = []
    for i, (_, reward, _, valid, kl) in enumerate(rows):
        r = Fraction(reward)
        if minus_baseline and valid:
            r -= mean([rows[j][1] for j in others(rows, i, itself=True)])
        steps = range(len(kl)) if valid else ()
        tokens.append([r - Fraction(beta) * sum(map(Fraction, kl[t:])) for t in steps])
    flat = [x for row in tokens for x in row]
    if not flat or len(set(flat)) == 1:
        return [[0.0] * len(row) for row in tokens]
    scale = std(flat, 0) + 1e-6
    return [[float(x - mean(flat)) / scale for x in row] for row in tokens]


def by_token(found: AdvantageEstimate, kls: list[list[float]]) -> list[list[float]]:
    """Return the advantage that each token trains with."""
    return [
        [found.advantages[i].item() - found.kl_weight * float(sum(map(Fraction, kl[t:]))) for t in range(len(kl))]
        for i, kl in enumerate(kls)
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(rows=SAMPLES, minus_baseline=st.booleans(), beta=st.sampled_from([0.0, 0.05, 1.5]))
def test_reinforce_plus_plus_from_sums_is_that_of_tokens(rows: list, minus_baseline: bool, beta: float) -> None:
    ids, rewards, _, valid, kls = columns(rows)
    kl = sample_kl(kls)
    kl.sum[~valid] = kl.to_go_sum[~valid] = kl.to_go_square[~valid] = math.nan  # of failed samples it is unknown
    found = estimate_advantages(
        "reinforce_plus_plus", rewards, ids, valid, minus_baseline=minus_baseline,
        tokens=torch.tensor([len(k) for k in kls]), kl=kl, kl_penalty=beta,
    )  # fmt: skip
    expected = reference_reinforce_plus_plus(rows, minus_baseline, beta)
    for i, (row, tokens) in enumerate(zip(rows, by_token(found, kls), strict=True)):
        if row[3]:
            assert tokens == pytest.approx(expected[i], rel=1e-9, abs=1e-9)
        else:
            assert found.advantages[i] == 0


def test_token_moments_keep_their_digits() -> None:
    """A large KL at the last token of every sample is in all sums to go: squares around 0 would lose the digits."""
    kls = [[0.001 * ((7 * i + t) % 5) for t in range(20)] + [1000.0] for i in range(6)]
    rows = [(i // 3, 1024.0 + (i % 3) / 128, 0.0, True, kl) for i, kl in enumerate(kls)]
    ids, rewards, _, valid, _ = columns(rows)
    for minus_baseline in (True, False):
        found = estimate_advantages(
            "reinforce_plus_plus", rewards, ids, valid, minus_baseline=minus_baseline,
            tokens=torch.full((6,), 21), kl=sample_kl(kls), kl_penalty=1.0,
        )  # fmt: skip
        expected = reference_reinforce_plus_plus(rows, minus_baseline, 1.0)
        for tokens, wanted in zip(by_token(found, kls), expected, strict=True):
            assert tokens == pytest.approx(wanted, abs=1e-9)


def reference_gdpo(rows: list, weights: tuple[float, float], leave_one_out: bool) -> list[float]:
    total = [0.0] * len(rows)
    for column, weight in zip((1, 2), weights, strict=True):
        for i, row in enumerate(rows):
            values = [rows[j][column] for j in others(rows, i, itself=True)]
            if row[3] and len(set(values)) > 1:
                base = [rows[j][column] for j in others(rows, i, itself=not leave_one_out)]
                total[i] += weight * float(row[column] - mean(base)) / std(values, 1)
    used = [x for x, row in zip(total, rows, strict=True) if row[3]]
    if len(used) < 2 or max(map(abs, used)) < 1e-9:
        return [0.0] * len(rows)
    centre, scale = math.fsum(used) / len(used), std(used, 1) + 1e-6
    return [(x - centre) / scale if row[3] else 0.0 for x, row in zip(total, rows, strict=True)]


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(rows=SAMPLES, weights=st.sampled_from([(1.0, 1.0), (0.5, 2.0)]), leave_one_out=st.booleans())
def test_gdpo(rows: list, weights: tuple[float, float], leave_one_out: bool) -> None:
    ids, first, second, valid, _ = columns(rows)
    found = estimate_advantages(
        "gdpo", first + second, ids, valid, leave_one_out=leave_one_out,
        rewards_by_name={"right": first, "format": second}, reward_weights={"right": weights[0], "format": weights[1]},
    )  # fmt: skip
    expected = reference_gdpo(rows, weights, leave_one_out)
    assert found.advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert found.kl_weight == 0
    as_list = estimate_advantages(
        "gdpo", first + second, ids, valid, leave_one_out=leave_one_out,
        rewards_by_name={"right": first, "format": second}, reward_weights=weights[::-1],
    )  # fmt: skip
    assert as_list.advantages.tolist() == found.advantages.tolist()  # sorted names: format, right


def test_named_rewards_that_cancel_give_nothing() -> None:
    first = torch.tensor([0.1, 0.7, 0.4, 0.9], dtype=torch.float64)
    found = estimate_advantages(
        "gdpo", torch.ones(4), torch.zeros(4, dtype=torch.int64), rewards_by_name={"a": first, "b": 1 - first}
    )
    assert found.advantages.tolist() == [0] * 4


ALL = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gdpo"]


def estimate(name: str, rewards: Tensor, ids: Tensor, valid: Tensor | None = None, **options) -> Tensor:
    """Estimate with 10 tokens per sample and, for gdpo, the same reward twice."""
    tokens = torch.full(rewards.shape, 10)
    named = {"a": rewards, "b": rewards}
    return estimate_advantages(name, rewards, ids, valid, tokens=tokens, rewards_by_name=named, **options).advantages


@pytest.mark.parametrize("name", ALL)
def test_degenerate_groups(name: str) -> None:
    one = torch.zeros(8, dtype=torch.int64)
    valid = torch.tensor([True, False] * 4)
    for value, dtype in product((0.0, 0.35, 0.95, -7.0, -1e6, 1e-30), (torch.float32, torch.float64)):
        equal = torch.full((8,), value, dtype=dtype)
        for options in ({}, {"minus_baseline": False}, {"leave_one_out": False}):
            assert not estimate(name, equal, one, **options).any()
        assert not group_stats(equal, one).std.any() and not group_stats(equal, one).informative.any()
    assert not estimate(name, torch.linspace(0, 1, 8), torch.arange(8)).any()  # groups of one
    assert not estimate(name, torch.full((8,), math.nan), one, torch.zeros(8, dtype=torch.bool)).any()  # all failed
    assert estimate(name, torch.zeros(0), one[:0]).shape == (0,)
    two = torch.tensor([0] * 4 + [1] * 4)
    rewards = torch.tensor([math.nan] * 4 + [1.0, 0.0, 1.0, 1.0])
    found = estimate(name, rewards, two, ~rewards.isnan())  # a failed group does not change the other
    alone = estimate(name, rewards[4:], two[4:])
    assert not found[:4].any() and found[4:].tolist() == pytest.approx(alone.tolist(), rel=1e-14)
    rewards = torch.where(valid, torch.tensor([1.0, math.nan] + [0.0, math.nan] * 3), math.nan)
    found = estimate(name, rewards, one, valid)  # failed samples among valid ones
    assert not found[1::2].any() and found[0] > 0 and (found[2::2] < 0).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("options", [{}, {"minus_baseline": False}, {"leave_one_out": False}], ids=str)
def test_no_large_advantages(name: str, options: dict[str, bool]) -> None:
    """E[x^2] - E[x]^2 in float32 gave seven equal rewards a tiny deviation, hence advantages of thousands."""
    one = torch.zeros(8, dtype=torch.int64)
    winner, cancelling = torch.tensor([1.0] + [0.0] * 7), torch.tensor([0.0] + [0.95] * 7)
    for rewards in (winner, cancelling):
        found = estimate(name, rewards, one, **options)
        assert 0.3 < found.abs().max() < 3.5
        assert found[0].abs() == found.abs().max() and (found[1:] == found[1]).all()
    rounding = torch.full((8,), 0.35)
    rounding[3] = torch.nextafter(rounding[3], torch.tensor(1.0))
    assert len(rounding.unique()) == 2
    assert not estimate(name, rounding, one, **options).any()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(ALL))
def test_neither_order_nor_names_of_groups_matter(seed: int, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 5, (24,), generator=generator)
    rewards = torch.randn(24, generator=generator)
    valid = torch.rand(24, generator=generator) < 0.8
    order = torch.randperm(24, generator=generator)
    names = torch.randperm(100, generator=generator)[:5] - 50
    found = estimate(name, rewards[order], names[ids][order], valid[order])
    torch.testing.assert_close(found, estimate(name, rewards, ids, valid)[order], rtol=1e-12, atol=1e-12)


def test_groups_are_those_of_the_rewards() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])
    for name in ALL:
        found = estimate_advantages(
            name, rewards, ids, tokens=torch.ones(4), rewards_by_name={"a": rewards, "b": -2 * rewards}
        )
        assert found.groups.informative.tolist() == [True, False]
        assert found.groups.std.tolist() == group_stats(rewards, ids).std.tolist()


def test_missing_inputs_are_named() -> None:
    rewards, ids = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    kl = SampleKL(*torch.tensor([[1.0, math.nan], [1.0, 1.0], [0.0, math.inf]], dtype=torch.float64))
    tokens = torch.tensor([1, 1])
    for name, options, message in (
        ("ppo", {}, "unknown estimator 'ppo'"),
        ("reinforce_plus_plus", {}, "trained tokens"),
        ("reinforce_plus_plus", {"tokens": torch.ones(3)}, "tokens has shape"),
        ("reinforce_plus_plus", {"tokens": tokens, "kl": kl, "kl_penalty": 0.1}, r"KL of samples \[1\]"),
        ("remax", {}, "pass which samples are first"),
        ("rloo", {"kl_penalty": 0.1}, "KL of the samples is missing"),
        ("rloo", {"kl": kl, "kl_penalty": 0.1}, r"KL of samples \[1\]"),
        ("gdpo", {}, "at least two named rewards, not 0"),
        ("gdpo", {"rewards_by_name": {"a": rewards}}, r"not 1 \(a\)"),
        ("gdpo", {"rewards_by_name": {"a": rewards, "b": rewards}, "reward_weights": [1.0]}, "1 entries for the 2"),
        ("gdpo", {"rewards_by_name": {"a": rewards, "b": rewards}, "reward_weights": {"a": 1.0}}, "names"),
        ("gdpo", {"rewards_by_name": {"a": rewards, "b": rewards * math.inf}}, "named reward 'b'"),
        ("gdpo", {"kl": kl, "kl_penalty": 0.1}, "use_kl_in_reward=false"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate_advantages(name, rewards, ids, **options)
    fine = torch.tensor([True, False])  # a sample that failed has no KL
    assert not estimate_advantages("rloo", rewards, ids, fine, kl=kl, kl_penalty=0.1).advantages.any()


@settings(deadline=None, max_examples=60)
@given(rows=SAMPLES)
def test_maxrl_divides_by_the_mean_of_the_group(rows: list) -> None:
    rows = [(group, abs(reward), *rest) for group, reward, *rest in rows]
    ids, rewards, _, valid, _ = columns(rows)
    found = estimate_advantages("maxrl", rewards, ids, valid)
    for i, row in enumerate(rows):
        members = [Fraction(rows[j][1]) for j in others(rows, i, itself=True)] if row[3] else []
        centre = mean(members) if members else 0
        expected = float((Fraction(row[1]) - centre) / centre) if centre else 0.0
        assert found.advantages[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match="must be at least 0: use grpo.reward_scaling"):
        estimate_advantages("maxrl", torch.tensor([1.0, -0.5]), torch.tensor([0, 0]))


@settings(deadline=None, max_examples=60)
@given(rows=SAMPLES)
def test_opo_weighs_the_baseline_by_length(rows: list) -> None:
    ids, rewards, _, valid, kls = columns(rows)
    lengths = torch.tensor([1 + len(kl) for kl in kls])
    found = estimate_advantages("opo", rewards, ids, valid, lengths=lengths)
    for i, row in enumerate(rows):
        members = others(rows, i, itself=True)
        expected = 0.0
        if row[3] and len(members) > 1:
            total = sum(int(lengths[j]) * Fraction(rows[j][1]) for j in members)
            expected = float(Fraction(row[1]) - total / sum(int(lengths[j]) for j in members))
        assert found.advantages[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(rows=SAMPLES)
def test_flash_reinforce_subtracts_the_mean_of_the_step(rows: list) -> None:
    ids, rewards, _, valid, _ = columns(rows)
    found = estimate_advantages("flash_reinforce", rewards, ids, valid)
    scored = [Fraction(row[1]) for row in rows if row[3]]
    for i, row in enumerate(rows):
        expected = float(Fraction(row[1]) - mean(scored)) if row[3] else 0.0
        assert found.advantages[i].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(rows=SAMPLES)
def test_remax_subtracts_the_reward_of_the_first_sample(rows: list) -> None:
    ids, rewards, _, valid, _ = columns(rows)
    first = torch.tensor([row[0] not in [before[0] for before in rows[:i]] for i, row in enumerate(rows)])
    found = estimate_advantages("remax", rewards, ids, valid, first=first)
    for i, row in enumerate(rows):
        greedy = next(other for other in rows if other[0] == row[0])
        expected = float(Fraction(row[1]) - Fraction(greedy[1])) if row[3] and greedy[3] else 0.0
        assert found.advantages[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("keep_by", "kept"), [("length", [1, 2, 5, 6]), ("token_efficiency", [2, 3, 5, 6])])
def test_gfpo_compares_only_the_samples_that_it_keeps(keep_by: str, kept: list[int]) -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, math.nan, 0.0, 1.0])
    ids, lengths = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([9, 3, 4, 5, 1, 7, 8])
    found = estimate_advantages("gfpo", rewards, ids, ~rewards.isnan(), lengths=lengths, keep=2, keep_by=keep_by)
    alone = estimate_advantages("grpo", rewards[kept], ids[kept])
    assert found.advantages[kept].tolist() == alone.advantages.tolist()
    assert found.advantages.count_nonzero() == alone.advantages.count_nonzero()


@pytest.mark.parametrize("name", ["opo", "gfpo"])
def test_lengths_are_needed(name: str) -> None:
    with pytest.raises(ValueError, match="pass the number of generated tokens of each sample"):
        estimate_advantages(name, torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
