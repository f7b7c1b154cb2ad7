"""Samples that were written to files come back as they were."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.cluster import LocalCluster
from grpo_mcore.driver.record.recorded_samples import recorded_groups
from grpo_mcore.driver.record.sample_writer import SampleWriter, sample_row
from grpo_mcore.observe.samples import SampleFiles, read_samples
from grpo_mcore.recipe import GRPOLoggerConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import INVALID_TOOL_CALL, ImageSpan, Score, Trajectory, TrajectoryRef, Turn


def row_of(trajectory: Trajectory, **info: Any) -> Any:
    sample, score = TrajectoryRef.of(trajectory, None), Score(1.0, None, "", 0.0)
    prompt: Any = {"uid": "p", "task_name": "t", "extra_env_info": info}
    return sample_row(Group(prompt, (sample,), (score,)), sample, score, trajectory)


def through_a_file(folder: Path, *rows: Any) -> list[Any]:
    files = SampleFiles(folder, str, 1e9)
    files.add("train", 1, lambda: list(rows))
    files.close()
    return read_samples(folder / "train" / "step_000001.parquet")


def test_a_recorded_sample_comes_back_with_its_branches() -> None:
    turns = (
        Turn("user", torch.tensor([1, 2])),
        Turn("assistant", torch.tensor([3]), torch.tensor([-0.5]), loss_mask=True, text="a"),
        Turn("user", torch.tensor([1, 4])),
        Turn("assistant", torch.tensor([5, 6]), torch.tensor([-1.0, -2.0]), loss_mask=True, text="b"),
    )
    trajectory = Trajectory("p", 0, turns, ((1, 0, 7),), "stop", False, 6, (3, 4), turn_numbers=(1, 0))
    store = LocalCluster().store
    (group,) = recorded_groups([row_of(trajectory)], store)
    assert store.fetch_many([group.samples[0].ref]) == [trajectory]


@pytest.mark.parametrize("last", [7, 300])
def test_a_recorded_sample_comes_back_with_its_experts(tmp_path: Path, last: int) -> None:
    """Through a file: the experts of each token but the last, in one byte where they fit."""
    turns = (Turn("user", torch.tensor([1, 2])), Turn("assistant", torch.tensor([3]), torch.tensor([-0.5]), True))
    routes = torch.tensor([[[-1, -1], [0, 2]], [[-1, -1], [1, last]]], dtype=torch.int16)
    trajectory = Trajectory("p", 0, turns, ((1, 0, 3),), "stop", False, 3, (), routes)
    (row,) = through_a_file(tmp_path, row_of(trajectory))
    assert len(row["routes"]["experts"]) == (8 if last < 128 else 16)
    store = LocalCluster().store
    (group,) = recorded_groups([row], store)
    (back,) = store.fetch_many([group.samples[0].ref])
    assert back == trajectory and back.routed_experts.equal(routes) and back.routed_experts.dtype == torch.int16


def test_images_are_written_once_a_group_and_come_back(tmp_path: Path) -> None:
    """One that both samples have, and one that an environment showed to the second alone."""
    cluster = LocalCluster()
    files = {"cat": cluster.store.put(b"bytes of a cat"), "dog": cluster.store.put(b"bytes of a dog")}
    turns = (
        Turn("user", torch.tensor([4, 6, 6, 5]), images=(ImageSpan(1, 2, "cat", (1, 2, 4)),)),
        Turn("assistant", torch.tensor([6]), torch.tensor([-0.5]), True),
        Turn("user", torch.tensor([6, 5]), images=(ImageSpan(0, 1, "dog", (1, 2, 2)),)),
    )
    trajectories = [Trajectory("p", i, turns[: 2 + i], ((1, 0, 5),), "stop", False) for i in range(2)]
    few = [{"cat": files["cat"]}, files]
    samples = [TrajectoryRef.of(it, cluster.store.put(it), few[i]) for i, it in enumerate(trajectories)]
    prompt: Any = {"uid": "p", "task_name": "t", "extra_env_info": {}}
    writer = SampleWriter(GRPOLoggerConfig(samples="all"), tmp_path, cluster, SimpleNamespace(decode=str))
    writer.validated(1, [Group(prompt, tuple(samples), (Score(1.0, None, "", 0.0),) * 2)])
    writer.close()
    rows = read_samples(tmp_path / "samples" / "validation" / "step_000001.parquet")
    assert [[file["digest"] for file in row["images"]] for row in rows] == [["cat"], ["dog"]]
    (group,) = recorded_groups(rows, cluster.store)
    first, second = group.samples
    assert cluster.store.fetch_many([first.ref, second.ref]) == trajectories
    assert cluster.store.fetch_many(list(second.images.values())) == [b"bytes of a cat", b"bytes of a dog"]
    assert list(first.images) == ["cat"] and first.images["cat"] is second.images["cat"]


def test_a_group_comes_back_whole_through_a_file(tmp_path: Path) -> None:
    """Flags of turns, failed attempts to score, and a sample whose rollout left no tokens."""
    turns = (
        Turn("user", torch.tensor([1, 2])),
        Turn("assistant", torch.tensor([3]), torch.tensor([-0.1]), True, "a", INVALID_TOOL_CALL),
    )
    trajectory = Trajectory("p", 0, turns, ((1, 0, 2), (2, 2, 3)), "length", True)
    cut = TrajectoryRef("p", 1, 0, 0, 0, 4, False, "abort", None, turns=0)
    store = LocalCluster().store
    samples = (TrajectoryRef.of(trajectory, store.put(trajectory)), cut)
    scores = (
        Score(
            0.1, "7", "right", 0.5, {"a": 0.1}, True, 0.9, ("judge: timeout", "judge: timeout"),
            turn_rewards=(None, 1.5), turn_states=("", "s"), step_rewards=(0.0, 0.1),
        ),
        Score(None, None, "the agent failed", 0.0, terminated=False),
    )  # fmt: skip
    prompt: Any = {"uid": "p", "task_name": "t", "extra_env_info": {}}
    group = Group(prompt, samples, scores)
    rows = [sample_row(group, sample, score, sample.ref, None) for sample, score in zip(samples, scores, strict=True)]
    (back,) = recorded_groups(through_a_file(tmp_path, *rows), store)
    assert back == group and store.fetch(back.samples[0].ref) == trajectory
    assert back.weight_version == 1 and back.samples[1].ref is None


def test_a_truth_that_is_no_unicode_costs_no_samples(tmp_path: Path) -> None:
    """JSON allows half a surrogate pair: Parquet takes none, and the samples of the whole step were left out."""
    turns = (Turn("user", torch.tensor([1])), Turn("assistant", torch.tensor([3]), torch.tensor([-0.5]), True))
    trajectory = Trajectory("p", 0, turns, ((1, 0, 2),), "stop", False, 3, ())
    (row,) = through_a_file(tmp_path, row_of(trajectory, ground_truth="\ud83d", level=float("nan")))
    assert row["truth"] == "\ufffd" and json.loads(row["columns"]) == {"level": None}
