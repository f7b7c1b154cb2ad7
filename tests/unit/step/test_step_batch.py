"""From scored groups to the ranks' samples: distribution, failures, steps with few samples."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_mcore.batching.prefix_trees import prefix_sketch
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.step.advantages import counts
from grpo_mcore.step.step_batch import build_step_batch, rank_steps
from tests.unit.step.step_cases import config, group


def test_every_scored_sample_is_distributed_once() -> None:
    batch = build_step_batch([group("a", [1, 0, 0, 0]), group("b", [1, 1, None, 0])], config(), PolicyLayout(1, 1, 1))
    (rank,) = batch.ranks
    dealt = [i for bins in rank.batches for bin in bins for i in bin]
    assert sorted(dealt) == [0, 1, 2, 3, 4, 5, 7]
    assert rank.trajectories == {i: batch.samples[i].ref for i in dealt}
    assert [sum(len(bin) for bin in bins) for bins in rank.batches] == [3, 4]
    assert [sorted(i for bin in bins for i in bin) for bins in rank.batches] == [list(b) for b in batch.batches]
    assert batch.weights.tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
    assert batch.tokens == sum(4 + 6 + i for i in range(4)) + sum(4 + 6 + i for i in (0, 1, 3))


def test_ranks_share_the_samples_in_equally_many_bins() -> None:
    groups = [group("a", [1, 0, 0, 1]), group("b", [0, 1, 0, 0])]
    first, second = build_step_batch(groups, config(), PolicyLayout(1, 1, 2)).ranks
    assert [len(bins) for bins in first.batches] == [len(bins) for bins in second.batches]
    assert not first.trajectories.keys() & second.trajectories.keys()
    assert len(first.trajectories) == len(second.trajectories) == 4


def test_a_sample_without_tokens_is_left_out() -> None:
    batch = build_step_batch([group("a", [1, 0, 0, 1], lengths=[3, 0, 2, 2])], config(), PolicyLayout(1, 1, 1))
    assert batch.weights.tolist() == [1, 0, 1, 1] and 1 not in batch.ranks[0].trajectories


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_a_step_without_samples_has_no_ranks(data_parallel: int) -> None:
    groups = [group("a", [1, 0, 0, 0], truncated=True), group("b", [1, 0, 1, 0], truncated=True)]
    batch = build_step_batch(groups, config(overlong_filtering=True), PolicyLayout(1, 1, data_parallel))
    assert batch.ranks == () and batch.tokens == 0 and batch.weights.sum() == 0


def test_filtered_samples_are_processed_if_a_baseline_needs_their_kl() -> None:
    groups = [group("a", [1, 0, 0, 0], truncated=True), group("b", [1, 0, None, 0])]
    recipe = config({"use_kl_in_reward": True}, overlong_filtering=True, normalize_rewards=False)
    batch = build_step_batch(groups, recipe, PolicyLayout(1, 1, 1))
    assert sorted(batch.ranks[0].trajectories) == [0, 1, 2, 3, 4, 5, 7]
    assert batch.weights.tolist() == [0, 0, 0, 0, 1, 1, 0, 1]


def test_few_samples_make_fewer_optimizer_steps() -> None:
    groups = [group("a", [1, None, None, None]), group("b", [None, None, 0, None])]
    batch = build_step_batch(groups, config(), PolicyLayout(1, 1, 2))
    assert [len(rank.batches) for rank in batch.ranks] == [1, 1]


def test_a_step_shares_prefixes_where_they_are_asked_for_and_pay() -> None:
    """Two groups of four samples that have one block of tokens in common."""
    groups = [group(uid, [1, 0, 0, 1], lengths=[44, 50, 56, 60]) for uid in "ab"]
    alike = [
        replace(each, samples=tuple(
            replace(sample, prompt_sketch=prefix_sketch([number] * 32), prompt_length=32) for sample in each.samples
        ))
        for number, each in enumerate(groups)
    ]  # fmt: skip
    for given, asked, shares in ((groups, True, False), (alike, False, False), (alike, True, True)):
        batch = build_step_batch(given, config(), PolicyLayout(1, 1, 1), shares_prefixes=asked)
        assert [rank.shares_prefixes for rank in batch.ranks] == [shares]
        assert batch.plan_metrics["plan/computed_tokens"] == pytest.approx(1 - 6 * 32 / batch.tokens if shares else 1)


def test_only_prefixes_of_min_tokens_are_shared() -> None:
    """One group has 64 tokens in common, the other 63."""
    given = [group(uid, [1, 0, 0, 1], lengths=[80] * 4) for uid in "ab"]
    common = {"a": 64, "b": 63}
    given = [
        replace(each, samples=tuple(
            replace(sample, prompt_sketch=prefix_sketch([1] * common[each.uid]), prompt_length=common[each.uid])
            for sample in each.samples
        ))
        for each in given
    ]  # fmt: skip
    recipe = config()
    recipe.policy.sequence_packing.train_mb_tokens, recipe.policy.train_global_batch_size = 1000, 8
    for block, saved in ((32, 7 * 32 + 3 * 32), (64, 3 * 64), (96, 0)):
        recipe.policy.sequence_packing.shared_prefix.min_tokens = block
        batch = build_step_batch(given, recipe, PolicyLayout(1, 1, 1), shares_prefixes=True)
        assert batch.plan_metrics["plan/computed_tokens"] == pytest.approx(1 - saved / (8 * 84))


def test_with_fixed_sums_each_sample_has_a_bin_in_order() -> None:
    recipe = config()
    recipe.policy.deterministic, recipe.policy.train_global_batch_size = True, 8
    given = [group(uid, [1.0, 0.0, 1.0, 0.0]) for uid in "ab"]
    batch = build_step_batch(given, recipe, PolicyLayout(1, 1, 2), shares_prefixes=True)
    assert [rank.batches for rank in batch.ranks] == [(((0,), (1,), (2,), (3,)),), (((4,), (5,), (6,), (7,)),)]
    assert batch.plan_metrics["plan/computed_tokens"] == 1 and not batch.ranks[0].shares_prefixes


@pytest.mark.parametrize(("answers", "shares"), [([8, 16], True), ([120, 140], False)])
def test_the_answers_of_a_pair_share_their_prompt(answers: list[int], shares: bool) -> None:
    """Four pairs with prompts of 32 tokens; a bin has room for 2 x 170."""
    lengths = [32 + answer for _ in range(4) for answer in answers]
    prefixes = [(index // 2,) for index in range(8)]
    trajectories: dict[int, Any] = {index: str(index) for index in range(8)}
    recipe = config()
    recipe.policy.sequence_packing.train_mb_tokens = 170
    for given in (prefixes, None):
        plan, (rank,) = rank_steps(
            trajectories, lengths, recipe, PolicyLayout(1, 1, 1), optimizer_steps=1, algorithm="dpo", prefixes=given
        )
        assert rank.shares_prefixes == (shares and given is not None)
        pairs = [sum(lengths[:2]) - 32 * rank.shares_prefixes] * 4
        assert plan.lengths == tuple(pairs)
        assert sorted(i for bin in rank.batches[0] for i in bin) == list(range(8))
        assert all(bin[i] + 1 == bin[i + 1] for bin in rank.batches[0] for i in range(0, len(bin), 2))


def test_a_rank_gets_the_images_of_its_samples_once() -> None:
    given = [
        replace(it, samples=tuple(replace(sample, images={it.uid: f"bytes of {it.uid}"}) for sample in it.samples))
        for it in (group(uid, [1.0, 0.0, 1.0, 0.0]) for uid in "ab")
    ]
    recipe = config()
    recipe.policy.deterministic, recipe.policy.train_global_batch_size = True, 8
    first, second = build_step_batch(given, recipe, PolicyLayout(1, 1, 2)).ranks
    assert (first.images, second.images) == ({"a": "bytes of a"}, {"b": "bytes of b"})


def test_counts_exclude_masked_samples_and_are_exact() -> None:
    big = 2**24 + 1
    weights, tokens = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([big, 5, 1, 2**54 + 1])
    assert counts(((0, 1), (2, 3)), weights, tokens) == ([1, 2], [big, 2**54 + 2])
