"""Samples longer than a bin: their branches go to several bins and ranks, and every gradient stays what it is when each
branch is computed by itself."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.batching.packing import PackingError
from grpo_mcore.batching.plan import branch_runs
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.objective import ClippedPGLossFn, combine_metrics
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.trajectory import Trajectory
from grpo_mcore.step.advantages import compute_targets
from grpo_mcore.step.step_batch import RankStep, StepBatch, TrainTargets, build_step_batch
from tests.unit.driver.policy.long_samples import (
    branch_logprobs,
    parameters,
    random_groups,
    random_tree,
    recipe,
    row_logprobs,
)

ROOM = 24


def worker_of(config: MasterConfig, trajectories: list[Trajectory], step: RankStep, routes: bool) -> PolicyWorker:
    worker = object.__new__(PolicyWorker)
    worker.config = config.policy.model_copy(update={"router_replay": SimpleNamespace(enabled=routes)})
    worker.is_last_stage, worker._kl_kind = True, None
    worker.layout = SimpleNamespace(tensor=2, sequence_parallel=True)  # type: ignore[assignment]
    worker._store = SimpleNamespace(fetch_many=lambda refs: [trajectories[ref] for ref in refs])  # type: ignore[assignment]
    worker.receive(step, weight_version=5)
    return worker


def check_plan(batch: StepBatch, workers: list[PolicyWorker], trajectories: list[Trajectory]) -> None:
    """Every token of every sample is in one row of one optimizer step, with all that belongs to it."""
    for k, indices in enumerate(batch.batches):
        seen: dict[int, dict[int, Any]] = {index: {} for index in indices}
        assert len({len(worker._bins[k]) for worker in workers}) == 1
        for worker in workers:
            for bin in worker._bins[k]:
                row, at = bin.batch, 0
                assert (
                    sum(row.lengths) <= ROOM
                    and list(row.sequences) == row.cu_seqlens.diff().tolist()[: len(row.sequences)]
                )
                for index, start, length in zip(bin.samples.tolist(), bin.starts, row.lengths, strict=True):
                    it, here, of_sample = trajectories[index], slice(at, at + length), slice(start, start + length)
                    assert start not in seen[index]
                    seen[index][start] = length
                    assert row.tokens[0, here].equal(it.token_ids()[of_sample])
                    columns = {name: column[0, here] for name, column in row.columns.items()}
                    assert columns["token_mask"].equal(it.loss_mask()[of_sample].float())
                    assert columns["generation_logprobs"].equal(it.logprobs()[of_sample])
                    assert columns["ages"].equal(5 - it.token_versions(5)[of_sample])
                    turns = columns.get("turns", torch.zeros(length, dtype=torch.int64))  # none: all have one turn
                    assert turns.equal(it.turn_of_tokens()[of_sample])
                    assert row.routes is not None and it.routed_experts is not None
                    assert row.routes[at : at + length - 1].equal(it.routed_experts[start : start + length - 1])
                    at += length
        for index, parts in seen.items():
            starts = sorted(parts)
            assert starts[0] == 0 and sum(parts.values()) == trajectories[index].length
            assert all(start + parts[start] == following for start, following in pairwise(starts))


def expected_gradient(
    batch: StepBatch, targets: TrainTargets, trajectories: list[Trajectory], step: int, token_level: bool
) -> list[Tensor]:
    """The formula: each branch by itself, each token with its sample's share of the loss."""
    weights = parameters(1)
    total = torch.zeros((), dtype=torch.float64)
    assert targets.advantages is not None and targets.turn_credits is not None
    for index in batch.batches[step]:
        it = trajectories[index]
        branches = it.token_ids().split(list(it.sequences))
        logprobs = torch.cat([branch_logprobs(weights, ids) for ids in branches])
        advantages = targets.advantages[index] + targets.turn_credits[index][it.turn_of_tokens()]
        terms = (-advantages * torch.exp(logprobs - logprobs.detach()))[it.loss_mask()]
        share = terms.sum() / targets.valid_toks[step] if token_level else terms.mean() / targets.valid_seqs[step]
        total = total + targets.weights[index] * share
    return list(torch.autograd.grad(total, weights))


