"""Files that a run leaves: their digests, which the writer notes and every reader compares, and their formats.

A format's number rises when older code would misread the files. Files without a number were written before there were
any, and are of format 1. docs/install.md has the promise.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from grpo_mcore.base.clock import REAL

Kind = Literal["checkpoint", "ledger", "recipe", "samples"]

FORMATS: dict[Kind, int] = {"checkpoint": 1, "ledger": 2, "recipe": 1, "samples": 1}
"""The formats of recipes and of what a run leaves for later versions: what this version writes, and the newest that it
reads."""

THREADS = 8
"""Maximum number of files that are read at the same time."""
SMALL_BYTES = 1 << 20
"""Below this size a file is read in one piece, and files of this size together are read without threads, which would
take longer to start."""

READ_AGAIN_S = (1.0, 5.0)
"""Seconds to wait before each further attempt to read files on a disk that fails."""

UNREADABLE = "it cannot be read"

Digest = tuple[int, str]
"""(bytes, SHA-256 in hex) of a file."""

DIGESTS = "digests.json"
"""{"files": {path inside the folder: {"bytes": size, "sha256": hex}}}. Written last: it makes a checkpoint whole."""

CRITIC = "critic"
"""Folder of the critic in the policy's part of a checkpoint."""

PART = "digests-*.json"
"""Pattern of the files in which processes leave the digests of what they wrote, until somebody collects them."""


class UnusableFolder(ValueError):
    """A folder for output that cannot be made or written."""


def make_folder(folder: Path, key: str) -> None:
    """Make a folder for output where there is none, and write into it. Raises UnusableFolder, which names `key`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        raise UnusableFolder(f"{key}: {folder} cannot be written: {why_unusable(folder, error)}") from error


def why_unusable(path: Path, error: OSError) -> str:
    """Return why a path for output cannot be written: its own reason, or the link to nothing that leads there."""
    if link := next((above for above in (path, *path.parents) if _leads_nowhere(above)), None):
        return f"{link} is a link to {os.readlink(link)}, which is not there (is its disk mounted?)"
    return "it is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror or str(error)


def _leads_nowhere(path: Path) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


def digest_of(data: bytes | memoryview) -> Digest:
    return len(data), hashlib.sha256(data).hexdigest()


def digest_file(path: Path, sync: bool = False) -> Digest:
    """Return the digest of a file. `sync`: flush it to the disk first."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        if (size := os.fstat(file.fileno()).st_size) < SMALL_BYTES:
            return digest_of(file.read())
        return size, hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(folder: Path, names: Iterable[str], sync: bool = False) -> dict[str, Digest]:
    """Return the digests of files by their paths inside `folder`."""
    names = list(names)
    if len(names) < 2 or sum(os.stat(folder / name).st_size for name in names) < SMALL_BYTES:
        return {name: digest_file(folder / name, sync) for name in names}
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(folder / name, sync), names), strict=True))


def leave_digests(folder: Path, part: str, names: Iterable[str]) -> None:
    """Write the digests of files in `folder` to its file digests-`part`.json, after flushing them to the disk."""
    (folder / PART.replace("*", part)).write_text(json.dumps(digest_files(folder, names, sync=True)), encoding="utf-8")


def collect_digests(folder: Path) -> dict[str, Digest]:
    """Return what `leave_digests` has left in `folder`, by file name, and delete it."""
    digests: dict[str, Digest] = {}
    for part in sorted(folder.glob(PART)):
        digests |= {
            name: (size, digest) for name, (size, digest) in json.loads(part.read_text(encoding="utf-8")).items()
        }
        part.unlink()
    return digests


def parse_digests(text: str | bytes) -> dict[str, Digest]:
    """Return the content of DIGESTS, by path inside the folder. Raises ValueError with its fault."""
    try:
        files = json.loads(text)["files"]
        return {name: (int(saved["bytes"]), str(saved["sha256"])) for name, saved in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{DIGESTS} cannot be read: {type(error).__name__}: {error}") from error


def first_missing(digests: Mapping[str, Digest], sizes: Mapping[str, int]) -> str | None:
    """Return which file is missing or has another size than its digest says; None if none. `sizes`: bytes of the files
    that are there."""
    for name, (saved, _) in digests.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != saved:
            return f"{name} has {sizes[name]:,} bytes, {saved:,} were saved"
    return None


def first_changed(folder: Path, digests: Mapping[str, Digest]) -> str | None:
    """Return what is wrong with the first file of `folder` that is not what its digest says; None if all are."""
    present = digest_files(folder, digests)
    changed = [name for name, digest in digests.items() if present[name] != tuple(digest)]
    return f"{changed[0]} is not what was saved (its digest differs)" if changed else None


def try_to_read(look: Callable[[], str | None]) -> str | None:
    """Return what `look` says is wrong with files. A disk that fails (EIO, ESTALE of a network file system) gets two
    more attempts, as it may be away for a moment only; then the text begins with UNREADABLE."""
    for wait_s in READ_AGAIN_S:
        with suppress(OSError):
            return look()
        REAL.sleep(wait_s)
    try:
        return look()
    except OSError as error:
        return f"{UNREADABLE}: {error}"


def newer_format(kind: Kind, written: Any) -> str | None:
    """Return why files of the format `written` cannot be read, None if they can. `written` None means format 1."""
    known = FORMATS[kind]
    if written is None or isinstance(written, int) and written <= known:
        return None
    return (
        f"written by a newer version of grpo_mcore, in format {written} of its {kind}; this version reads up to "
        f"{known}: upgrade grpo_mcore"
    )
