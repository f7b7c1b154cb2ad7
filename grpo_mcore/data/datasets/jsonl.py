"""Rows of JSONL and JSON files. Every row is checked once; a JSONL row is parsed again when it is read, so a file takes
only 24 bytes of memory per row."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from grpo_mcore.data.interfaces import DataError

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
SUFFIXES = tuple(name + packed for packed in ("", ".gz") for name in (".jsonl", ".json", ".ndjson", ".jsonlines"))

Check = Callable[[dict[str, Any], str], object]
"""(row, "file:line"); raises DataError for a row that lacks a field."""


def is_json(path: str) -> bool:
    """Return whether a path is named like a file that `read_json` reads."""
    return path.endswith(SUFFIXES)


def read_json(path: Path, *, parsed: bool = True) -> tuple[Sequence[dict[str, Any]], Sequence[int]]:
    """Return the objects of a file and the line of each (from 1), or its index where the file is one list of objects.

    A file has one object a line, or is one list of objects; blank lines are skipped. Raises DataError for a missing or
    empty file, and for the first row that is not a JSON object. If not `parsed`, a file may be empty, and such a row is
    an error when it is read.
    """
    if not path.is_file():
        raise DataError(f"data file not found: {path}" + ("" if path.is_absolute() else f" in {Path.cwd()}"))
    with open_unpacked(path) as file:
        rows, numbers = _read_list(file, path) if _is_list(file) else _index(file, path, parsed)
    if parsed and not rows:
        raise DataError(f"{path}: the dataset is empty")
    return rows, numbers


def open_unpacked(path: Path) -> IO[bytes]:
    """Open the file, decompressed into a temporary file where it is gzip, whatever its name: rows are read by their
    offset."""
    file = path.open("rb")
    head = file.read(len(_GZIP))
    file.seek(0)
    if head != _GZIP:
        return file
    file.close()
    unpacked = tempfile.TemporaryFile()
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, unpacked)
    except (OSError, EOFError) as error:
        unpacked.close()
        raise DataError(f"{path}: not a whole gzip file ({error})") from error
    unpacked.seek(0)
    return unpacked


def _is_list(file: IO[bytes]) -> bool:
    """Return whether the file is one list of objects."""
    head = file.read(4096).removeprefix(_BOM).lstrip()
    file.seek(0)
    return head.startswith(b"[") and head[1:].lstrip()[:1] in (b"{", b"]", b"")


def _read_list(file: IO[bytes], path: Path) -> tuple[list[dict[str, Any]], Sequence[int]]:
    rows = parse(file.read().removeprefix(_BOM), str(path), kind=list)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}, object {number}: expected a JSON object, got {type(row).__name__}")
    return rows, range(len(rows))


def _index(file: IO[bytes], path: Path, parsed: bool) -> tuple[JsonLines, array[int]]:
    starts, lengths, numbers = array("Q"), array("Q"), array("Q")
    start = 0
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(_BOM) if number == 1 else line
        if text.strip():
            if parsed:
                parse(text, f"{path}:{number}")
            starts.append(start + len(line) - len(text))
            lengths.append(len(text))
            numbers.append(number)
        start += len(line)
    return JsonLines(os.dup(file.fileno()), str(path), starts, lengths, numbers), numbers


class JsonLines(Sequence[dict[str, Any]]):
    """The objects of an open JSONL file, each parsed when it is read."""

    def __init__(
        self, descriptor: int, path: str, starts: Sequence[int], lengths: Sequence[int], numbers: Sequence[int]
    ) -> None:
        """`descriptor` is the open file, closed with this object. `starts` and `lengths` are each row's bytes."""
        self._descriptor, self._path = descriptor, path
        self._starts, self._lengths, self._numbers = starts, lengths, numbers
        weakref.finalize(self, os.close, descriptor)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        text = os.pread(self._descriptor, self._lengths[index], self._starts[index])
        return parse(text, f"{self._path}:{self._numbers[index]}")


def _number(text: str) -> float | int:
    """Return a decimal number; one that is whole, such as 12345678901234567890.0, with all its digits."""
    number = float(text)
    if abs(number) < 2**53 or not math.isfinite(number):
        return number
    exact = Decimal(text)
    return int(exact) if exact == exact.to_integral_value() else number


def parse(text: bytes, where: str, kind: type = dict) -> Any:
    """Parse UTF-8 text as a JSON object (or list). Raises DataError."""
    try:
        value = json.loads(text.rstrip(b"\r\n").decode(), parse_float=_number)
        if b"\\ud" in text or b"\\uD" in text:  # half a surrogate pair is valid JSON, but no text
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason}, byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half a surrogate pair in a text, such as \\ud800") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""  # of a file that is one list
        raise DataError(
            f"{where}: not JSON ({error.msg}, {line}column {error.colno}); one JSON object a line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not usable JSON ({error})") from error
    if not isinstance(value, kind):
        raise DataError(f"{where}: expected a JSON object, got {type(value).__name__}; one JSON object a line")
    return value
