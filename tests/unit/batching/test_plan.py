"""plan_step: every sample once, equally many bins on every rank, balanced, deterministic."""

import json
import random
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.batching import PACKING_ALGORITHMS, CostModel, PackingError, StepPlan, plan_step
from grpo_mcore.batching.plan import plan_alone


def test_alone_each_rank_has_consecutive_samples_and_two_ranks_halves_of_a_tree() -> None:
    lengths = [9, 1, 4, 7, 2, 8, 3]
    one, two = (plan_alone(lengths, dp=dp, optimizer_steps=2) for dp in (1, 2))
    assert one.for_rank(0) == (((0,), (1,), (2,)), ((3,), (4,), (5,), (6,)))
    assert two.for_rank(0) == (((0,), ()), ((3,), (4,)))
    assert two.for_rank(1) == (((1,), (2,)), ((5,), (6,)))
    assert two.batches[0].tokens == ((9, 0), (1, 4)) and two.batches[1].tokens == ((7, 2), (8, 3))
    assert [batch.samples for batch in one.batches] == [batch.samples for batch in two.batches]
    assert not one.shares_prefixes and one.report()["computed_tokens"] == 1
    with pytest.raises(PackingError, match="7 samples are too few for 4 optimizer steps on 2 data-parallel ranks"):
        plan_alone(lengths, dp=2, optimizer_steps=4)


QUICK = settings(deadline=None, max_examples=60)


def check(plan: StepPlan, lengths: list[int], dp: int, room: int | None, most: int | None = None) -> None:
    seen = []
    for batch in plan.batches:
        assert len(batch.ranks) == dp
        assert {len(bins) for bins in batch.ranks} == {batch.num_bins}
        for bins in batch.ranks:
            assert any(bins)
            tokens = [sum(lengths[i] for i in samples) for samples in bins]
            assert tokens == sorted(tokens, reverse=True)
            assert room is None or max(tokens) <= room
            assert most is None or max(len(samples) for samples in bins) <= most
        seen += batch.samples
    assert sorted(seen) == list(range(len(lengths)))


@QUICK
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    dp=st.integers(1, 6),
    optimizer_steps=st.integers(1, 3),
    slack=st.integers(0, 100),
    algorithm=st.sampled_from(PACKING_ALGORITHMS),
    multiple=st.sampled_from([1, 4]),
)
def test_properties(lengths, dp, optimizer_steps, slack, algorithm, multiple) -> None:
    capacity = max(lengths) + slack
    arguments = {
        "dp": dp,
        "optimizer_steps": optimizer_steps,
        "capacity": capacity,
        "algorithm": algorithm,
        "multiple": multiple,
    }
    if len(lengths) < dp * optimizer_steps:
        with pytest.raises(PackingError, match="too few"):
            plan_step(lengths, **arguments)
        return
    plan = plan_step(lengths, **arguments)
    check(plan, lengths, dp, -(-capacity // multiple) * multiple)
    assert plan == plan_step(lengths, **arguments)
    # Optimizer steps take the samples in order, in equal parts.
    sizes = [len(batch.samples) for batch in plan.batches]
    assert max(sizes) - min(sizes) <= 1
    assert [i for batch in plan.batches for i in batch.samples] == list(range(len(lengths)))
    if all(size % dp == 0 for size in sizes):
        assert all(samples for batch in plan.batches for bins in batch.ranks for samples in bins)


@QUICK
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), dp=st.integers(1, 6), size=st.integers(1, 9))
def test_properties_without_packing(lengths, dp, size) -> None:
    if len(lengths) < dp:
        return
    plan = plan_step(lengths, dp=dp, micro_batch_size=size)
    check(plan, lengths, dp, None, size)


def test_without_packing_micro_batches_are_full() -> None:
    lengths = [random.Random(0).randint(1, 100) for _ in range(64)]
    plan = plan_step(lengths, dp=4, optimizer_steps=2, micro_batch_size=4)
    bins = [b for batch in plan.batches for rank in batch.ranks for b in rank]
    assert sum(len(b) for b in bins) == 64 and max(len(b) for b in bins) == 4


