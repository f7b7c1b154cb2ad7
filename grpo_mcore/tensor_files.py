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

ALWAYS_READ = frozenset({
    "_codecs.encode", "builtins.set", "collections.OrderedDict", "collections.Counter", "torch.ByteStorage",
    "torch.FloatStorage", "torch.LongStorage", "torch.IntStorage", "torch._utils._rebuild_tensor_v2",
})  # fmt: skip
"""Names of what torch itself accepts, as far as the files of this package hold it."""

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
        if not _is_plain(buffer, types):
            _load(io.BytesIO(buffer.getbuffer()), types)
    except pickle.UnpicklingError as error:
        raise TypeError(f"{path.name}: {_type_in(error)} cannot be saved; use numbers, texts, lists, dicts") from error
    with path.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    return digest_of(buffer.getbuffer())


class _Any:
    """Stands for an object of any type, whatever is done to it while it is read."""

    def __init__(self, *args: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...


class _TypeCheck(pickle.Unpickler):
    """Reads a pickle without what it holds. Raises UnpicklingError for a type that is not among `names`."""

    def __init__(self, text: bytes, names: Container[str]) -> None:
        super().__init__(io.BytesIO(text))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._names:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _Any

    def persistent_load(self, key: object) -> Any:
        return None


def _is_plain(buffer: io.BytesIO, types: Sequence[Any]) -> bool:
    """Return whether a file surely holds only what `load` accepts. torch's reader, in Python, takes ten times as long
    to say so, and has the last word on what this one does not know."""
    buffer.seek(0)
    text = torch._C.PyTorchFileReader(buffer).get_record("data.pkl")
    names = ALWAYS_READ | {f"{one.__module__}.{one.__qualname__}" for one in (*PLAIN_TYPES, *types)}
    if any(256 <= int.from_bytes(size, "little") < len(text) for size in HUGE_INTEGER.findall(text)):
        return False
    try:
        _TypeCheck(text, names).load()
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


def _load(file: Any, types: Sequence[Any]) -> Any:
    with torch.serialization.safe_globals([*PLAIN_TYPES, *types]):
        return torch.load(file, map_location="cpu", weights_only=True)


def _type_in(error: pickle.UnpicklingError) -> str:
    """Return the name of the type that torch refused, from its message."""
    text = str(error)
    if match := re.search(r"GLOBAL (\S+)", text):
        return match[1]
    return text.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or "something else"
