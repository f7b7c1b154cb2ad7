"""The rows of a JSON file or of a table, with a name for every row.

Tables are read with the `datasets` library: from the Hugging Face hub, a folder, or a Parquet or CSV file. Rows stay on
disk until they are read.
"""

from __future__ import annotations

import csv
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from glob import glob, has_magic
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from uuid import UUID

import numpy as np

from grpo_mcore.data.datasets.jsonl import SUFFIXES, Check, is_json, read_json
from grpo_mcore.data.datasets.rows import Joined
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.recipe import nearest
from grpo_mcore.rollout.datum import field_of

log = logging.getLogger(__name__)

_FILE_TYPES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
_OTHER_FILES = (".txt", ".xlsx", ".pkl", ".npz", ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar")  # which are not read
_HUB = "hf://datasets/"
_POINTER = b"version https://git-lfs"
_LARGEST_POINTER = 1024  # bytes
_TRIED_ROWS = 1_000
_REASON = 300  # characters of an error of `datasets`


@dataclass(frozen=True)
class Source:
    """Rows that are read when they are asked for. `numbers[i]` identifies row i for good: by its line in a JSONL file,
    else by its position."""

    rows: Sequence[dict[str, Any]]
    numbers: Sequence[int]
    place: Callable[[int], str]
    """Index -> "train.jsonl:17" or "gsm8k, row 3", for error messages."""

    def refuse_if_none_passes(self, check: Check) -> None:
        """Raise the error of the first row if none of the first rows passes: a wrong key is said at once. Other rows
        that do not pass cost themselves when they are read."""
        first: DataError | None = None
        for index in range(min(len(self.rows), _TRIED_ROWS)):
            try:
                check(self.rows[index], self.place(index))
            except DataError as error:
                first = first or error
            else:
                return
        if first is not None:
            raise first


def open_source(
    path: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    download_dir: str | None = None,
    separator: str | None = None,
) -> Source:
    """Open a JSONL or JSON file and parse all its rows, open a table, or all files that a pattern matches. Raises
    DataError."""
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    if is_address(path):
        path = _download(path, download_dir)
    elif path.startswith(_HUB):
        path = _from_hub(path)
    elif "://" in path:
        raise DataError(f"{path}: addresses are read that begin with https:// or {_HUB}; copy others to a folder first")
    elif has_magic(path) and not Path(path).exists():
        if not (files := sorted(glob(path, recursive=True))):
            raise DataError(f"no file matches {path}" + ("" if Path(path).is_absolute() else f" in {Path.cwd()}"))
        if split is not None and not split.isidentifier():
            raise DataError(f"{path}: split {split!r} is a part of one table, and the pattern is for several files")
        return joined(
            [open_source(file, split=split, download_dir=download_dir, separator=separator) for file in files]
        )
    if is_local(path):
        _refuse_pointers(Path(path))
    if is_local(path) and is_json(path):
        if split is not None and not split.isidentifier():
            raise DataError(f"{path}: split {split!r} is for tables; a JSON file is read whole")
        rows, numbers = read_json(Path(path))
        return Source(rows, numbers, lambda index: f"{path}:{numbers[index]}")
    table = load_table(path, subset, split, download_dir, separator)
    return Source(Table(table), range(len(table)), lambda index: f"{path}, row {index}")


class Table(Sequence[dict[str, Any]]):
    """The rows of a `datasets.Dataset` as plain values."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self._is_single = any(f"'float{bits}'" in str(table.features) for bits in (16, 32))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = self.table[index]
        if self._is_single:
            row = _shortest(row, self.table.features)
        return {name: plain(value) for name, value in row.items()}


def _shortest(value: Any, feature: Any) -> Any:
    """Return a value whose numbers of half and single precision have the digits that they were written with: 0.1 of
    float32, as a number of double precision, is 0.10000000149011612, which no answer equals. `feature`: its type."""
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        return {name: _shortest(item, feature.get(name)) for name, item in value.items()}
    if isinstance(value, list):
        of_items = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_shortest(item, of_items) for item in value]
    if isinstance(value, float) and getattr(feature, "dtype", None) in ("float16", "float32"):
        return float(str(np.dtype(feature.dtype).type(value)))
    return value


def plain(value: Any, *, nulls: bool = False) -> Any:
    """Return a table's value as JSON has it: arrays as lists, dates and decimal numbers as text, and records without
    the fields that are null, unless `nulls` are to stay. In a table every record has the fields of all, and a chat
    template would show them."""
    if isinstance(value, dict):
        return {key: plain(item, nulls=nulls) for key, item in value.items() if nulls or item is not None}
    if isinstance(value, list):
        return [plain(item, nulls=nulls) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), nulls=nulls)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes) and not not_text(value):
        return value.decode()
    return str(value) if isinstance(value, Decimal | timedelta | UUID) else value


def not_text(value: bytes) -> bool:
    """Return whether bytes are no text: columns of text that another program wrote may be binary ones."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False


def joined(sources: Sequence[Source]) -> Source:
    """Concatenate several sources; rows are renumbered."""
    rows = Joined([source.rows for source in sources])

    def place(index: int) -> str:
        part, at = rows.locate(index)
        return sources[part].place(at)

    return sources[0] if len(sources) == 1 else Source(rows, range(len(rows)), place)


def required(row: dict[str, Any], key: str) -> Any:
    """Return the value of a field. Raises DataError where there is none."""
    value = field_of(row, key)
    if value is None:
        raise missing(row, key)
    return value


def missing(row: dict[str, Any], key: str) -> DataError:
    """Return the error for a row that lacks a field."""
    inside, where, part = row, "it", key
    for part in [key] if key in row else key.split("."):
        if part not in inside:
            near = nearest(part, inside)
            hint = f"; nearest: {near!r}" if near else ""
            return DataError(f"no {part!r} in {where}; it has {sorted(inside)}{hint}")
        if not isinstance(inside[part], dict):
            break
        inside, where = inside[part], repr(part)
    null = isinstance(inside, dict) and inside.get(part) is None
    return DataError(f"{key!r} is null" if null else f"{key!r} leads to nothing")


def is_address(path: str) -> bool:
    """Return whether a path is the address of a file on the net."""
    return path.startswith(("https://", "http://"))


def _download(address: str, folder: str | None) -> str:
    """Return the file at an address, downloaded once into a folder (None: the cache of `datasets`). Raises
    DataError."""
    import datasets

    suffix = Path(address.partition("?")[0]).suffix
    if suffix not in (*SUFFIXES, *_FILE_TYPES):
        raise DataError(f"{address}: unknown kind of file; known are {', '.join((*SUFFIXES, *_FILE_TYPES))}")
    file = Path(folder or datasets.config.HF_DATASETS_CACHE) / (sha256(address.encode()).hexdigest() + suffix)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        try:
            with urlopen(address, timeout=60) as answer, part.open("wb") as out:
                shutil.copyfileobj(answer, out)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise DataError(f"cannot download {address} ({error}); give a copy of it as data_path") from error
        part.rename(file)
    return str(file)


def _from_hub(address: str) -> str:
    """Return a file of a dataset on the hub, hf://datasets/ORGANISATION/NAME[@REVISION]/FILE, in the hub's cache.
    Raises DataError."""
    from huggingface_hub import hf_hub_download

    organisation, _, rest = address.removeprefix(_HUB).partition("/")
    name, _, file = rest.partition("/")
    name, _, revision = name.partition("@")
    if not file or has_magic(file):
        raise DataError(f"{address}: name one file, {_HUB}ORGANISATION/NAME/FILE, or ORGANISATION/NAME without {_HUB}")
    try:
        return hf_hub_download(f"{organisation}/{name}", file, repo_type="dataset", revision=revision or None)
    except Exception as error:  # of the hub, of the net, or of a name that is none
        reason = " ".join(str(error).split())[:_REASON]
        raise DataError(f"cannot download {address}: {type(error).__name__}: {reason}") from error


def is_local(path: str) -> bool:
    """Return whether a path names a file or folder, present or not, and not `organisation/name` on the hub."""
    return (
        Path(path).exists()
        or path.lower().endswith((*SUFFIXES, *_FILE_TYPES, *_OTHER_FILES))
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    )


def load_table(
    path: str, subset: str | None, split: str | None, download_dir: str | None, separator: str | None = None
) -> Any:
    """Load a `datasets.Dataset`. `split` may be part of a split, such as `train[:5%]`; None takes the only split, or
    "train" where there are several.

    Raises DataError where there is no such file, dataset or split, or no row in it.
    """
    import datasets  # heavy, and not needed for JSONL

    local = is_local(path)
    if local and not Path(path).exists():
        raise DataError(f"data not found: {path}")
    if Path(path).suffix == ".parquet" and Path(path).is_file() and not _parquet_rows(path):
        raise DataError(f"{path}: the dataset is empty")
    try:
        if local and (Path(path) / "state.json").exists() or (Path(path) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(path)
        elif local and Path(path).is_file():
            kind = _FILE_TYPES.get(Path(path).suffix)
            options = _csv_options(path, separator) if kind == "csv" else {}
            if kind is None:
                known = ", ".join((*SUFFIXES, *_FILE_TYPES))
                raise DataError(f"{path}: unknown kind of file; known are {known}")
            loaded = datasets.load_dataset(kind, data_files=path, cache_dir=download_dir, **options)["train"]
        else:
            if local:
                _refuse_several_kinds(Path(path))
            loaded = datasets.load_dataset(path, subset, cache_dir=download_dir)
    except DataError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # `datasets` says what went wrong there
            cause = cause.__cause__
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:_REASON]
        subset_text = f", subset {subset!r}" if subset else ""
        here = "" if Path(path).exists() else f" (there is no file or folder of that name in {Path.cwd()})"
        raise DataError(f"cannot load the dataset {path!r}{subset_text}{here}: {reason}") from error
    if not isinstance(loaded, dict):  # one table is whatever split was asked for
        loaded = {(split or "train").partition("[")[0]: loaded}
    if split is None and len(loaded) > 1 and "train" in loaded:
        log.info("%s: the split train is read, of %s; `split` names another", path, ", ".join(loaded))
    table = _choose_split(loaded, split, path)
    if len(table) == 0:
        raise DataError(f"{path}: the dataset is empty")
    return table


def _refuse_pointers(path: Path) -> None:
    """Refuse a file, or one of a folder, that only says where Git LFS has its content."""
    files = (file for kind in (*SUFFIXES, *_FILE_TYPES) for file in path.rglob(f"*{kind}")) if path.is_dir() else [path]
    for file in files:
        if file.is_file() and file.stat().st_size < _LARGEST_POINTER:
            with file.open("rb") as content:
                if content.read(len(_POINTER)) == _POINTER:
                    raise DataError(f"{file} is a pointer of Git LFS, without the rows; get them by `git lfs pull`")


def _parquet_rows(path: str) -> int:
    """Return the number of rows of a Parquet file; `datasets` fails obscurely where there are none."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        return Path(path).stat().st_size and read_metadata(path).num_rows
    except ArrowException as error:
        raise DataError(f"{path} is no Parquet file: {error}") from error


def _refuse_several_kinds(folder: Path) -> None:
    """Refuse a folder with data files of several kinds, of which `datasets` reads one without a word, unless a dataset
    card says which."""
    card = folder / "README.md"
    if card.is_file() and "data_files" in card.read_text(encoding="utf-8", errors="replace"):
        return
    kinds = {file.suffix: file.name for file in sorted(folder.iterdir()) if file.suffix in (".jsonl", *_FILE_TYPES)}
    if len(kinds) > 1:
        raise DataError(
            f"{folder} has files of several kinds ({', '.join(kinds.values())}); give one file, or one kind"
        )


def _csv_options(path: str, separator: str | None) -> dict[str, Any]:
    """Return how `datasets` reads a CSV file: each cell as the text that it holds (007, NA and 0.50 are no numbers or
    nulls), an empty one as null. Raises DataError for a header that names a column twice."""
    separator = separator or ("\t" if path.endswith(".tsv") else ",")
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter=separator)
        names = next(lines, [])
        try:
            first: list[str] = next(filter(None, lines), [])
        except csv.Error:  # a cell of more than 128 KB
            first = names
    if not first:
        raise DataError(f"{path}: the dataset is empty")
    if len(first) > len(names):  # pandas would take the first cells for an index, and shift all others
        raise DataError(
            f"{path}: its first row has {len(first)} cells for the {len(names)} columns of its first line; a cell with "
            f"{separator!r} in its text needs quotation marks"
        )
    names = [name or f"Unnamed: {at}" for at, name in enumerate(names)]  # as pandas reads its own index
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: the column {twice[0]!r} occurs twice in its first line")
    if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
        raise DataError(f"{path}: its first line has no {separator!r} but {other!r}; set separator: {other!r}")
    from datasets import Features, Value

    text = Features({name: Value("string") for name in names})
    return {"sep": separator, "features": text, "keep_default_na": False, "na_values": [""], "encoding": "utf-8-sig"}


def _choose_split(splits: dict[str, Any], split: str | None, path: str) -> Any:
    import datasets

    name = split or (next(iter(splits)) if len(splits) == 1 else "train")
    if name in splits:
        return splits[name]
    try:
        wanted = datasets.ReadInstruction.from_spec(name).to_absolute({key: len(rows) for key, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        near = nearest(name, splits)
        hint = f"; nearest: {near}" if near else ""
        raise DataError(f"{path}: no split {name!r}; set split to one of {sorted(splits)}{hint}") from error
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in wanted]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
