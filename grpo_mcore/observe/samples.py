"""The samples of a run as files: one Parquet file a step, written by a thread, readable while the run goes on.

A file appears under its name when it is complete, so a run that is killed leaves only whole files behind. Writing never
stops training: the queue is bounded, what does not fit into it is dropped and counted, and an error is logged once.
"""

import contextlib
import json
import logging
import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_mcore.base.files import FORMATS, newer_format
from grpo_mcore.observe.append_file import AppendFile
from grpo_mcore.observe.run_folder import DAMAGE, TOKENS_FILE, open_file, read_token_texts, reason_of

logger = logging.getLogger(__name__)

Kind = Literal["train", "validation"]
Row = Mapping[str, Any]

SAMPLES_FOLDER = "samples"
QUEUED = 256
"""Maximum number of groups and steps that wait for the writer."""
NEWEST = 10
"""Newest files of training samples that are never deleted to make room."""
WRITTEN_TOGETHER = 64
"""Samples that the writer holds at a time."""
CLOSE_S = 60.0
"""Seconds that the end of a run waits for samples that are not written yet."""

_IMAGE = pa.struct(
    [("offset", pa.int32()), ("length", pa.int32()), ("digest", pa.string()), ("grid", pa.list_(pa.int32()))]
)
_TURN = pa.struct(
    [
        ("role", pa.string()),
        ("text", pa.string()),
        ("tokens", pa.int32()),
        ("generated", pa.bool_()),
        ("flag", pa.string()),  # rollout.trajectory.FLAGS; null: none
        ("images", pa.list_(_IMAGE)),  # rollout.trajectory.ImageSpan; null: none
    ]
)
_ROUTES = pa.struct([("shape", pa.list_(pa.int32())), ("experts", pa.binary())])
_FILE = pa.struct([("digest", pa.string()), ("bytes", pa.binary())])
_SPAN = pa.struct([("version", pa.int32()), ("first", pa.int32()), ("end", pa.int32())])


class SamplesError(ValueError):
    """A file of samples cannot be read, or not by this version."""


_FORMAT = b"grpo_mcore.format"

SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("generation", pa.int32()),
        ("task", pa.string()),
        ("truth", pa.string()),
        ("reward", pa.float64()),  # null: scoring failed
        ("rewards", pa.string()),  # JSON: rewards by name
        ("answer", pa.string()),
        ("reason", pa.string()),
        ("score_seconds", pa.float64()),
        ("terminated", pa.bool_()),
        ("solved_at", pa.float64()),  # reward from which on it is solved; null: its environment names none
        ("failures", pa.list_(pa.string())),  # of attempts to score it: "COMPONENT: KIND"
        ("finish_reason", pa.string()),
        ("truncated", pa.bool_()),
        ("stop_token", pa.int64()),
        ("turn_rewards", pa.list_(pa.float64())),  # score of the state after each generated turn, or null; null: none
        ("turn_states", pa.list_(pa.string())),  # key of the state in which each generated turn was taken
        ("step_rewards", pa.list_(pa.float64())),  # part of the reward that each generated turn got; null: of an agent
        ("turn_credits", pa.list_(pa.float64())),  # added to the advantage of each generated turn; then zeros
        ("left_out", pa.string()),  # why no step trained on its group; null: one did
        ("weight", pa.float64()),  # 1: counts in the loss, 0: masked; null: not trained on
        ("advantage", pa.float64()),
        ("unclipped_advantage", pa.float64()),  # (shaped_reward - baseline) / scale; null: of several terms, or custom
        ("shaped_reward", pa.float64()),  # as the estimator got it: scaled, shaped, with a KL that is in the reward
        ("baseline", pa.float64()),
        ("scale", pa.float64()),  # standard deviation with its eps; 1: not divided
        ("group_size", pa.int32()),  # samples of its group that have a reward
        ("terms", pa.string()),  # JSON, of several: weight * (reward - baseline) / scale by name, over step_scale
        ("step_scale", pa.float64()),
        ("kl_weight", pa.float64()),  # above 0: of the KL to the end that each token's advantage is less
        ("teacher_part", pa.float64()),  # that teachers add to it, the mean over the sample's tokens; null: no teacher
        ("clip_low", pa.float64()),  # bounds of the advantage; null: none
        ("clip_high", pa.float64()),
        ("columns", pa.string()),  # JSON: the columns of its row, long values cut off
        ("trained_version", pa.int32()),  # weight version that trained on it
        ("versions", pa.list_(_SPAN)),  # weight versions that generated its tokens
        ("turns", pa.list_(_TURN)),
        ("branches", pa.list_(pa.int32())),  # tokens of each branch, which stand side by side; empty: one
        ("turn_numbers", pa.list_(pa.int32())),  # of each generated turn, in time; null: as they stand
        ("token_ids", pa.list_(pa.int32())),
        ("engine_logprobs", pa.list_(pa.float32())),  # 0 where not generated
        ("policy_logprobs", pa.list_(pa.float32())),  # before the update; 0 where not trained on
        ("reference_logprobs", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("images", pa.list_(_FILE)),  # as they were given: those that no earlier sample of its group has; null: none
        ("routes", _ROUTES),  # with policy.router_replay: int8 or int16 [length - 1, layers, top-k]
    ]
)
"""Columns of a file. A row is a sample; lists are by token, prompt included."""