def check_tree(seed: int) -> tuple[int, float]:
    """Return the samples longer than a bin, and the length of the longest in bins."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    groups, trajectories = random_groups(draw, ROOM)
    token_level, data = draw.random() < 0.5, draw.choice((1, 1, 2, 3))
    config = recipe(ROOM, token_level, turn_credit={"weight": 0.5})
    batch = build_step_batch(groups, config, PolicyLayout(1, 1, data))
    workers = [worker_of(config, trajectories, rank, routes=True) for rank in batch.ranks]
    check_plan(batch, workers, trajectories)
    targets, metrics = compute_targets(batch, {}, config)
    assert "num_samples_over_a_bin" not in metrics
    loss_fn = ClippedPGLossFn(config.loss_fn, prev_equals_curr=True)
    for step in range(len(batch.batches)):
        weights, parts = parameters(1), []
        for worker in workers:
            for row in worker._with_targets(worker._bins[step], targets):
                logprobs = row_logprobs(weights, row)
                loss, of_row = loss_fn(logprobs, row.loss_inputs(), targets.valid_seqs[step], targets.valid_toks[step])
                loss.backward()
                parts.append(of_row)
        found = combine_metrics(parts)
        assert found["num_valid_samples"] == pytest.approx(targets.valid_seqs[step])
        for weight, expected in zip(
            weights, expected_gradient(batch, targets, trajectories, step, token_level), strict=True
        ):
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, expected, rtol=1e-9, atol=1e-12)
    long = [it.length / ROOM for index, it in enumerate(trajectories) if batch.weights[index] and it.length > ROOM]
    return len(long), max(long, default=0.0)


def test_gradients_equal_those_of_branches_computed_by_themselves() -> None:
    found = [check_tree(seed) for seed in range(12)]
    assert sum(count for count, _ in found) > 12 and max(longest for _, longest in found) > 4


def test_marked_tokens_are_the_same_on_any_number_of_ranks() -> None:
    """Also where the branches of a sample are dealt to several bins and ranks."""
    for term in ("kl_cov", "clip_cov"):
        draw, seen = random.Random(7), []
        groups, trajectories = random_groups(draw, ROOM)
        options = {"share": 0.1} | ({"low": 0.02, "high": 0.2} if term == "clip_cov" else {})
        config = recipe(ROOM, True, {"policy_term": term, "policy_term_options": options}, num_prompts_per_step=2)
        loss_fn = ClippedPGLossFn(config.loss_fn)
        for data in (1, 3):
            batch = build_step_batch(groups, config, PolicyLayout(1, 1, data))
            workers = [worker_of(config, trajectories, rank, routes=True) for rank in batch.ranks]
            targets, _ = compute_targets(batch, {}, config)
            marked = set[tuple[int, int, int]]()
            for step in range(len(batch.batches)):
                values: list[Tensor] = []
                for again in (False, True):  # first for what each rank has to say

                    def gather(own: Tensor, again: bool = again, values: list[Tensor] = values) -> Tensor:
                        values.extend([] if again else [own])
                        return torch.cat(values if again else [own], 1)

                    for worker in workers:
                        worker.seed, worker.scheduler = 3, SimpleNamespace(num_steps=5)
                        worker.gather_over_data = gather  # type: ignore[method-assign]
                        worker._with_targets(worker._bins[step], targets)
                        worker._mark(worker._bins[step], [loss_fn, loss_fn], step)
                for bin in (bin for worker in workers for bin in worker._bins[step]):
                    at = 0
                    for sample, start, length in zip(bin.samples.tolist(), bin.starts, bin.batch.lengths, strict=True):
                        row = bin.batch.columns["covariance_marks"][0, at : at + length]
                        marked |= {(step, sample, start + int(place)) for place in row.nonzero()}
                        at += length
                    assert not bin.batch.columns["covariance_marks"][0, at:].any()
            seen.append((batch.batches, marked))
        assert seen[0] == seen[1] and len(seen[0][1]) > 4
    kl_cov = {"policy_term": "kl_cov", "policy_term_options": {"share": 0.1}}
    other = ClippedPGLossFn(config.loss_fn.model_copy(update=kl_cov))
    with pytest.raises(ValueError, match="losses that mark different tokens cannot be compared"):
        workers[0]._mark(workers[0]._bins[0], [loss_fn, other], 0)


@pytest.mark.every_state
def test_gradients_of_500_random_trees() -> None:
    found = [check_tree(seed) for seed in range(1000, 1500)]
    assert sum(longest > 4 for _, longest in found) > 100


def test_a_sample_that_fits_is_planned_as_before() -> None:
    draw = random.Random(5)
    groups, _ = random_groups(draw, ROOM)
    config = recipe(1000, True)
    batch = build_step_batch(groups, config, PolicyLayout(1, 1, 2))
    assert all(not rank.parts for rank in batch.ranks)
    packed = recipe(ROOM, True)
    parts = [rank.parts for rank in build_step_batch(groups, packed, PolicyLayout(1, 1, 2)).ranks]
    assert any(parts) and all(min(of_rank, default=8) >= 8 for of_rank in parts)


@pytest.mark.parametrize(
    ("loss", "grpo"),
    [
        ({"sequence_level_importance_ratios": True}, {}),
        ({"policy_term": "gmpo"}, {}),
        (
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 2.0,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
            {},
        ),
        (
            {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1},
            {"adv_estimator": {"name": "reinforce_plus_plus"}},
        ),
    ],
)
def test_what_reads_a_sample_at_once_leaves_out_those_longer_than_a_bin(loss: Any, grpo: Any) -> None:
    draw = random.Random(2)
    groups, trajectories = random_groups(draw, ROOM)
    batch = build_step_batch(groups, recipe(ROOM, False, loss, **grpo), PolicyLayout(1, 1, 1))
    fits = [it.length <= ROOM for it in trajectories]
    scored = [score.reward is not None for group in groups for score in group.scores]
    assert batch.weights.tolist() == [float(fit and known) for fit, known in zip(fits, scored, strict=True)]
    assert batch.too_long == sum(known and not fit for fit, known in zip(fits, scored, strict=True)) > 0
    assert all(not rank.parts for rank in batch.ranks)


def test_a_branch_longer_than_a_bin_is_refused() -> None:
    draw = random.Random(2)
    groups, _ = random_groups(draw, 3 * ROOM)
    with pytest.raises(PackingError, match=f"and a bin holds {ROOM}"):
        build_step_batch(groups, recipe(ROOM, True), PolicyLayout(1, 1, 1))


def test_runs_of_branches_fill_a_bin_in_order() -> None:
    assert branch_runs([3, 3, 4, 9, 1, 1], 10) == [(0, 3), (3, 5), (5, 6)]
    assert branch_runs([12, 1], 10) == [(0, 1), (1, 2)] and branch_runs([], 10) == []


def test_the_parts_of_a_trajectory_are_the_trajectory() -> None:
    draw = random.Random(3)
    for _ in range(20):
        it = random_tree(draw, "p", 0, ROOM, 6)
        cuts = [0, *sorted(draw.sample(range(1, 6), 2)), 6]
        parts = [it.part(first, end) for first, end in pairwise(cuts)]
        for values in (
            Trajectory.token_ids, Trajectory.loss_mask, Trajectory.logprobs, Trajectory.turn_of_tokens,
            Trajectory.flags, lambda part: part.token_versions(9),
        ):  # fmt: skip
            assert torch.cat([values(part) for part in parts]).equal(values(it))
        assert sum((part.sequences for part in parts), ()) == it.branches
