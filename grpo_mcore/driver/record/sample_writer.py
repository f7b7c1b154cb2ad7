"""Write the samples of a run to their files (observe/samples.py): what was generated, rewarded and trained on."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from grpo_mcore.base.text import replaced
from grpo_mcore.cluster import Cluster, Future
from grpo_mcore.driver.policy.policy_group import logprobs_by_sample
from grpo_mcore.objective import AdvantageEstimate
from grpo_mcore.observe.samples import SAMPLES_FOLDER, SampleFiles
from grpo_mcore.recipe import GRPOLoggerConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, Trajectory, TrajectoryRef
from grpo_mcore.step.step_batch import TrainTargets

SAMPLED_PROMPTS = 4
"""Prompts of each step whose samples are written with logger.samples = sampled."""
GB = 1e9
LONGEST_COLUMN = 300
"""Maximum number of characters written of a column of a sample's row."""
_NO_COLUMNS = ("messages", "ground_truth")  # which the turns and the truth show


class SampleSink(Protocol):
    """Takes what a step has computed of its samples."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether `trained` does anything."""

    def trained(self, step: int, groups: Sequence[Group], targets: TrainTargets, logprobs: Sequence[Future]) -> None:
        """Take the samples of a step. `targets` are by sample index, in the order of the groups; `logprobs` come from
        `PolicyGroup.token_logprobs`."""