ALWAYS = ("uid", "generation")
"""Columns that are in every file."""

TOKEN_COLUMNS = ("token_ids", "engine_logprobs", "policy_logprobs", "reference_logprobs", "teacher_logprobs")


class SampleFiles:
    """Writes samples to `folder`/KIND/step_NNNNNN.parquet, and the text of each token to `folder`/tokens.jsonl.

    `decode`: returns the text of a token id. `max_bytes`: above it every second of the older files is deleted, so that
    those left are spread over the run.
    """

    def __init__(self, folder: Path, decode: Callable[[int], str], max_bytes: float) -> None:
        self._folder, self._decode, self._max_bytes = folder, decode, max_bytes
        self._jobs: queue.Queue[tuple[Kind, int, Callable[[], Iterable[Row]], bool] | None] = queue.Queue(QUEUED)
        self._open: dict[tuple[Kind, int], pq.ParquetWriter] = {}  # files that are not complete
        self._tokens: AppendFile | None = None
        self._known: set[int] = set()
        self._complained = False
        self._bytes: int | None = None  # of the files of training samples; of a resumed run not known at first
        self.dropped = 0
        """Number of groups and steps whose samples were not written."""
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def add(self, kind: Kind, step: int, rows: Callable[[], Iterable[Row]], *, last: bool = True) -> None:
        """Write what `rows` returns, which the writer's thread calls; a few at a time, so that they may be made one by
        one. `last`: the step's file is complete with them. Never waits, never raises."""
        try:
            self._jobs.put_nowait((kind, step, rows, last))
        except queue.Full:
            self._drop("the writer is slower than the run")

    def close(self) -> None:
        """Write what is queued, and end the thread. May be called again. Waits up to CLOSE_S."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(*job)
            except Exception as error:  # observation must not stop training, whatever goes wrong here
                self._drop(f"{type(error).__name__}: {error}")
        for kind, step in list(self._open):  # of steps that did not come to an end
            self._discard(kind, step)
        if self._tokens is not None:
            self._tokens.close()

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        if not self._complained:
            self._complained = True
            logger.warning("samples are not written to %s: %s; the run goes on (said only once)", self._folder, reason)

    def _do(self, kind: Kind, step: int, rows: Callable[[], Iterable[Row]], last: bool) -> None:
        try:
            left = iter(rows())
            while few := list(islice(left, WRITTEN_TOGETHER)):
                self._write_tokens(few)
                self._writer(kind, step).write_table(_table(few))
                del few  # before the next ones are made
        except BaseException:
            if last:
                self._discard(kind, step)
            raise
        if last and (kind, step) in self._open:
            self._open.pop((kind, step)).close()
            path = self._path(kind, step)
            partial = _partial(path)
            size = partial.stat().st_size
            partial.replace(path)
            if kind == "train":
                self._make_room(size)

    def _path(self, kind: Kind, step: int) -> Path:
        return self._folder / kind / f"step_{step:06d}.parquet"

    def _writer(self, kind: Kind, step: int) -> pq.ParquetWriter:
        if (kind, step) not in self._open:
            path = self._path(kind, step)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without dictionaries it takes two thirds of the time, and such small files are smaller.
            writer = pq.ParquetWriter(_partial(path), SCHEMA, compression="zstd", use_dictionary=False)
            self._open[kind, step] = writer
        return self._open[kind, step]

    def _discard(self, kind: Kind, step: int) -> None:
        """Give up a file that is not complete."""
        if (writer := self._open.pop((kind, step), None)) is not None:
            partial = _partial(self._path(kind, step))
            for give_up in (writer.close, partial.unlink):
                with contextlib.suppress(OSError):  # of a full disk or one that is gone, which is said already
                    give_up()

    def _write_tokens(self, rows: Sequence[Row]) -> None:
        """Append the text of each token that was not seen before."""
        if self._tokens is None:
            path = self._folder / TOKENS_FILE
            self._tokens = AppendFile(path)
            self._known = set(read_token_texts(self._folder))
        self._tokens.restore()
        seen = np.unique(np.concatenate([row["token_ids"] for row in rows])).tolist()
        for token in sorted(set(seen) - self._known):
            self._tokens.write(json.dumps([token, self._decode(token)]))
        self._known.update(seen)

    def _make_room(self, written: int) -> None:
        """Delete every second file, but the newest, while all together are above `max_bytes`. `written`: bytes of the
        newest one; the folder is looked through only where there may be too many."""
        if self._bytes is not None:
            self._bytes += written
            if self._bytes <= self._max_bytes:
                return
        paths = sorted(self._folder.glob("train/step_*.parquet"))
        size = sum(path.stat().st_size for path in paths)
        while size > self._max_bytes and (doomed := paths[:-NEWEST][::2]):
            for path in doomed:
                size -= path.stat().st_size
                path.unlink()
            paths = [path for path in paths if path not in doomed]
        self._bytes = size


def _partial(path: Path) -> Path:
    """Return the name of a file that is not complete. Whoever reads the folder as a table, such as pandas, passes over
    what begins with a dot."""
    return path.with_name(f".{path.stem}.tmp")


def _table(rows: Sequence[Row]) -> pa.Table:
    columns = []
    for field in SCHEMA:
        values = [row.get(field.name) for row in rows]
        if field.name in TOKEN_COLUMNS:
            columns.append(_list_column(values, field.type))
        else:
            columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=SCHEMA.with_metadata({_FORMAT: str(FORMATS["samples"])}))


def _list_column(values: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """Return arrays [length] of samples as a column, without a Python object a token."""
    parts = [np.empty(0) if value is None else value for value in values]
    ends = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    missing = pa.array([value is None for value in values])
    flat = pa.array(np.concatenate(parts).astype(kind.value_type.to_pandas_dtype()))
    return pa.ListArray.from_arrays(pa.array(ends), flat, type=kind, mask=missing)


def sample_steps(run: Path, kind: Kind) -> dict[int, Path]:
    """Return the files of samples of a run's log folder, by step."""
    files = {}
    for path in sorted((run / SAMPLES_FOLDER / kind).glob("step_*.parquet")):
        if number := re.fullmatch(r"step_(\d+)", path.stem):
            files[int(number[1])] = path
    return files


