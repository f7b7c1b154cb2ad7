"""Tables read with the `datasets` library: from the Hugging Face hub, a folder, or a Parquet or CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_mcore.data.interfaces import DataError

_FILE_TYPES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def is_local(path: str) -> bool:
    """Whether a path names a file or folder, present or not, rather than `organisation/name` on the hub."""
    return (
        Path(path).exists()
        or Path(path).suffix in (".jsonl", ".json", *_FILE_TYPES)
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    )


def load_table(path: str, subset: str | None, split: str | None, download_dir: str | None) -> Any:
    """A `datasets.Dataset`. Without `split`: the only one there is, else "train".

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
                raise DataError(f"{path}: unknown kind of file; known are .jsonl, .json, {', '.join(_FILE_TYPES)}")
            found = datasets.load_dataset(kind, data_files=path, cache_dir=download_dir)
        else:
            found = datasets.load_dataset(path, subset, cache_dir=download_dir)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot load the dataset {path!r}: {type(error).__name__}: {error}") from error
    table = _choose_split(found, split, path) if isinstance(found, dict) else found
    if len(table) == 0:
        raise DataError(f"{path}: the dataset is empty")
    return table


def _choose_split(found: dict[str, Any], split: str | None, path: str) -> Any:
    name = split or (next(iter(found)) if len(found) == 1 else "train")
    if name not in found:
        raise DataError(f"{path}: no split {name!r}; set split to one of {sorted(found)}")
    return found[name]