@pytest.mark.parametrize("algorithm", PACKING_ALGORITHMS)
def test_ranks_are_balanced_by_cost(algorithm: str) -> None:
    generator = random.Random(1)
    lengths = [int(min(4096, generator.lognormvariate(6.0, 1.0))) + 1 for _ in range(512)]
    cost = CostModel(linear=1.0, quadratic=1e-3)
    plan = plan_step(lengths, dp=16, capacity=8192, algorithm=algorithm, cost=cost)
    per_rank = [sum(cost(lengths[i]) for i in plan.samples_of(rank)) for rank in range(16)]
    assert max(per_rank) / (sum(per_rank) / 16) < 1.02
    assert plan.report()["rank_imbalance"] == pytest.approx(max(per_rank) / (sum(per_rank) / 16) - 1)


def test_report() -> None:
    plan = plan_step([10, 20, 30, 40], dp=2, capacity=50, algorithm="balanced", cost=CostModel(1.0, 0.0))
    assert plan.report() == {
        "bins_per_rank": 1.0,
        "bin_tokens_max": 50.0,
        "bin_tokens_mean": 50.0,
        "computed_tokens": 1.0,
        "rank_imbalance": 0.0,
    }


def test_a_rank_with_one_long_sample_gets_another_rather_than_an_empty_bin() -> None:
    # By cost alone: [100] against [50, 50, 50], which needs three bins of 60 or two of 100.
    lengths = [100, 60, 60, 60]
    plan = plan_step(lengths, dp=2, capacity=100, algorithm="balanced", cost=CostModel(0.0, 1.0))
    assert all(b for rank in plan.batches[0].ranks for b in rank)
    check(plan, lengths, 2, 100)


def test_a_bin_is_empty_only_if_unavoidable() -> None:
    plan = plan_step([100, 100, 100], dp=2, capacity=100, algorithm="balanced")
    assert sorted(len(b) for rank in plan.batches[0].ranks for b in rank) == [0, 1, 1, 1]
    assert all(rank[0] for rank in plan.batches[0].ranks)


def test_a_plan_is_plain_data() -> None:
    plan = plan_step([3, 4, 5, 6], dp=2, optimizer_steps=2, capacity=6, algorithm="balanced")
    assert json.loads(json.dumps(asdict(plan)))["lengths"] == [3, 4, 5, 6]
    assert hash(plan) == hash(plan_step([3, 4, 5, 6], dp=2, optimizer_steps=2, capacity=6))
    assert plan.for_rank(0) == tuple(batch.ranks[0] for batch in plan.batches)


def test_errors_name_the_sample_of_the_step() -> None:
    with pytest.raises(PackingError, match="sample 5 has 12 tokens and a bin holds 10"):
        plan_step([1, 2, 3, 4, 5, 12], dp=2, capacity=10, algorithm="balanced")
    with pytest.raises(PackingError, match="3 samples are too few for 1 optimizer steps on 4"):
        plan_step([1, 2, 3], dp=4, capacity=10)
    with pytest.raises(PackingError, match="sample 1 has 0 tokens"):
        plan_step([1, 0], dp=1, micro_batch_size=1)
    with pytest.raises(PackingError, match="dp 0"):
        plan_step([1], dp=0, capacity=10)
    with pytest.raises(PackingError, match="micro_batch_size is 0"):
        plan_step([1], dp=1, micro_batch_size=0)
    with pytest.raises(PackingError, match="unknown packing algorithm"):
        plan_step([1], dp=1, capacity=10, algorithm="best_fit")
    for both_or_none in ({}, {"capacity": 4, "micro_batch_size": 1}):
        with pytest.raises(PackingError, match="either"):
            plan_step([1], dp=1, **both_or_none)
