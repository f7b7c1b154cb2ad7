"""From scored groups to the ranks' work: counts, failures, thin steps."""

from __future__ import annotations

import pytest

from grpo_mcore.algorithms.step_batch import build_step_batch
from grpo_mcore.parallel.mesh import Layout
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, TrajectoryRef


def config(**grpo: object) -> MasterConfig:
    return MasterConfig.model_validate(
        {
            "policy": {"model_name": "m", "train_global_batch_size": 4, "max_total_sequence_length": 64},
            "data": {"train": {"data_path": "x.jsonl"}},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4} | grpo,
        }
    )


def group(uid: str, rewards: list[float | None], truncated: bool = False) -> Group:
    samples = tuple(
        TrajectoryRef(uid, i, 10 + i, 4, 6 + i, 1, truncated, "length" if truncated else "stop", f"{uid}#{i}")
        for i in range(len(rewards))
    )
    return Group({"uid": uid}, samples, tuple(Score(reward, None, "", 0.0) for reward in rewards))


def test_every_scored_sample_is_dealt_once_with_its_advantage() -> None:
    batch = build_step_batch([group("a", [1, 0, 0, 0]), group("b", [1, 1, None, 0])], config(), Layout(1, 1, 1))
    (rank,) = batch.ranks
    dealt = {s.trajectory: s.advantage for bins in rank.batches for bin in bins for s in bin}
    assert set(dealt) == {"a#0", "a#1", "a#2", "a#3", "b#0", "b#1", "b#3"}
    assert dealt["a#0"] > 0 > dealt["a#1"] == dealt["a#2"]
    assert dealt["b#0"] == dealt["b#1"] > 0 > dealt["b#3"]
    assert [sum(len(bin) for bin in bins) for bins in rank.batches] == [3, 4]
    assert batch.metrics["num_failed_samples"] == 1 and batch.metrics["num_trained_samples"] == 7
    assert sum(rank.valid_toks) == 6 + 7 + 8 + 9 + 6 + 7 + 9 and sum(rank.valid_seqs) == 7


def test_all_ranks_get_the_global_counts() -> None:
    groups = [group("a", [1, 0, 0, 1]), group("b", [0, 1, 0, 0])]
    batch = build_step_batch(groups, config(), Layout(1, 1, 2))
    first, second = batch.ranks
    assert first.valid_toks == second.valid_toks and first.valid_seqs == second.valid_seqs == (4, 4)
    assert [len(bins) for bins in first.batches] == [len(bins) for bins in second.batches]


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_a_step_with_nothing_left_says_so(data_parallel: int) -> None:
    groups = [group("a", [1, 0, 0, 0], truncated=True), group("b", [1, 0, 1, 0], truncated=True)]
    batch = build_step_batch(groups, config(overlong_filtering=True), Layout(1, 1, data_parallel))
    assert batch.ranks == () and batch.tokens == 0
    assert batch.metrics["num_trained_samples"] == 0 and batch.metrics["truncation_rate"] == 1


def test_few_samples_make_fewer_optimizer_steps() -> None:
    groups = [group("a", [1, None, None, None]), group("b", [None, None, 0, None])]
    batch = build_step_batch(groups, config(), Layout(1, 1, 2))
    assert [len(rank.batches) for rank in batch.ranks] == [1, 1]