class SampleWriter:
    """Records the samples of every step and validation, as logger.samples asks for.

    The tokens are fetched by the writer's thread, so the loop does not wait for them, and of one group at a time.
    """

    def __init__(
        self, config: GRPOLoggerConfig, log_dir: Path, cluster: Cluster, tokenizer: Any, *, decodes: bool = False
    ) -> None:
        """`decodes`: decode the turns' texts from their tokens, for examples, whose turns have no text."""
        self._cluster = cluster
        self._decode_turn = tokenizer.decode if decodes else None
        self._most = {"all": None, "sampled": SAMPLED_PROMPTS, "none": 0}[config.samples]
        self._files = None
        if config.samples != "none":
            decode: Callable[[int], str] = lambda token: tokenizer.decode([token])  # noqa: E731
            self._files = SampleFiles(log_dir / SAMPLES_FOLDER, decode, config.max_samples_gb * GB)
        self._write_step: Callable[[], None] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether `trained` writes anything."""
        return self._files is not None

    def left_out(self, step: int, group: Group, reason: str) -> None:
        """Record a group that is generated for `step`, on which no step trains."""
        if self._files is not None and self._most is None:
            self._files.add("train", step, partial(self._rows, [group], left_out=reason), last=False)

    def trained(self, step: int, groups: Sequence[Group], targets: TrainTargets, logprobs: Sequence[Future]) -> None:
        """Record the samples of a step; they are written once `generating` is called. See `SampleSink.trained`."""
        if self._files is None:
            return
        self.generating()
        advantages = targets.sample_advantages()
        columns: dict[str, list[Any]] = {"weight": targets.weights.tolist()}
        if advantages is not None:
            columns["advantage"] = advantages.tolist()
        if targets.estimate is not None:
            columns |= advantage_columns(targets.estimate, targets.clip)
        if targets.turn_credits is not None:
            columns["turn_credits"] = targets.turn_credits.tolist()
        if targets.teacher_gaps is not None:
            columns["teacher_part"] = (targets.teacher_weight * targets.teacher_gaps).tolist()
        rows = partial(self._trained_rows, groups, step, columns, logprobs)
        self._write_step = partial(self._files.add, "train", step, rows)

    def generating(self) -> None:
        """Write the samples of the last step, while the engines generate: the policy's ranks need no processor then."""
        if self._write_step is not None:
            self._write_step()
            self._write_step = None

    def validated(self, step: int, groups: Sequence[Group]) -> None:
        """Record the samples of a validation after `step`."""
        if self._files is not None:
            self._files.add("validation", step, partial(self._rows, groups))

    def close(self) -> None:
        """Write what is left."""
        self.generating()
        if self._files is not None:
            self._files.close()

    def _trained_rows(
        self, groups: Sequence[Group], step: int, columns: Mapping[str, list[Any]], logprobs: Sequence[Future]
    ) -> Iterator[dict[str, Any]]:
        by_index, first, indices = logprobs_by_sample(logprobs), 0, list[int]()
        for position, group in enumerate(groups):
            if self._chosen(position, len(groups)):
                indices += range(first, first + len(group.samples))
            first += len(group.samples)
        for row, index in zip(self._rows(groups), indices, strict=True):
            row |= {"trained_version": step} | {name: values[index] for name, values in columns.items()}
            row |= {f"{name}_logprobs": values for name, values in by_index.pop(index, {}).items()}
            yield row

    def _rows(self, groups: Sequence[Group], left_out: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the samples as rows. Of one group at a time the tokens are here."""
        chosen = [group for position, group in enumerate(groups) if self._chosen(position, len(groups))]
        for group in chosen:
            fetched = iter(self._cluster.store.fetch_many([s.ref for s in group.samples if s.ref is not None]))
            unwritten = {digest: ref for sample in group.samples for digest, ref in sample.images.items()}
            for sample, score in zip(group.samples, group.scores, strict=True):
                trajectory = None if sample.ref is None else next(fetched)
                row = sample_row(group, sample, score, trajectory, self._decode_turn) | {"left_out": left_out}
                if new := {digest: unwritten.pop(digest) for digest in sample.images if digest in unwritten}:
                    files = zip(new, self._cluster.store.fetch_many(list(new.values())), strict=True)
                    row["images"] = [{"digest": digest, "bytes": file} for digest, file in files]
                yield row

    def _chosen(self, position: int, count: int) -> bool:
        """Return whether the group at this position is one of SAMPLED_PROMPTS, evenly spaced."""
        return self._most is None or position * self._most // count != (position - 1) * self._most // count


def advantage_columns(estimate: AdvantageEstimate, clip: tuple[float | None, float | None]) -> dict[str, list[Any]]:
    """Return what a person needs to compute each sample's advantage by hand, as columns of `SCHEMA`."""
    groups, count = estimate.groups, len(estimate.advantages)
    columns: dict[str, list[Any]] = {
        "group_size": groups.size[groups.index].tolist(),
        "kl_weight": [estimate.kl_weight] * count,
        "clip_low": [clip[0]] * count,
        "clip_high": [clip[1]] * count,
    }
    numbers: dict[str, list[list[float | None]]] = {
        name: [_known(values) for values in (term.rewards, term.baseline, term.scale)]
        for name, term in estimate.terms.items()
    }
    if list(numbers) == [""]:
        columns |= dict(zip(("shaped_reward", "baseline", "scale"), numbers[""], strict=True))
        columns["unclipped_advantage"] = estimate.advantages.tolist()
    elif numbers:
        columns["step_scale"] = [estimate.scale] * count
        columns["terms"] = []
        for index in range(count):
            terms: dict[str, dict[str, float | None]] = {}
            for name, term in estimate.terms.items():
                reward, baseline, scale = (values[index] for values in numbers[name])
                terms[name] = {"weight": term.weight, "reward": reward, "baseline": baseline, "scale": scale}
            columns["terms"].append(json.dumps(terms))
    return columns


def _known(values: Tensor) -> list[float | None]:
    """Return the values of a tensor; None for those of failed samples, which are NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def _cut(value: Any) -> Any:
    """Return a value of a row as JSON has it: NaN as null, long ones as the beginning of their text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= LONGEST_COLUMN else text[:LONGEST_COLUMN] + " ..."


def sample_row(
    group: Group,
    sample: TrajectoryRef,
    score: Score,
    trajectory: Trajectory | None,
    decode: Callable[[list[int]], str] | None = None,
) -> dict[str, Any]:
    """Return a sample as a row of `SCHEMA`. `trajectory` None: its rollout failed and left no tokens. `decode`: returns
    the text of a turn's tokens, for turns that do not have it."""
    info = group.prompt["extra_env_info"]
    truth = info.get("ground_truth")
    row = {
        "uid": sample.uid,
        "generation": sample.generation_index,
        "task": group.prompt["task_name"],
        "truth": None if truth is None else replaced(str(truth)),
        "reward": score.reward,
        "rewards": json.dumps(score.rewards_by_name),
        "answer": score.answer,
        "reason": score.reason,
        "score_seconds": score.seconds,
        "terminated": score.terminated,
        "solved_at": score.solved_at,
        "failures": score.failures,
        "finish_reason": sample.finish_reason,
        "truncated": sample.truncated,
        "stop_token": sample.stop_token,
        "turn_rewards": score.turn_rewards or None,
        "turn_states": score.turn_states or None,
        "step_rewards": score.step_rewards or None,
        "token_ids": [],
        "columns": json.dumps({name: _cut(value) for name, value in info.items() if name not in _NO_COLUMNS}),
    }
    if trajectory is None:
        row["versions"] = [{"version": sample.weight_version, "first": 0, "end": 0}]
    else:
        tokens = [turn.token_ids.numpy() for turn in trajectory.turns]  # in numpy, which is faster on short rows
        logprobs = [
            np.zeros(ids.size, np.float32) if turn.logprobs is None else turn.logprobs.numpy()
            for turn, ids in zip(trajectory.turns, tokens, strict=True)
        ]
        row |= {
            "versions": [
                {"version": version, "first": first, "end": end} for version, first, end in trajectory.weight_versions
            ],
            "turns": [
                {
                    "role": turn.role,
                    "text": turn.text if decode is None else decode(ids.tolist()),
                    "tokens": ids.size,
                    "generated": turn.loss_mask,
                    "flag": turn.flag or None,
                    "images": [vars(image) for image in turn.images] or None,
                }
                for turn, ids in zip(trajectory.turns, tokens, strict=True)
            ],
            "branches": trajectory.branches,
            "turn_numbers": trajectory.turn_numbers or None,
            "token_ids": np.concatenate(tokens),
        }
        if any(turn.logprobs is not None for turn in trajectory.turns):
            row["engine_logprobs"] = np.concatenate(logprobs)
        if trajectory.routed_experts is not None:
            row["routes"] = packed_routes(trajectory.routed_experts)
    return row


def packed_routes(routes: Tensor) -> dict[str, Any]:
    """Return the experts of each token (int16, -1 where there are none) as the column `routes` of `SCHEMA`."""
    small = bool((routes < 128).all())
    return {"shape": list(routes.shape), "experts": routes.numpy().astype(np.int8 if small else np.int16).tobytes()}
