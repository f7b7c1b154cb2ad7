"""Where rows come from: a JSON file or a table, with a name for every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.data.hub import is_local, load_table
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.jsonl import is_json, read_json
from grpo_mcore.data.rows import Joined
from grpo_mcore.recipe.errors import nearest


@dataclass(frozen=True)
class Source:
    """`rows[i]` is read when it is asked for. `numbers[i]` names it for good: the line of a JSONL file, else the
    row."""

    rows: Sequence[dict[str, Any]]
    numbers: Sequence[int]
    place: Callable[[int], str]
    """Index -> "train.jsonl:17" or "gsm8k, row 3", for messages."""
    columns: tuple[str, ...] | None = None
    """Of a table: the same in every row."""


def open_source(
    path: str,
    check: Callable[[dict[str, Any], str], None],
    *,
    subset: str | None = None,
    split: str | None = None,
    download_dir: str | None = None,
) -> Source:
    """A JSONL or JSON file, checked row by row, or a table of the `datasets` library, of which the first row is.

    Raises DataError.
    """
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    if is_local(path) and is_json(path):
        if split is not None and not split.isidentifier():
            raise DataError(f"{path}: split {split!r} is for tables; a JSON file is read whole")
        rows, numbers = read_json(Path(path), check)
        return Source(rows, numbers, lambda index: f"{path}:{numbers[index]}")
    table = load_table(path, subset, split, download_dir)
    check(table[0], f"{path}, row 0")
    return Source(table, range(len(table)), lambda index: f"{path}, row {index}", tuple(table.column_names))


def joined(sources: Sequence[Source]) -> Source:
    """Several sources, one after the other, as one; rows are numbered anew."""
    rows = Joined([source.rows for source in sources])

    def place(index: int) -> str:
        part, at = rows.locate(index)
        return sources[part].place(at)

    return sources[0] if len(sources) == 1 else Source(rows, range(len(rows)), place, sources[0].columns)


def missing(row: dict[str, Any], key: str) -> DataError:
    """A row that lacks a field."""
    if key in row:
        return DataError(f"{key!r} is null")
    near = nearest(key, row)
    hint = f"; nearest: {near!r}" if near else ""
    return DataError(f"no {key!r} in it; it has {sorted(row)}{hint}")
