"""The rows of a JSON file or of a table, with a name for every row.

Tables are read with the `datasets` library: from the Hugging Face hub, a folder, or a Parquet or CSV file. Rows stay on
disk until they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.data.datasets.jsonl import SUFFIXES, Check, is_json, read_json
from grpo_mcore.data.datasets.rows import Joined
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.recipe import nearest

_FILE_TYPES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


@dataclass(frozen=True)
class Source:
    """Rows that are read when they are asked for. `numbers[i]` identifies row i for good: by its line in a JSONL file,
    else by its position."""

    rows: Sequence[dict[str, Any]]
    numbers: Sequence[int]
    place: Callable[[int], str]
    """Index -> "train.jsonl:17" or "gsm8k, row 3", for error messages."""
    columns: tuple[str, ...] | None = None
    """Columns of a table; None for a JSON file, whose rows may differ."""


def open_source(
    path: str,
    check: Check,
    *,
    subset: str | None = None,
    split: str | None = None,
    download_dir: str | None = None,
) -> Source:
    """Open a JSONL or JSON file and check all its rows, or open a table and check its first row. Raises DataError."""
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
    """Concatenate several sources; rows are renumbered."""
    rows = Joined([source.rows for source in sources])

    def place(index: int) -> str:
        part, at = rows.locate(index)
        return sources[part].place(at)

    return sources[0] if len(sources) == 1 else Source(rows, range(len(rows)), place, sources[0].columns)


def missing(row: dict[str, Any], key: str) -> DataError:
    """Return the error for a row that lacks a field."""
    if key in row:
        return DataError(f"{key!r} is null")
    near = nearest(key, row)
    hint = f"; nearest: {near!r}" if near else ""
    return DataError(f"no {key!r} in it; it has {sorted(row)}{hint}")


def is_local(path: str) -> bool:
    """Return whether a path names a file or folder, present or not, and not `organisation/name` on the hub."""
    return (
        Path(path).exists()
        or path.endswith((*SUFFIXES, *_FILE_TYPES))
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    )


def load_table(path: str, subset: str | None, split: str | None, download_dir: str | None) -> Any:
    """Load a `datasets.Dataset`. `split` may be part of a split, such as `train[:5%]`; None takes the only split, or
    "train" where there are several.

    Raises DataError where there is no such file, dataset or split, or no row in it.
    """
    import datasets  # heavy, and not needed for JSONL

    local = is_local(path)
    if local and not Path(path).exists():
        raise DataError(f"data not found: {path}")
    try:
        if local and (Path(path) / "state.json").exists() or (Path(path) / "dataset_dict.json").exists():
            found = datasets.load_from_disk(path)
        elif local and Path(path).is_file():
            kind = _FILE_TYPES.get(Path(path).suffix)
            if kind is None:
                known = ", ".join((*SUFFIXES, *_FILE_TYPES))
                raise DataError(f"{path}: unknown kind of file; known are {known}")
            rows = datasets.load_dataset(kind, data_files=path, cache_dir=download_dir)
            name = split if split and split.isidentifier() else "train"  # a file is whatever split was asked for
            found = {name: rows["train"]}
        else:
            found = datasets.load_dataset(path, subset, cache_dir=download_dir)
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        subset_text = f", subset {subset!r}" if subset else ""
        raise DataError(f"cannot load the dataset {path!r}{subset_text}: {reason}") from error
    table = _choose_split(found, split, path) if isinstance(found, dict) else found
    if len(table) == 0:
        raise DataError(f"{path}: the dataset is empty")
    return table


def _choose_split(found: dict[str, Any], split: str | None, path: str) -> Any:
    import datasets

    name = split or (next(iter(found)) if len(found) == 1 else "train")
    if name in found:
        return found[name]
    try:
        wanted = datasets.ReadInstruction.from_spec(name).to_absolute({key: len(rows) for key, rows in found.items()})
    except (ValueError, AssertionError) as error:
        near = nearest(name, found)
        hint = f"; nearest: {near}" if near else ""
        raise DataError(f"{path}: no split {name!r}; set split to one of {sorted(found)}{hint}") from error
    parts = [found[part.splitname].select(range(part.from_, part.to)) for part in wanted]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
