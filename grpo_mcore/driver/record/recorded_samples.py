"""Make groups from the rows that `sample_writer` has written: what a step was trained on, as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from grpo_mcore.cluster import ObjectStore
from grpo_mcore.data import DatumSpec
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, Trajectory, TrajectoryRef, Turn

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
    return Group(prompt, tuple(_reference(row, store) for row in rows), tuple(map(_score, rows)))


def sample_name(row: Row) -> str:
    """Return `uid#generation`."""
    return f"{row['uid']}#{row['generation']}"


def _reference(row: Row, store: ObjectStore) -> TrajectoryRef:
    if row["turns"] is None:  # its rollout failed and left no tokens
        (version,) = [span["version"] for span in row["versions"] or [{"version": 0}]]
        return TrajectoryRef(
            row["uid"], row["generation"], 0, 0, 0, version, row["truncated"], row["finish_reason"], None, turns=0
        )
    trajectory = _trajectory(row)
    return replace(TrajectoryRef.of(trajectory, store.put(trajectory)), cut_turns=row["cut_turns"])


def _trajectory(row: Row) -> Trajectory:
    tokens = torch.tensor(row["token_ids"], dtype=torch.int64)
    of_engine = row.get("engine_logprobs")  # None: nothing was generated
    logprobs = torch.zeros(len(tokens)) if of_engine is None else torch.tensor(of_engine, dtype=torch.float32)
    turns, start = [], 0
    for turn in row["turns"]:
        span = slice(start, start + turn["tokens"])
        turn_logprobs = logprobs[span] if turn["generated"] else None
        turns.append(
            Turn(turn["role"], tokens[span], turn_logprobs, turn["generated"], turn["text"], turn.get("flag") or "")
        )
        start += turn["tokens"]
    versions = tuple((span["version"], span["first"], span["end"]) for span in row["versions"])
    end, branches = (row["finish_reason"], row["truncated"], row["stop_token"]), tuple(row.get("branches") or ())
    return Trajectory(row["uid"], row["generation"], tuple(turns), versions, *end, branches, _routes(row.get("routes")))


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
    )
