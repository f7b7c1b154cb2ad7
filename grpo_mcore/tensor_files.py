"""Files of tensors and plain values, for every room: written whole or with an OSError, and read without running code.

A pickle may name any function to call. `load` accepts only the types listed here, those that the caller names, and the
tensors and plain values that torch itself accepts.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import os
import pickle
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_mcore.file_digests import Digest, digest_of

PLAIN_TYPES: tuple[Any, ...] = (
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, frozenset),
    *(np.ndarray, np.dtype, np._core.multiarray.scalar, np._core.multiarray._reconstruct),  # type: ignore[attr-defined]
    *{type(np.dtype(kind)) for kind in (*np.typecodes["All"], "S1", "U1")},
)
"""Types in rows of a dataset, states of data loaders and of numpy's generators, besides numbers and texts."""

KNOWN_NAMES = frozenset({
    "__builtin__.set", "_codecs.encode", "collections.OrderedDict", "collections.Counter", "torch.ByteStorage",
    "torch.FloatStorage", "torch.IntStorage", "torch.LongStorage", "torch._utils._rebuild_tensor_v2",
})  # fmt: skip
"""What torch itself accepts, as far as the files of this package hold it."""

HUGE_INTEGER = re.compile(re.escape(pickle.LONG4) + rb"(?=(....))", re.DOTALL)
"""An integer of more than 255 bytes in a pickle, with the number of its bytes. torch does not read it back."""


class UnsafeFile(ValueError):
    """A file holds an object of a type that is not expected in it. Nothing of it was executed."""


def save(value: Any, path: Path, types: Sequence[Any] = ()) -> Digest:
    """Write `value` so that `load` with the same `types` reads it back, and flush it to the disk. Return its digest.

    Raises OSError where the disk is full (torch.save would raise another error), and TypeError for a value that `load`
    would refuse: a checkpoint that cannot be read is worse than none.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        if not _surely_readable(buffer, types):
            _load(buffer, types)
    except pickle.UnpicklingError as error:
        raise TypeError(f"{path.name}: {_type_in(error)} cannot be saved; use numbers, texts, lists, dicts") from error
    with path.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    return digest_of(buffer.getbuffer())


class _Anything(dict[Any, Any]):
    """Stands for an object of any type while a pickle is read for its names."""

    def __init__(self, *args: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...


class _NameReader(pickle.Unpickler):
    """Reads a pickle without making the objects in it. Raises UnpicklingError for a name that is not `known`."""

    def __init__(self, text: bytes, known: Container[str]) -> None:
        super().__init__(io.BytesIO(text))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._known:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _Anything

    def persistent_load(self, key: object) -> None:
        return None


def _surely_readable(buffer: io.BytesIO, types: Sequence[Any]) -> bool:
    """Return whether `load` will surely accept a file. torch's reader, which is written in Python, takes ten times as
    long to say so: 15 ms for a group of 16 samples, while the run stands still. It has the last word on what this one
    does not know."""
    buffer.seek(0)
    text = torch._C.PyTorchFileReader(buffer).get_record("data.pkl")
    known = KNOWN_NAMES | {f"{one.__module__}.{one.__qualname__}" for one in types}
    if any(256 <= int.from_bytes(size, "little") < len(text) for size in HUGE_INTEGER.findall(text)):
        return False
    try:
        _NameReader(text, known).load()
    except pickle.UnpicklingError:
        return False
    return True


def load(path: Path, types: Sequence[Any] = ()) -> Any:
    """Return what `save` wrote. `types`: further classes that the file may hold. Raises UnsafeFile."""
    try:
        return _load(path, types)
    except pickle.UnpicklingError as error:
        raise UnsafeFile(
            f"{path} is not read: it holds {_type_in(error)}, which no checkpoint of this version holds; if the file "
            "was changed by somebody else, do not use it"
        ) from error


def _load(file: Path | io.BytesIO, types: Sequence[Any]) -> Any:
    if isinstance(file, io.BytesIO):
        file.seek(0)
    with torch.serialization.safe_globals([*PLAIN_TYPES, *types]):
        return torch.load(file, map_location="cpu", weights_only=True)


def _type_in(error: pickle.UnpicklingError) -> str:
    """Return the name of the type that torch refused, from its message."""
    text = str(error)
    if match := re.search(r"GLOBAL (\S+)", text):
        return match[1]
    return text.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or "something else"