def read_samples(
    path: Path, columns: Sequence[str] | None = None, uids: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return the samples of a file as plain values, all columns or some, of all prompts or some. Raises SamplesError
    for a file of a newer format, and for a damaged one."""
    filters = None if uids is None else [("uid", "in", list(uids))]
    try:
        with open_file(path) as file:
            table = pq.read_table(file, columns=None if columns is None else list(columns), filters=filters)
        table.validate(full=True)
        written = (table.schema.metadata or {}).get(_FORMAT)
        if (problem := newer_format("samples", None if written is None else int(written))) is not None:
            raise SamplesError(f"{path} was {problem}")
        _check_columns(table, columns)
        return table.to_pylist()
    except SamplesError:
        raise
    except (pa.ArrowException, *DAMAGE) as error:
        cause = reason_of(error)
        raise SamplesError(f"{path} cannot be read: {cause}; it may be cut off: copy it again, or remove it") from error


def bytes_and_images(path: Path) -> tuple[int, int]:
    """Return the size of a file without the images in it, and how many these are. Raises as the reading of a damaged
    file does."""
    columns = [column for group in pq.read_metadata(path).to_dict()["row_groups"] for column in group["columns"]]
    digests = [column for column in columns if column["path_in_schema"] == "images.list.element.digest"]
    size = sum(c["total_compressed_size"] for c in columns if not c["path_in_schema"].startswith("images."))
    return size, sum(column["num_values"] - column["statistics"]["null_count"] for column in digests)


def _check_columns(table: pa.Table, columns: Sequence[str] | None) -> None:
    """Raise ValueError for a table without samples' columns, with others of their names, or with null where each sample
    has a value. Older files lack newer columns."""
    needed = set(ALWAYS) & set(columns or ALWAYS)
    if missing := needed - set(table.column_names):
        raise ValueError(f"it has no column {min(missing)}")
    for name in table.column_names:
        known = SCHEMA.field(name).type if name in SCHEMA.names else table.schema.field(name).type
        if table.schema.field(name).type != known and not pa.types.is_nested(known):  # fields were added to some
            raise ValueError(f"its column {name} is {table.schema.field(name).type}, not {known}")
        if name == "uid" and table.column(name).null_count:
            raise ValueError(f"its column {name} has nulls")


def generated_mask(turns: Sequence[Mapping[str, Any]], length: int) -> list[bool]:
    """Return for each token of a sample whether it was generated. Raises ValueError where the turns are not `length`
    tokens: those of a damaged file may claim billions."""
    if (total := sum(turn["tokens"] for turn in turns)) != length:
        raise ValueError(f"the turns of a sample have {total} tokens, and the sample has {length}")
    return [turn["generated"] for turn in turns for _ in range(turn["tokens"])]
