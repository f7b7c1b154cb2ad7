"""Where two computations of a step differ first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.algorithms.record.sample_writer import sample_row
from grpo_mcore.cluster import LocalCluster
from grpo_mcore.observe.samples import SampleFiles, read_samples
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, Trajectory, TrajectoryRef, Turn
from grpo_mcore.tools.replay.replay import Replay, compare, recorded_groups


def computed(loss: float = 0.5, norm: float = 2.0, logprob: float = -1.0, layer: float = 3.0) -> Replay:
    layers = {"p#0": {4: torch.full((2, 3), layer, dtype=torch.float64)}}
    metrics = {"loss": loss, "grad_norm": norm}
    return Replay("one", metrics, {"p#0": torch.tensor([0.0, -2.0, logprob])}, layers)


@pytest.mark.parametrize(
    ("other", "first"),
    [
        ({}, None),
        ({"norm": 2.001}, None),
        ({"norm": 2.01}, "the norm of the gradient, though loss and log-probs agree: 2 against 2.01"),
        ({"norm": 9.0, "loss": 0.6}, "the loss, though all log-probs agree: 0.5 against 0.6"),
        ({"loss": 0.6, "logprob": -1.1}, "the log-prob of token 2 of sample p#0: -1.000000 against -1.100000"),
        ({"logprob": -1.1, "layer": 4.0}, "the output of layer 4: at token 0 of sample p#0"),
    ],
)
def test_the_first_difference_is_named_from_the_bottom_up(other: dict[str, float], first: str | None) -> None:
    found = compare(computed(), computed(**other), "float32")
    assert found.ok == (first is None)
    assert first is None or first in str(found.first)


def test_a_recorded_sample_comes_back_with_its_branches() -> None:
    turns = (
        Turn("user", torch.tensor([1, 2])),
        Turn("assistant", torch.tensor([3]), torch.tensor([-0.5]), loss_mask=True, text="a"),
        Turn("user", torch.tensor([1, 4])),
        Turn("assistant", torch.tensor([5, 6]), torch.tensor([-1.0, -2.0]), loss_mask=True, text="b"),
    )
    trajectory = Trajectory("p", 0, turns, ((1, 0, 7),), "stop", False, 6, (3, 4))
    sample = TrajectoryRef.of(trajectory, None)
    prompt: Any = {"uid": "p", "task_name": "t", "extra_env_info": {}}
    score = Score(1.0, None, "", 0.0)
    row = sample_row(Group(prompt, (sample,), (score,)), sample, score, trajectory)
    store = LocalCluster().store
    (group,) = recorded_groups([row], store)
    assert store.fetch_many([group.samples[0].ref]) == [trajectory]


@pytest.mark.parametrize("last", [7, 300])
def test_a_recorded_sample_comes_back_with_its_experts(tmp_path: Path, last: int) -> None:
    """Through a file: the experts of each token but the last, in one byte where they fit."""
    turns = (Turn("user", torch.tensor([1, 2])), Turn("assistant", torch.tensor([3]), torch.tensor([-0.5]), True))
    routes = torch.tensor([[[-1, -1], [0, 2]], [[-1, -1], [1, last]]], dtype=torch.int16)
    trajectory = Trajectory("p", 0, turns, ((1, 0, 3),), "stop", False, 3, (), routes)
    sample = TrajectoryRef.of(trajectory, None)
    prompt: Any = {"uid": "p", "task_name": "t", "extra_env_info": {}}
    score = Score(1.0, None, "", 0.0)
    files = SampleFiles(tmp_path, str, 1e9)
    files.add("train", 1, lambda: [sample_row(Group(prompt, (sample,), (score,)), sample, score, trajectory)])
    files.close()
    (row,) = read_samples(tmp_path / "train" / "step_000001.parquet")
    assert len(row["routes"]["experts"]) == (8 if last < 128 else 16)
    store = LocalCluster().store
    (group,) = recorded_groups([row], store)
    (back,) = store.fetch_many([group.samples[0].ref])
    assert back == trajectory and back.routed_experts.equal(routes) and back.routed_experts.dtype == torch.int16


def test_a_missing_metric_is_no_difference() -> None:
    one = Replay("one", {}, {"p#0": torch.zeros(3)})
    assert compare(one, computed(), "float32").first == (
        "the log-prob of token 1 of sample p#0: 0.000000 against -2.000000"
    )
    assert compare(one, one, "float32").ok
