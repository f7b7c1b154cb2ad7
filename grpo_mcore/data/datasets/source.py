"""The rows of a JSON file or of a table, with a name for every row.

Tables are read with the `datasets` library: from the Hugging Face hub, a folder, or a Parquet or CSV file. Rows stay on
disk until they are read.
"""

import csv
import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from grpo_mcore.data.datasets.jsonl import SUFFIXES, Check, is_json, open_unpacked, read_json
from grpo_mcore.data.datasets.rows import Joined, Rows
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.recipe import nearest
from grpo_mcore.rollout.datum import field_of

log = logging.getLogger(__name__)

_TEXT_TABLES = {".csv": "csv", ".tsv": "csv", ".csv.gz": "csv", ".tsv.gz": "csv"}
_FILE_TYPES = {".parquet": "parquet", ".arrow": "arrow"} | _TEXT_TABLES
_HUB = "hf://datasets/"
_OF_A_CARD = ("name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter")
"""Settings in the card of a data set with which its text files are still read here; others are left to `datasets`."""
_PACKED_TEXT = re.compile(r"\.(csv|tsv|jsonl?|ndjson|jsonlines)\.(?!gz$)\w+$")
_TRIED_ROWS = 1_000
_REASON = 300  # characters of an error of `datasets`


@dataclass(frozen=True)
class Source:
    """Rows that are read when they are asked for. `numbers[i]` identifies row i for good: by its line in a JSONL file,
    else by its position."""

    rows: Sequence[dict[str, Any]]
    numbers: Sequence[int]
    name_of: Callable[[int], str]
    """Index -> "train.jsonl:17" or "gsm8k, row 3", for error messages."""

    def refuse_if_none_passes(self, check: Check) -> None:
        """Raise the error of the first row if none of the first rows passes, so that a wrong key is reported at once.
        Single bad rows are excluded when they are read."""
        first: DataError | None = None
        for index in range(min(len(self.rows), _TRIED_ROWS)):
            try:
                check(self.rows[index], self.name_of(index))
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
    parsed: bool = True,
) -> Source:
    """Open a JSONL or JSON file and, if `parsed`, parse all its rows; open a table, or all files that a pattern
    matches. Raises DataError."""
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    file, name = path, path
    if is_address(path) or path.startswith(_HUB):
        name = path.partition("?")[0]
        if is_address(path):
            _refuse_unknown_kind(name)
        file = _fetched(path, download_dir)
    elif "://" in path:
        raise DataError(f"{path}: addresses are read that begin with https:// or {_HUB}; copy others to a folder first")
    elif has_magic(path) and not Path(path).exists():
        if not (files := sorted(glob(path, recursive=True))):
            raise DataError(f"no file matches {path}" + ("" if Path(path).is_absolute() else f" in {Path.cwd()}"))
        if split is not None and not split.isidentifier():
            raise DataError(f"{path}: split {split!r} is a part of one table, and the pattern is for several files")
        parts = [open_source(file, split=split, download_dir=download_dir, separator=separator) for file in files]
        return joined(parts)
    if is_json(name) and is_local(file):
        rows, numbers = read_json(Path(file), parsed=parsed)
        return _choose_split(Source(rows, numbers, lambda index: f"{path}:{numbers[index]}"), split, path)
    if Path(file).is_file():
        _refuse_unknown_kind(name)
    loaded = _load(file, _suffix(name), subset, download_dir, separator)
    if isinstance(loaded, dict):
        splits = {name: part if callable(part) else partial(_table, part, path) for name, part in loaded.items()}
        return _choose_split(splits, split, path)
    return _choose_split(_table(loaded, path), split, path)


def _table(table: Any, path: str) -> Source:
    if len(table) == 0:
        raise DataError(f"{path}: the dataset is empty")
    return Source(Table(table), range(len(table)), lambda index: f"{path}, row {index}")


class Table(Sequence[dict[str, Any]]):
    """The rows of a `datasets.Dataset` as plain values."""

    def __init__(self, table: Any) -> None:
        features = table.features
        whole = {name: _undecoded(feature) for name, feature in features.items()}
        self.table = table if whole == dict(features) else table.cast(type(features)(whole))
        self._is_single = any(f"'float{bits}'" in str(table.features) for bits in (16, 32))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = self.table[index]
        if self._is_single:
            row = _shortest(row, self.table.features)
        return {name: plain(value) for name, value in row.items()}


def _undecoded(feature: Any) -> Any:
    """Return the type of a column whose images stay the bytes of their files."""
    if isinstance(feature, Mapping):
        return {name: _undecoded(part) for name, part in feature.items()}
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(feature.feature))
    return replace(feature, decode=False) if type(feature).__name__ == "Image" else feature


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
    if isinstance(value, bytes):
        try:
            return value.decode()  # columns of text that another program wrote may be binary ones
        except UnicodeDecodeError:
            return value
    return str(value) if isinstance(value, Decimal | timedelta | UUID) else value


