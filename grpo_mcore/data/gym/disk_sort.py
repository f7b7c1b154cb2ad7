"""Records of numbers in order, however many there are: sorted in memory as far as they fit, merged from disk beyond."""

from __future__ import annotations

import functools
import heapq
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np  # at run time only once records are sorted: its threads would be in the way of a fork

RUN_BYTES = 48 << 20
"""Of the records that are sorted in memory at a time."""
_CHUNK = 8192  # records that are read at a time, over all runs
_NUMPY = {"q": "<i8", "d": "<f8", "i": "<i4"}

Record = tuple[Any, ...]


class DiskSort:
    """Records with the fields that `kinds` names as `struct` does (q: int64, d: float64, i: int32). Iterated over once,
    after the last `add`, in the order of the first `keys` fields, which must differ between any two records."""

    def __init__(self, folder: Path, kinds: str, keys: int, run_bytes: int = RUN_BYTES) -> None:
        self._pack = struct.Struct("<" + kinds).pack
        self._kinds = kinds
        self._keys = [f"f{number}" for number in reversed(range(keys))]  # lexsort: the last one counts most
        self._run_bytes = run_bytes
        self._records = bytearray()
        self._file = tempfile.TemporaryFile(dir=folder)
        self._runs: list[tuple[int, int]] = []  # first record, number of records

    def add(self, *values: float) -> None:
        self._records += self._pack(*values)
        if len(self._records) >= self._run_bytes:
            self._to_disk()

    def close(self) -> None:
        self._file.close()

    @functools.cached_property
    def _type(self) -> np.dtype:
        import numpy as np

        return np.dtype([(f"f{number}", _NUMPY[kind]) for number, kind in enumerate(self._kinds)])

    def _sorted(self) -> np.ndarray:
        import numpy as np

        records = np.frombuffer(self._records, self._type)
        return records[np.lexsort([records[key] for key in self._keys])]

    def _to_disk(self) -> None:
        first = sum(self._runs[-1]) if self._runs else 0
        records = self._sorted()
        self._runs.append((first, len(records)))
        records.tofile(self._file)
        self._records = bytearray()

    def __iter__(self) -> Iterator[Record]:
        if not self._runs:
            return self._in_memory()
        self._to_disk()
        return heapq.merge(*(self._from_disk(first, count) for first, count in self._runs))

    def _in_memory(self) -> Iterator[Record]:
        records = self._sorted()
        self._records = bytearray()
        for start in range(0, len(records), _CHUNK):
            yield from records[start : start + _CHUNK].tolist()

    def _from_disk(self, first: int, count: int) -> Iterator[Record]:
        import numpy as np

        size, chunk = self._type.itemsize, max(_CHUNK // len(self._runs), 16)
        for start in range(first, first + count, chunk):
            self._file.seek(start * size)
            yield from np.fromfile(self._file, self._type, min(chunk, first + count - start)).tolist()
