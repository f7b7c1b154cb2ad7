"""Make groups from the rows that `sample_writer` has written: what a step was trained on, as it was."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from grpo_mcore.cluster import ObjectStore
from grpo_mcore.data import DatumSpec
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import ImageSpan, Score, Trajectory, TrajectoryRef, Turn

Row = Mapping[str, Any]
"""A sample: columns of observe/samples.py's SCHEMA."""


def recorded_groups(rows: Sequence[Row], store: ObjectStore) -> list[Group]:
    """Return the groups of these samples, whose trajectories are put into the store. Their prompts hold nothing but uid
    and task."""
    by_uid: dict[str, list[Row]] = {}
    for row in rows:
        by_uid.setdefault(row["uid"], []).append(row)
    return [
        recorded_group(
            cast(DatumSpec, {"uid": uid, "task_name": members[0]["task"], "extra_env_info": {}}), members, store
        )
        for uid, members in by_uid.items()
    ]


def recorded_group(prompt: DatumSpec, rows: Sequence[Row], store: ObjectStore) -> Group:
    """Return the group of a prompt, whose trajectories are put into the store. `rows`: the group's samples, in their
    order."""
    images = {file["digest"]: store.put(file["bytes"]) for row in rows for file in row.get("images") or ()}
    return Group(prompt, tuple(_reference(row, store, images) for row in rows), tuple(map(_score, rows)))


def sample_name(row: Row) -> str:
    """Return `uid#generation`."""
    return f"{row['uid']}#{row['generation']}"


def _reference(row: Row, store: ObjectStore, images: Mapping[str, Any]) -> TrajectoryRef:
    if row["turns"] is None:  # its rollout failed and left no tokens
        (version,) = [span["version"] for span in row["versions"] or [{"version": 0}]]
        return TrajectoryRef(
            row["uid"], row["generation"], 0, 0, 0, version, row["truncated"], row["finish_reason"], None, turns=0
        )
    trajectory = trajectory_of(row)
    files = {image.digest: images[image.digest] for image in trajectory.images()}
    return TrajectoryRef.of(trajectory, store.put(trajectory), files)


def trajectory_of(row: Row) -> Trajectory:
    """Return a recorded sample with its turns."""
    tokens = torch.tensor(row["token_ids"], dtype=torch.int64)
    of_engine = row.get("engine_logprobs")  # None: nothing was generated
    logprobs = torch.zeros(len(tokens)) if of_engine is None else torch.tensor(of_engine, dtype=torch.float32)
    turns, start = [], 0
    for turn in row["turns"]:
        span = slice(start, start + turn["tokens"])
        turn_logprobs = logprobs[span] if turn["generated"] else None
        images = tuple(ImageSpan(**image | {"grid": tuple(image["grid"])}) for image in turn.get("images") or ())
        about = turn["generated"], turn["text"], turn.get("flag") or "", images
        turns.append(Turn(turn["role"], tokens[span], turn_logprobs, *about))
        start += turn["tokens"]
    versions = tuple((span["version"], span["first"], span["end"]) for span in row["versions"])
    end, branches = (row["finish_reason"], row["truncated"], row["stop_token"]), tuple(row.get("branches") or ())
    return Trajectory(
        row["uid"], row["generation"], tuple(turns), versions, *end, branches, _routes(row.get("routes")),
        tuple(row.get("turn_numbers") or ()),
    )  # fmt: skip


def _routes(column: Mapping[str, Any] | None) -> Tensor | None:
    """Return the recorded experts of each token, int16; None if they were not recorded."""
    if column is None:
        return None
    size = len(column["experts"]) // math.prod(column["shape"])
    flat = np.frombuffer(column["experts"], np.int8 if size == 1 else np.int16)
    return torch.from_numpy(flat.astype(np.int16)).reshape(column["shape"])


def _score(row: Row) -> Score:
    return Score(
        row["reward"],
        row["answer"],
        row["reason"],
        row["score_seconds"],
        json.loads(row["rewards"]),
        row["terminated"],
        row.get("solved_at"),
        tuple(row.get("failures") or ()),
        tuple(row.get("turn_rewards") or ()),
        tuple(row.get("turn_states") or ()),
        tuple(row.get("step_rewards") or ()),
    )
