"""Finished groups pass through a checkpoint unchanged; those too old for the current recipe are left out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_mcore.driver.checkpoints.group_store import read_groups, write_groups
from grpo_mcore.driver.run.loop_parts import young_enough
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.schedule import ScheduleConfig
from grpo_mcore.rollout.trajectory import ImageSpan, Score, Trajectory, TrajectoryRef, Turn
from tests.unit.driver.rollouts.fake_rollouts import Shuffling, prompt


def group(cluster: Shuffling, number: int) -> Group:
    samples = []
    for index in range(2):
        turns = (Turn("assistant", torch.tensor([number, index]), torch.zeros(2), loss_mask=True, text=""),)
        trajectory = Trajectory(f"p{number}", index, turns, ((3, 0, 2),), "stop", truncated=False, stop_token=None)
        samples.append(TrajectoryRef.of(trajectory, cluster.store.put(trajectory)))
    scores = tuple(Score(reward, None, "", 0.1, {"math": reward}) for reward in (0.0, 1.0))
    return Group(prompt(number), tuple(samples), scores)


def test_groups_come_back_with_their_trajectories(tmp_path: Path) -> None:
    first, then = Shuffling(0), Shuffling(0)
    then.store.put("something else")
    write_groups(tmp_path, [group(first, 4), group(first, 2), group(first, 9)], first)
    found = read_groups(tmp_path, [prompt(2), prompt(4)], then, {"p2": 3, "p4": 3}, range(2, 3))
    assert list(found) == ["p4", "p2"]
    back = found["p2"]
    assert back.prompt["uid"] == "p2" and back.weight_version == 3 and back.scores == group(first, 2).scores
    assert [then.store.fetch(sample.ref).token_ids().tolist() for sample in back.samples] == [[2, 0], [2, 1]]


def test_the_bytes_of_images_come_back_once_for_a_group(tmp_path: Path) -> None:
    first, then = Shuffling(0), Shuffling(0)
    turns = (Turn("user", torch.tensor([4, 6, 5]), images=(ImageSpan(1, 1, "cat", (1, 2, 2)),)),)
    samples, images = [], {"cat": first.store.put(b"bytes of a cat")}
    for index in range(2):
        trajectory = Trajectory("p2", index, turns, ((3, 0, 3),), "stop", truncated=False)
        samples.append(TrajectoryRef.of(trajectory, first.store.put(trajectory), images))
    write_groups(tmp_path, [Group(prompt(2), tuple(samples), group(first, 2).scores)], first)
    back = read_groups(tmp_path, [prompt(2)], then, {"p2": 3}, range(2, 3))["p2"]
    (of_first, of_second) = (sample.images["cat"] for sample in back.samples)
    assert of_first is of_second and then.store.fetch(of_first) == b"bytes of a cat"
    assert then.store.fetch(back.samples[1].ref).images() == turns[0].images


def test_groups_of_another_size_are_left_out(tmp_path: Path) -> None:
    """grpo.num_generations_per_prompt may have changed: their prompts are generated again."""
    cluster = Shuffling(0)
    write_groups(tmp_path, [group(cluster, 2)], cluster)
    for sizes, there in ((range(2, 3), True), (range(2, 9), True), (range(4, 5), False), (range(1, 2), False)):
        assert bool(read_groups(tmp_path, [prompt(2)], cluster, {"p2": 3}, sizes)) is there


def test_a_sample_without_a_trajectory_comes_back_without_one(tmp_path: Path) -> None:
    """No store can fetch None."""
    first, then = Shuffling(0), Shuffling(0)
    whole = group(first, 2)
    failed = replace(whole.samples[0], ref=None)
    write_groups(tmp_path, [Group(whole.prompt, (failed, whole.samples[1]), whole.scores)], first)
    back = read_groups(tmp_path, [prompt(2)], then, {"p2": 3}, range(2, 3))["p2"]
    assert back.samples[0].ref is None and then.store.fetch(back.samples[1].ref).token_ids().tolist() == [2, 1]


def test_none_were_written(tmp_path: Path) -> None:
    write_groups(tmp_path, [], Shuffling(0))
    assert not list(tmp_path.iterdir()) and read_groups(tmp_path, [], Shuffling(0), {}, range(2, 3)) == {}


@pytest.mark.parametrize(
    ("age", "young"), [(0, ["c"]), (1, ["b", "c"]), (2, ["a", "b", "c", "d"]), (3, ["a", "b", "c", "d"])]
)
def test_too_old_for_the_step_at_which_they_would_train(age: int, young: list[str]) -> None:
    """Two a step, version 5 trains next: a and b with it, c and d with version 6."""
    in_flight = {"a": 3, "b": 4, "c": 6, "d": 4}
    limits = ScheduleConfig(num_prompts=2, max_steps=9, max_trajectory_age=age)
    assert list(young_enough(in_flight, limits, 5)) == young
