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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_mcore.base.file_digests import Digest, digest_of

PLAIN_TYPES: tuple[Any, ...] = (
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, frozenset),
    *(np.ndarray, np.dtype, np._core.multiarray.scalar, np._core.multiarray._reconstruct),  # type: ignore[attr-defined]
    *{type(np.dtype(kind)) for kind in (*np.typecodes["All"], "S1", "U1")},
)
"""Types in rows of a dataset, states of data loaders and of numpy's generators, besides numbers and texts."""

MOST_BITS = 2040
"""An integer of as many bits has a form in a pickle that torch does not read back."""


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
        if not _is_plain(value, types):
            _load(io.BytesIO(buffer.getbuffer()), types)
    except pickle.UnpicklingError as error:
        raise TypeError(f"{path.name}: {_type_in(error)} cannot be saved; use numbers, texts, lists, dicts") from error
    with path.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    return digest_of(buffer.getbuffer())


def _is_plain(value: Any, types: Sequence[Any]) -> bool:
    """Return whether `load` will surely accept a value. torch's reader, which is written in Python, takes ten times as
    long to say so: 15 ms for a group of 16 samples, while the run stands still. It has the last word on what this one
    does not know."""
    kind = type(value)
    if kind in (dict, Counter):
        return all(_is_plain(key, types) and _is_plain(item, types) for key, item in value.items())
    if kind in (list, tuple, set):
        return all(_is_plain(item, types) for item in value)
    if kind in types and hasattr(value, "__dict__"):
        return all(_is_plain(item, types) for item in vars(value).values())
    if kind is int:
        return value.bit_length() < MOST_BITS
    return (
        value is None or kind in (bool, float, str, bytes) or (kind is torch.Tensor and value.layout == torch.strided)
    )


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
