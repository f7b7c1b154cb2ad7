"""Shared prefixes: plans by hashes of blocks, and rows by tokens, against a set of all prefixes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.batching import CostModel, plan_step
from grpo_mcore.batching.packed_batch import PackedBatch, cut_row, join_rows, pack_rows, share_prefixes
from grpo_mcore.batching.prefix_trees import (
    computed_tokens,
    in_blocks,
    make_trees,
    prefix_hashes,
    prefix_sketch,
    prefixes_of,
)

QUICK = settings(deadline=None, max_examples=60)
SAMPLES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=9)
COST = CostModel(1.0, 0.01)


def row_of(samples: list[list[int]], multiple: int = 1) -> PackedBatch:
    return pack_rows([torch.tensor(ids) for ids in samples], [{"x": torch.ones(len(ids))} for ids in samples], multiple)


def unique_tokens(samples: list[list[int]], block: int) -> int:
    """Count the different prefixes of whole blocks, and what is left of each sample behind the blocks of others."""
    blocks = {tuple(ids[:end]) for ids in samples for end in range(block, len(ids) + 1, block)}
    return block * len(blocks) + sum(len(ids) % block for ids in samples)


@QUICK
@given(samples=SAMPLES, block=st.integers(1, 4), multiple=st.sampled_from([1, 4]))
def test_every_token_is_computed_after_its_own_prefix(samples, block, multiple) -> None:
    row = share_prefixes(row_of(samples, multiple), multiple, block)
    expected = unique_tokens(samples, block)
    if row.shared is None:
        assert expected == sum(map(len, samples))
        return
    assert sum(row.shared.new_tokens) == expected < sum(map(len, samples))
    assert len(row.shared.source) % multiple == 0 and 0 <= row.shared.padding < multiple
    computed, positions = row.tokens[0, row.shared.source], row.positions[row.shared.source]
    for ids, places in zip(samples, row.split(row.shared.places[None]), strict=True):
        assert computed[places].tolist() == ids and positions[places].tolist() == list(range(len(ids)))
        assert len(set(places.tolist())) == len(ids)
    used = row.shared.source[:expected].tolist()
    assert len(set(used)) == expected, "no token of the row is computed twice"
    ends = set(torch.tensor([len(ids) for ids in samples]).cumsum(0).sub(1).tolist())
    going_on = {
        place for at, place in enumerate(row.shared.places[: sum(map(len, samples))].tolist()) if at not in ends
    }
    assert all(used[place] not in ends for place in going_on), "tokens are taken from where they have routes"


@QUICK
@given(samples=SAMPLES, block=st.integers(1, 4), most=st.integers(1, 9), room=st.integers(14, 40))
def test_trees_count_each_shared_prefix_once(samples, block, most, room) -> None:
    lengths = [len(ids) for ids in samples]
    prefixes = [prefix_hashes(ids, block) for ids in samples]
    trees = make_trees(range(len(samples)), lengths, prefixes, COST, room=room, most=most, block=block)
    assert sorted(i for tree in trees for i in tree.samples) == list(range(len(samples)))
    for tree in trees:
        assert len(tree.samples) <= most and tree.tokens <= room
        assert tree.tokens == unique_tokens([samples[i] for i in tree.samples], block)
        assert tree.cost <= sum(COST(lengths[i]) for i in tree.samples) + 1e-9
    assert computed_tokens(lengths, prefixes, block) == unique_tokens(samples, block)
    if most >= len(samples) and room >= sum(lengths):
        assert sum(tree.tokens for tree in trees) == unique_tokens(samples, block)


def groups(count: int, size: int, prompt: int, answer: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return lengths and prefixes of groups whose samples have a prompt in common."""
    draw = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(count):
        start = torch.randint(0, 99, (prompt,), generator=draw)
        samples += [torch.cat([start, torch.randint(0, 99, (answer,), generator=draw)]).tolist() for _ in range(size)]
    return [len(ids) for ids in samples], [prefix_hashes(ids) for ids in samples]