def joined(sources: Sequence[Source]) -> Source:
    """Concatenate several sources; rows are renumbered."""
    rows = Joined([source.rows for source in sources])

    def name_of(index: int) -> str:
        part, position = rows.locate(index)
        return sources[part].name_of(position)

    return sources[0] if len(sources) == 1 else Source(rows, range(len(rows)), name_of)


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


def _fetched(address: str, folder: str | None) -> str:
    """Return the copy of a file on the net: in a folder (None: the cache of `datasets`), or in the cache of the hub, by
    the name hf://datasets/ORGANISATION/NAME[@REVISION]/FILE. It is downloaded once. Raises DataError."""
    from datasets import DownloadConfig, DownloadManager
    from huggingface_hub import snapshot_download

    if address.startswith(_HUB) and (has_magic(address) or address.count("/") < 5):
        raise DataError(f"{address}: name one file, {_HUB}ORGANISATION/NAME/FILE, or ORGANISATION/NAME without {_HUB}")
    try:
        if not address.startswith(_HUB):
            options = DownloadConfig(cache_dir=folder, use_etag=False, disable_tqdm=True)
            return str(DownloadManager(download_config=options).download(address))
        organisation, name, file = address.removeprefix(_HUB).split("/", 2)
        name, _, revision = name.partition("@")
        home = f"{organisation}/{name}"
        # For a snapshot the hub is asked once; for one file, again and again.
        copy = Path(snapshot_download(home, repo_type="dataset", revision=revision or None, allow_patterns=file), file)
        if not copy.is_file():
            raise FileNotFoundError(f"{home} has no {file}")
        return str(copy)
    except Exception as error:  # of the hub, of the net, or of a name that is none
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON]
        raise DataError(f"cannot download {address} ({reason}); give a copy of it as data_path") from error


def _refuse_unknown_kind(name: str) -> None:
    if not is_json(name) and _suffix(name) not in _FILE_TYPES:
        raise DataError(f"{name}: unknown kind of file; known are {', '.join((*SUFFIXES, *_FILE_TYPES))}")


def _suffix(name: str) -> str:
    return "".join(Path(name).suffixes[-2:] if name.endswith(".gz") else [Path(name).suffix])


def is_local(path: str) -> bool:
    """Return whether a path names a file or folder, present or not, and not `organisation/name` on the hub."""
    return (
        Path(path).exists()
        or path.lower().endswith((*SUFFIXES, *_FILE_TYPES))
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    )


def _text_files(
    path: str, subset: str | None, download_dir: str | None, separator: str | None
) -> dict[str, Callable[[], Source]]:
    """Return the splits of a folder, or of a dataset on the hub, that has JSON or CSV files alone, which are read as
    each by itself: `datasets` would guess types, 073 would become 73, NA a null, a date a timestamp. Return {} for
    others, and for one whose card has settings of `datasets` for its files."""
    from datasets import load_dataset_builder
    from datasets.data_files import DataFilesDict, get_data_patterns
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder, fetch = Path(path), partial(snapshot_download, path, repo_type="dataset", cache_dir=download_dir)
    on_hub = not folder.is_dir()
    if on_hub and constants.HF_HUB_OFFLINE:
        try:
            folder, on_hub = Path(fetch()), False
        except LocalEntryNotFoundError:  # `datasets` may have it in its own cache
            return {}
    if on_hub or subset or (folder / "README.md").exists():
        config = load_dataset_builder(path if on_hub else str(folder), subset, cache_dir=download_dir).config
        separator = separator or getattr(config, "sep", None)
        files: Any = getattr(config, "data_files", None)
        if not isinstance(config, CsvConfig | JsonConfig) or config != type(config)(
            **{name: getattr(config, name) for name in _OF_A_CARD if hasattr(config, name)}
        ):
            return {}
    else:
        try:
            files = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
        except FileNotFoundError:  # it has no file of data
            return {}
    names = [name for of_split in files.values() for name in of_split]
    if packed := [name for name in names if _PACKED_TEXT.search(name)]:
        raise DataError(f"{packed[0]}: not read in this form, in which types would be guessed; unpack it, or use gzip")
    if not all(name.endswith((*SUFFIXES, *_TEXT_TABLES)) for name in names):
        return {}
    if on_hub:
        inside = {name: name.partition("@")[2].partition("/")[2] for name in names}  # hf://datasets/NAME@COMMIT/FILE
        folder = Path(fetch(allow_patterns=["README.md", *inside.values()]))
        files = {split: [str(folder / inside[name]) for name in of_split] for split, of_split in files.items()}

    def opened(of_split: Sequence[str]) -> Source:
        source = joined([open_source(file, download_dir=download_dir, separator=separator) for file in of_split])
        return replace(source, numbers=range(len(source.rows)))

    return {str(split): partial(opened, of_split) for split, of_split in files.items()}


