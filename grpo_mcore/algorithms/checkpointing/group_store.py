"""Finished groups that wait for their step, in a checkpoint: a resumed run trains on them, and generates anew only the
others.

One file a group, read and written one by one, so that the driver never holds more of their tokens than one group has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.cluster import Cluster
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.schedule import ScheduleConfig

FOLDER = "groups"


def write_groups(folder: Path, groups: Iterable[Group], cluster: Cluster) -> None:
    """Into `folder`/groups, with their trajectories."""
    for number, group in enumerate(groups):
        (folder / FOLDER).mkdir(exist_ok=True)
        samples = [(replace(sample, ref=None), cluster.fetch(sample.ref)) for sample in group.samples]
        torch.save({"uid": group.uid, "samples": samples, "scores": group.scores}, folder / FOLDER / f"{number:05d}.pt")


def read_groups(folder: Path, prompts: Sequence[Any], cluster: Cluster, wanted: Mapping[str, int]) -> dict[str, Group]:
    """By uid, those of `wanted` that `write_groups` has written. `prompts`: of the groups."""
    by_uid = {prompt["uid"]: prompt for prompt in prompts}
    groups = {}
    for path in sorted((folder / FOLDER).glob("*.pt")):
        saved = torch.load(path, weights_only=False)
        if saved["uid"] in wanted:
            samples = tuple(replace(sample, ref=cluster.put(trajectory)) for sample, trajectory in saved["samples"])
            groups[saved["uid"]] = Group(by_uid[saved["uid"]], samples, saved["scores"])
    return groups


def in_time(in_flight: Mapping[str, int], limits: ScheduleConfig, version: int) -> dict[str, int]:
    """The part of `in_flight` (uid -> weight version, in the order of dispatch) that is young enough for its step, when
    `version` trains next. The recipe may have changed since they were generated."""
    return {
        uid: generated
        for position, (uid, generated) in enumerate(in_flight.items())
        if version + position // limits.num_prompts - generated <= limits.max_trajectory_age
    }