@pytest.mark.parametrize(("count", "dp", "imbalance"), [(4, 2, 0.01), (1, 2, 0.01), (5, 4, 0.2), (3, 2, 0.34)])
def test_a_step_computes_prompts_once_and_stays_balanced(count: int, dp: int, imbalance: float) -> None:
    """Three prompts on two ranks: cutting a group would cost more than it balances."""
    lengths, prefixes = groups(count, 8, 64, 16)
    plan = plan_step(lengths, dp=dp, capacity=256, algorithm="balanced", prefixes=prefixes)
    assert sorted(i for batch in plan.batches for i in batch.samples) == list(range(8 * count))
    report = plan.report()
    assert report["bin_tokens_max"] <= 256 and report["rank_imbalance"] < imbalance
    assert report["computed_tokens"] < 0.5
    alone = plan_step(lengths, dp=dp, capacity=256, algorithm="balanced")
    assert max(plan.batches[0].costs) < 0.6 * max(alone.batches[0].costs)


@pytest.mark.parametrize("block", [32, 64, 96])
def test_larger_blocks_have_some_of_the_hashes(block: int) -> None:
    ids = list(range(200))
    assert in_blocks(prefix_hashes(ids), block) == prefix_hashes(ids, block)


@pytest.mark.parametrize("common", [0, 31, 32, 63, 100, 255, 320])
def test_a_sketch_tells_what_prompts_have_in_common(common: int) -> None:
    """All of equal prompts, at least half of others, never more than there is."""
    first, second = ([1] * common + [start] * (330 - common) for start in (2, 3))
    prefixes = [prefixes_of(prefix_sketch(ids), len(ids)) for ids in (first, first, second, first[:common])]
    assert len(prefixes[0]) == len(prefix_hashes(first)) == 10
    assert computed_tokens([330, 330], prefixes[:2]) == 330 + 10
    for other, length in ((prefixes[2], 330), (prefixes[3], common)):
        known = 330 + length - computed_tokens([330, length], [prefixes[0], other])
        assert common // 32 * 32 / 2 <= known <= common // 32 * 32
    assert len(prefix_sketch(range(128 * 1024))) <= 8 * 13


@pytest.mark.parametrize(("answer", "shares"), [(31, True), (256, True), (257, False)])
def test_a_step_shares_prefixes_if_that_saves_a_tenth_of_its_tokens(answer: int, shares: bool) -> None:
    """Ten samples of 32 + answer tokens save 9 x 32 of them."""
    lengths, prefixes = groups(1, 10, 32, answer)
    plan = plan_step(lengths, dp=1, capacity=10**5, prefixes=prefixes)
    assert plan.shares_prefixes == shares
    assert plan.report()["computed_tokens"] == pytest.approx(1 - 9 * 32 / sum(lengths) if shares else 1.0)
    if not shares:
        assert plan == plan_step(lengths, dp=1, capacity=10**5)


def test_samples_without_a_common_block_are_planned_as_before() -> None:
    lengths, _ = groups(6, 2, 40, 8)
    alone = plan_step(lengths, dp=2, optimizer_steps=2, capacity=100)
    assert plan_step(lengths, dp=2, optimizer_steps=2, capacity=100, prefixes=[()] * 12) == alone


def test_branches_of_a_sample_share_what_came_before_they_parted() -> None:
    branches = [[1] * 32 + [2] * 8, [1] * 32 + [3] * 5]
    row = pack_rows([torch.tensor(sum(branches, []))], [{"x": torch.ones(77)}], branches=[[40, 37]])
    shared = share_prefixes(row).shared
    assert shared is not None and shared.new_tokens == (40, 5)
    assert row.tokens[0, shared.source][shared.places].equal(row.tokens[0])


def test_joined_rows_share_prefixes_over_both() -> None:
    rows = [share_prefixes(row_of(samples), 1, 32) for samples in ([[1] * 40, [1] * 33], [[1] * 35])]
    joined = join_rows(rows)
    assert rows[1].shared is None and joined.shared is not None
    assert joined.shared.new_tokens == (40, 1, 3)
    for part, row in zip(cut_row(joined.tokens, rows), rows, strict=True):
        assert part.equal(row.tokens)
    moved = joined.to("cpu").shared
    assert moved is not None and moved.places.equal(joined.shared.places)
    assert joined.empty_like(8).shared is None
