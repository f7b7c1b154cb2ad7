"""A policy rank's bins: the log-prob passes join them into longer rows and hand each its own values; samples of a bin
share prefixes where the plan says so. The last update of a step leaves all weights gathered."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows
from grpo_mcore.driver.policy.policy_worker import Bin, PolicyWorker
from grpo_mcore.families import FamilyError
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import PolicyConfig, bins_per_logprob_row
from grpo_mcore.rollout.trajectory import INVALID_TOOL_CALL, MALFORMED_THINKING, Trajectory, Turn
from grpo_mcore.step.step_batch import RankStep, TrainTargets

LENGTHS = ((3, 4), (5,), (2, 2, 1), (6,), ())  # of the samples in a rank's training bins; the last bin is padding


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({"sequence_packing": {"train_mb_tokens": 8, "logprob_mb_tokens": 8}}, 1),
        ({"sequence_packing": {"train_mb_tokens": 8, "logprob_mb_tokens": 23}}, 2),
        ({"sequence_packing": {"train_mb_tokens": 8, "logprob_mb_tokens": 24}}, 3),
        ({"sequence_packing": {"train_mb_tokens": 8, "logprob_mb_tokens": 4}}, 1),
        (
            {
                "sequence_packing": {"enabled": False},
                "dynamic_batching": {"enabled": True, "train_mb_tokens": 8, "logprob_mb_tokens": 16},
            },
            2,
        ),
        ({"sequence_packing": {"enabled": False}, "train_micro_batch_size": 2, "logprob_batch_size": 4}, 2),
        ({"sequence_packing": {"train_mb_tokens": 8, "logprob_mb_tokens": 24}, "deterministic": True}, 1),
    ],
)
def test_logprob_rows_join_training_bins(changed: dict[str, Any], count: int) -> None:
    config = PolicyConfig.model_validate({"model_name": "tiny"} | changed)
    assert bins_per_logprob_row(config) == count
    worker, rows = object.__new__(PolicyWorker), []
    worker.config, worker.is_reporting_rank, worker._bins = config, False, [list(map(make_bin, LENGTHS))]
    worker.layout = SimpleNamespace(tensor=1, sequence_parallel=False)  # type: ignore[assignment]

    def token_ids(batches: Sequence[PackedBatch], **_: object) -> list[torch.Tensor]:
        rows.append([sum(batch.lengths) for batch in batches])
        return [batch.tokens.float() for batch in batches]

    worker.logprobs = token_ids  # type: ignore[method-assign, assignment]
    worker.infer_logprobs(prev=True, reference=False, kl_kind=None)
    sizes = [sum(lengths) for lengths in LENGTHS]
    assert rows == [[sum(sizes[i : i + count]) for i in range(0, len(sizes), count)]]
    for bin in worker._bins[0]:
        assert bin.batch.columns["prev_logprobs"].equal(bin.batch.tokens.float())


@pytest.mark.parametrize(("tokens", "last"), [((7, 0, 9, 0), [False, True]), ((5,), [True]), ((0, 0), [])])
def test_the_last_update_of_a_step_is_marked(tokens: tuple[int, ...], last: list[bool]) -> None:
    worker, marked = object.__new__(PolicyWorker), []
    worker._bins, worker.step_logprobs = [[make_bin((3, 4))] for _ in tokens], []
    worker.is_last_stage, worker.advance_schedule = False, lambda: None  # type: ignore[method-assign]
    worker.train_step = lambda *_, last, **__: marked.append(last)  # type: ignore[method-assign, assignment, return-value]
    worker.train(lambda: None, TrainTargets(torch.ones(2), tokens, tokens))  # type: ignore[arg-type]
    assert marked == last


@pytest.mark.parametrize("skips", [False, True])
def test_the_schedules_of_policy_and_critic_advance_once_a_step(skips: bool) -> None:
    worker, critic, advanced = object.__new__(PolicyWorker), object.__new__(Policy), []
    worker._bins, worker.is_last_stage, worker.critic = [[make_bin((3, 4))]], False, critic
    for name, model in (("policy", worker), ("critic", critic)):
        model.step_logprobs = []
        model.scheduler = SimpleNamespace(step=lambda increment, name=name: advanced.append(name))
        model.train_step = lambda *_, **__: None  # type: ignore[method-assign, assignment, return-value]
    if not skips:
        targets: Any = TrainTargets(torch.ones(2), (7,), (7,), critic_epochs=2)
        worker.train_critic(lambda: None, targets)  # type: ignore[arg-type]
        worker.train(lambda: None, targets)  # type: ignore[arg-type]
    else:
        worker.skip()
    assert advanced == ["policy", "critic"]


def worker_of(kept: list[Trajectory], **config: Any) -> PolicyWorker:
    """Return a worker that is not built, which receives these samples by their number."""
    worker = object.__new__(PolicyWorker)
    worker.config, worker.is_last_stage = PolicyConfig.model_validate({"model_name": "tiny"} | config), True
    worker.layout = SimpleNamespace(tensor=1, sequence_parallel=False)  # type: ignore[assignment]
    worker._store = SimpleNamespace(fetch_many=lambda refs: [kept[ref] for ref in refs])  # type: ignore[assignment]
    return worker


def turn(size: int, flag: str = "", generated: bool = True) -> Turn:
    return Turn("x", torch.arange(size), torch.zeros(size) if generated else None, generated, flag=flag)


@pytest.mark.parametrize(("shares", "block", "new_tokens"), [(True, 32, 6), (True, 64, 38), (False, 32, None)])
def test_samples_share_prefixes_if_their_step_was_planned_for_it(
    shares: bool, block: int, new_tokens: int | None
) -> None:
    start = torch.arange(100)
    turns = [Turn("user", torch.cat([start, start[: i + 1]])) for i in (0, 1)]
    kept = [Trajectory("a", i, (turn,), (), "stop", truncated=False) for i, turn in enumerate(turns)]
    worker = worker_of(kept, sequence_packing={"shared_prefix": {"min_tokens": block}})
    worker.receive(RankStep((((0, 1),),), {0: 0, 1: 1}, shares), weight_version=1)
    shared = worker._bins[0][0].batch.shared
    assert (None if shared is None else shared.new_tokens) == (None if new_tokens is None else (101, new_tokens))


def test_tokens_of_flagged_turns_have_an_advantage_of_their_own_before_clipping() -> None:
    turns = [(turn(2, generated=False), turn(2, INVALID_TOOL_CALL), turn(1), turn(2, MALFORMED_THINKING)), (turn(3),)]
    kept = [Trajectory("a", i, of_sample, (), "stop", truncated=False) for i, of_sample in enumerate(turns)]
    worker = worker_of(kept)

    def advantages(flagged: dict[str, float], clip: Any = (None, None)) -> list[float]:
        worker.receive(RankStep((((0, 1),),), {0: 0, 1: 1}), weight_version=1)
        own = torch.tensor([0.5, -1.0], dtype=torch.float64)
        weights = torch.ones(2, dtype=torch.float64)
        targets = TrainTargets(weights, (2,), (8,), own, clip=clip, flag_advantages=flagged)
        (batch,) = worker._with_targets(worker._bins[0], targets)
        return batch.columns["advantages"][0, :10].tolist()

    both = {INVALID_TOOL_CALL: -5.0, MALFORMED_THINKING: -7.0}
    assert advantages(both) == [0.5, 0.5, -5, -5, 0.5, -7, -7, -1, -1, -1]
    assert advantages(both, (-6.0, None)) == [0.5, 0.5, -5, -5, 0.5, -6, -6, -1, -1, -1]
    assert advantages({MALFORMED_THINKING: 0.0}) == [0.5, 0.5, 0.5, 0.5, 0.5, 0, 0, -1, -1, -1]
    assert advantages({}) == [0.5] * 7 + [-1] * 3


def test_credit_of_a_turn_is_added_to_its_tokens_before_flags_and_bounds() -> None:
    talk = (turn(2, generated=False), turn(2), turn(1, generated=False), turn(1, INVALID_TOOL_CALL), turn(1))
    kept = [
        Trajectory("a", 0, talk, (), "stop", truncated=False, branches=(3, 4), turn_numbers=(2, 0, 1)),
        Trajectory("a", 1, (turn(2),), (), "stop", truncated=False),
    ]
    worker = worker_of(kept)
    credits = torch.tensor([[0.125, 0.25, 8.0], [1.0, 0.0, 0.0]], dtype=torch.float64)

    def advantages(bin: tuple[int, ...], **how: Any) -> list[float]:
        worker.receive(RankStep(((bin,),), {i: i for i in bin}), weight_version=1)
        weights, own = torch.ones(2, dtype=torch.float64), torch.tensor([0.5, -1.0], dtype=torch.float64)
        targets = TrainTargets(weights, (2,), (8,), own, turn_credits=credits, **how)
        (batch,) = worker._with_targets(worker._bins[0], targets)
        trained = batch.columns["token_mask"] > 0
        return batch.columns["advantages"][trained].tolist()

    assert advantages((0, 1)) == [8.5, 8.5, 0.625, 0.75, 0, 0]
    assert advantages((1,)) == [0, 0]
    flagged = {INVALID_TOOL_CALL: -5.0}
    assert advantages((0, 1), flag_advantages=flagged, clip=(None, 2.0)) == [2, 2, -5, 0.75, 0, 0]


def make_bin(lengths: tuple[int, ...]) -> Bin:
    ids = [torch.arange(1, length + 1) * (length + 10) for length in lengths or (1,)]
    batch = pack_rows(ids, [{"token_mask": torch.ones(len(row))} for row in ids], 2)
    return Bin(batch if lengths else batch.empty_like(2), torch.arange(len(lengths)))


def test_a_rank_that_is_built_later_reads_nothing_before(tmp_path: Path) -> None:
    """On GPUs that it shares, the engines take their memory first."""
    config = PolicyConfig.model_validate({"model_name": str(tmp_path / "not_there_yet")})
    store: Any = None
    worker = PolicyWorker(
        Address(0, 1, 0, "127.0.0.1", 0), config, store, seed=0, timeout_s=1.0, reference=False, platform="cpu",
        build_later=True,
    )  # fmt: skip
    assert not hasattr(worker, "weights") and not torch.distributed.is_initialized()
    with pytest.raises(FamilyError, match="not_there_yet"):
        worker.build()
