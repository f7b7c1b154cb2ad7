"""Tables read with the `datasets` library: from the Hugging Face hub, a folder, or a Parquet or CSV file. Their rows
stay on disk until they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.jsonl import SUFFIXES
from grpo_mcore.recipe.errors import nearest

_FILE_TYPES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def is_local(path: str) -> bool:
    """Whether a path names a file or folder, present or not, rather than `organisation/name` on the hub."""
    return (
        Path(path).exists()
        or path.endswith((*SUFFIXES, *_FILE_TYPES))
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    )


def load_table(path: str, subset: str | None, split: str | None, download_dir: str | None) -> Any:
    """A `datasets.Dataset`. `split` may be a part of one, such as `train[:5%]`; without it: the only one there is,
    else "train".

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
            found = {split if split and split.isidentifier() else "train": rows["train"]}  # it is the split asked for
        else:
            found = datasets.load_dataset(path, subset, cache_dir=download_dir)
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"cannot load the dataset {path!r}{_of(subset)}: {reason}") from error
    table = _choose_split(found, split, path) if isinstance(found, dict) else found
    if len(table) == 0:
        raise DataError(f"{path}: the dataset is empty")
    return table


def _of(subset: str | None) -> str:
    return f", subset {subset!r}" if subset else ""


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
