"""The files of a checkpoint: their digests, written last, tell whether it is still what was saved."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

DIGESTS = "digests.json"
"""{"files": {path inside the checkpoint: {"bytes": size, "sha256": hex}}}."""

THREADS = 8
"""Files that are read at a time."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GB = 1e9


def write_digests(folder: Path) -> None:
    """Of all that lies in `folder` now. Everything reaches the disk first: what has digests is whole."""
    names = _names(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda name: _digest(folder / name, sync=True), names))
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in zip(names, digests, strict=True)}
    with (folder / DIGESTS).open("w") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint: a file is missing, cut off or was changed. None: it is as it was saved."""
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(_files(folder.resolve()))]
    return _damage(folder.resolve(), tuple(stamps))


@cache
def _damage(folder: Path, _as_it_lies: tuple[tuple[str, int, int], ...]) -> str | None:
    """Reads all of it, so once for each checkpoint as it lies there."""
    if not (folder / DIGESTS).is_file():
        return f"{DIGESTS} is missing"
    try:
        files = json.loads((folder / DIGESTS).read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{DIGESTS} cannot be read: {error}"
    for name, saved in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (size := (folder / name).stat().st_size) != saved["bytes"]:
            return f"{name} has {size:,} bytes, {saved['bytes']:,} were saved"
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda name: _digest(folder / name)[1], files)
        changed = [name for name, digest in zip(files, digests, strict=True) if digest != files[name]["sha256"]]
    return f"{changed[0]} is not what was saved (its digest differs)" if changed else None


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum((folder / name).stat().st_size for name in _names(folder))


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raises OSError where less than `needed` bytes are free: before anybody has begun to write."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {free / GB:.2f} GB are free", str(folder))


def could_not_write(error: BaseException | None) -> bool:
    """Whether a file could not be written, here or in a worker: mostly for want of room, of which torch, say, does not
    tell. A loss or a lateness of a worker is something else."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            return True
        if any(os.strerror(number) in str(error) for number in FULL):
            return True
        error = error.__cause__
    return False


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in _files(folder) if path.name != DIGESTS)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path, sync: bool = False) -> tuple[int, str]:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