def _load(path: str, suffix: str, subset: str | None, download_dir: str | None, separator: str | None) -> Any:
    """Load a `datasets.Dataset`, or several by the names of their splits; of text files, functions that open each
    split. `suffix` says what kind of file it is.

    Raises DataError where there is no such file or dataset.
    """
    import datasets  # heavy, and not needed for JSONL

    if is_local(path) and not Path(path).exists():
        raise DataError(f"data not found: {path}")
    try:
        if (Path(path) / "state.json").exists() or (Path(path) / "dataset_dict.json").exists():
            return datasets.load_from_disk(path)
        if Path(path).is_file():
            kind = _FILE_TYPES[suffix]
            options = (
                _csv_options(path, separator or ("\t" if suffix.startswith(".tsv") else ",")) if kind == "csv" else {}
            )
            return datasets.load_dataset(kind, data_files=path, cache_dir=download_dir, **options)["train"]
        return _text_files(path, subset, download_dir, separator) or datasets.load_dataset(
            path, subset, cache_dir=download_dir
        )
    except DataError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # `datasets` says what went wrong there
            cause = cause.__cause__
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:_REASON]
        subset_text = f", subset {subset!r}" if subset else ""
        hint = "is it empty, or of another kind than its name says?"
        if not Path(path).exists():
            hint = f"there is no file or folder of that name in {Path.cwd()}"
        raise DataError(f"cannot load the dataset {path!r}{subset_text} ({hint}): {reason}") from error


def _csv_options(path: str, separator: str) -> dict[str, Any]:
    """Return how `datasets` reads a CSV file: each cell as the text that it holds (007, NA and 0.50 are no numbers or
    nulls), an empty one as null. Raises DataError for a row with more cells than there are columns: pandas would take
    the first cells for an index, and shift all others."""
    from datasets import Features, Value

    with open_unpacked(Path(path)) as unpacked, io.TextIOWrapper(unpacked, encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter=separator)
        names = next(lines, [])
        try:
            first: list[str] = next(filter(None, lines), [])
        except csv.Error:  # a cell of more than 128 KB
            first = []
    if len(first) > len(names):
        raise DataError(
            f"{path}: its first row has {len(first)} cells for the {len(names)} columns of its first line; a cell with "
            f"{separator!r} in its text needs quotation marks"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: the column {twice[0]!r} occurs twice in its first line")
    text = Features({name or f"Unnamed: {index}": Value("string") for index, name in enumerate(names)})
    return {"sep": separator, "features": text, "keep_default_na": False, "na_values": [""], "encoding": "utf-8-sig"}


def _choose_split(loaded: Source | Mapping[str, Callable[[], Source]], split: str | None, path: str) -> Source:
    """Return the rows of a split, or of a part of one such as `train[:5%]`. None takes the only split, or "train" where
    there are several; a file without splits is whichever is asked for."""
    splits = {(split or "train").partition("[")[0]: lambda: loaded} if isinstance(loaded, Source) else loaded
    if split is None and len(splits) > 1 and "train" in splits:
        log.info("%s: the split train is read, of %s; `split` names another", path, ", ".join(splits))
    name = split or (next(iter(splits)) if len(splits) == 1 else "train")
    if name in splits:
        return splits[name]()
    from datasets import ReadInstruction

    hint = f"; nearest: {near}" if (near := nearest(name, splits)) else ""
    unknown = f"{path}: no split {name!r}; set split to one of {sorted(splits)}{hint}"
    if name.isidentifier():
        raise DataError(unknown)
    opened = {key: open_split() for key, open_split in splits.items()}
    try:
        parts = ReadInstruction.from_spec(name).to_absolute({key: len(source.rows) for key, source in opened.items()})
    except (ValueError, AssertionError) as error:
        raise DataError(unknown) from error
    return joined([_part(opened[part.splitname], range(part.from_, part.to)) for part in parts])


def _part(source: Source, indices: range) -> Source:
    """Return some rows of a source, renumbered. Raises DataError for none."""
    if not indices:
        raise DataError(f"{source.name_of(0)}: the part of the split has no row")
    rows = Rows(source.rows, lambda row, _: row, indices)
    return Source(rows, range(len(rows)), lambda index: source.name_of(indices[index]))
