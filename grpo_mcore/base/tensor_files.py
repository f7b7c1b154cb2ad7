"""Files of tensors and plain values, for every room: written whole or with an OSError, and read without running code.

A pickle may name any function to call. `load` accepts only the types listed here, those that the caller names, and the
tensors and plain values that torch itself accepts.
"""

import datetime
import decimal
import fractions
import io
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_mcore.base.files import Digest, digest_of

PLAIN_TYPES: tuple[Any, ...] = (
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, frozenset),
    *(np.ndarray, np.dtype, np.float64().__reduce__()[0], np.empty(0).__reduce__()[0]),  # build a scalar, an array
    *{type(np.dtype(kind)) for kind in (*np.typecodes["All"], "S1", "U1")},
)
"""Types in rows of a dataset, states of data loaders and of numpy's generators, besides numbers and strings."""


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
        _load(io.BytesIO(buffer.getbuffer()), types)
    except pickle.UnpicklingError as error:
        raise TypeError(f"{path.name}: {_type_in(error)} cannot be saved; use numbers, texts, lists, dicts") from error
    with path.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    return digest_of(buffer.getbuffer())


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
    with torch.serialization.safe_globals([*PLAIN_TYPES, *types]):
        return torch.load(file, map_location="cpu", weights_only=True)


def _type_in(error: pickle.UnpicklingError) -> str:
    """Return the name of the type that torch refused, from its message."""
    text = str(error)
    if match := re.search(r"GLOBAL (\S+)", text):
        return match[1]
    return text.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or "something else"
