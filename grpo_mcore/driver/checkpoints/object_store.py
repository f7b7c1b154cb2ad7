"""An object store: S3 and what speaks its protocol, Google Cloud Storage, Azure, or a folder (`file://`), each with one
prefix under which all names lie. Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

PIECE_BYTES = 16 * 2**20
"""Bytes that one request carries: each has REQUEST_S to arrive."""
MOST_PARTS = 10_000
"""Number of parts that S3 allows an object."""
THREADS = 8
"""Requests of a download at a time."""
REQUEST_S = 60
"""Seconds that a request may take."""
RETRY_S = 30
"""Seconds within which a request that failed is sent again, twice at most."""

READ_AGAIN_S = (1.0, 5.0, 20.0)
"""Seconds before each further attempt to read a piece of a download."""

CREDENTIALS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (Google: GOOGLE_APPLICATION_CREDENTIALS; Azure: AZURE_STORAGE_*)"
)
"""Variables that hold credentials, for messages. The machine's own role is used where they are not set."""

Version = Mapping[str, str]
"""Marks of an object's state, which change when it is written: S3 and Azure compare its e_tag, Google its version."""

Moved = Callable[[int], None]
"""Gets the bytes of each piece that was sent or received. What it raises ends the transfer."""


class StoreError(RuntimeError):
    """An object store cannot be reached, or refuses what was asked for; the message says what to do."""


class RemoteStore:
    """The objects under an address such as s3://BUCKET/PREFIX. An object appears whole or not at all. Raises
    StoreError."""

    def __init__(self, address: str, options: Mapping[str, str] | None = None, *, store: Any = None) -> None:
        """`options`: settings of the store, such as region or endpoint; the environment gives the others. `store`:
        one of obstore's, in place of that at the address."""
        self.address = address.rstrip("/")
        with self._explained("open"):
            self._store = store or _open(self.address, options or {})

    def read(self, name: str) -> tuple[bytes, Version] | None:
        """Return the contents and the version of a small object; None if there is none."""
        import obstore

        try:
            with self._explained(f"read {name} of"):
                got = obstore.get(self._store, name)
                return bytes(got.bytes()), _version(got.meta)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        import obstore

        with self._explained(f"write {name} to"):
            obstore.put(self._store, name, data)

    def create(self, name: str, data: bytes) -> Version | None:
        """Write an object that does not exist, and return its version; None if it exists."""
        import obstore

        try:
            with self._explained(f"create {name} in"):
                return _version(obstore.put(self._store, name, data, mode="create"))
        except obstore.exceptions.AlreadyExistsError:
            return None

    def replace(self, name: str, data: bytes, version: Version) -> Version | None:
        """Write an object if it has this version still, and return the new one; None if it has another. A store that
        cannot compare versions (`file://`, some servers) writes it all the same."""
        import obstore

        try:
            with self._explained(f"replace {name} in"):
                try:
                    return _version(obstore.put(self._store, name, data, mode=dict(version)))
                except (NotImplementedError, obstore.exceptions.GenericError) as error:
                    # obstore has no class of its own for a server's 501.
                    if not isinstance(error, NotImplementedError) and "501 Not Implemented" not in str(error):
                        raise
                    return _version(obstore.put(self._store, name, data))
        except (obstore.exceptions.PreconditionError, FileNotFoundError):
            return None

    def upload(self, name: str, path: Path, moved: Moved) -> None:
        """Write a file's bytes of this moment to an object."""
        import obstore

        size = path.stat().st_size
        with self._explained(f"write {name} to"), path.open("rb") as file:
            if size <= PIECE_BYTES:
                obstore.put(self._store, name, file.read(size))
                moved(size)
            else:
                part = max(PIECE_BYTES, -(-size // MOST_PARTS))
                obstore.put(self._store, name, _pieces(file, size, part, moved), chunk_size=part, max_concurrency=4)

    def download(self, files: Mapping[str, tuple[Path, int]], moved: Moved) -> None:
        """Write objects to files. `files`: name -> (path, bytes)."""
        import obstore

        def fetch(piece: tuple[str, Path, int, int]) -> None:
            name, path, start, length = piece
            for wait_s in (*READ_AGAIN_S, None):
                try:
                    with self._explained(f"read {name} of"):
                        data = obstore.get_range(self._store, name, start=start, length=length)
                    break
                except StoreError:
                    if wait_s is None:
                        raise
                    time.sleep(wait_s)
            with path.open("r+b") as file:
                file.seek(start)
                file.write(data)
            moved(length)

        pieces = []
        for name, (path, size) in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            pieces += [(name, path, at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)]
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(fetch, pieces):
                pass

    def fetch(self, files: Mapping[str, int], folder: Path, start: str = "") -> None:
        """Write objects to files of these names (and bytes) below `folder`, each whole or not at all. `start`: what
        their names in the store have before it."""
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            self.download({start + name: (part / name, size) for name, size in files.items()}, lambda count: None)
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (part / name).replace(folder / name)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def objects(self, folder: str) -> dict[str, tuple[int, float]]:
        """Return the objects below a folder, which may be "": path inside it -> (bytes, unix time of writing)."""
        import obstore

        start = f"{folder}/" if folder else ""
        with self._explained("list"):
            listed = [meta for batch in obstore.list(self._store, folder or None) for meta in batch]
        return {
            meta["path"].removeprefix(start): (meta["size"], meta["last_modified"].timestamp())
            for meta in listed
            if meta["path"].startswith(start)
        }

    def folders(self) -> list[str]:
        """Return the names of the folders right below the prefix."""
        import obstore

        with self._explained("list"):
            return sorted(obstore.list_with_delimiter(self._store)["common_prefixes"])

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, in this order. One that is gone already is no error."""
        import obstore

        for name in names:
            try:
                with self._explained(f"delete {name} of"):
                    obstore.delete(self._store, name)
            except FileNotFoundError:
                continue

    def probe(self) -> None:
        """Write, read, list and delete a small object, so that what is missing shows before it is needed."""
        name, data = f"probe-{os.getpid()}-{time.time_ns()}", b"grpo-mcore"
        self.write(name, data)
        try:
            if (back := self.read(name)) is None or back[0] != data or name not in self.objects(""):
                raise StoreError(f"{self.address}: an object that was just written is not found: use another store")
        finally:
            self.delete([name])

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn what obstore raises into a StoreError, except the answers that a caller asks for. An object that is
        missing is a FileNotFoundError."""
        import obstore

        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StoreError(f"cannot {what} {self.address}: {_advice(str(error))}") from None
            raise
        except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
            raise
        except obstore.exceptions.BaseError as error:
            raise StoreError(f"cannot {what} {self.address}: {_advice(str(error))}") from None


def _version(meta: Mapping[str, Any]) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _open(address: str, options: Mapping[str, str]) -> Any:
    from obstore.store import from_url

    if wrong := [sign for sign in "?#%" if sign in address]:  # obstore drops what follows, or decodes it
        at = address.partition(wrong[0])[0]  # what follows may be a secret
        raise StoreError(
            f"{at}: {wrong[0]} after it has a meaning of its own in an address; choose a prefix without it"
        )
    if address.startswith("file://"):
        return from_url(address, mkdir=True)
    named = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = options.get("endpoint") or next((os.environ[name] for name in named if os.environ.get(name)), "")
    return from_url(
        address,
        client_options={"timeout": f"{REQUEST_S}s", "allow_http": endpoint.startswith("http://")},  # as the user says
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=RETRY_S)},
        **options,
    )


def _pieces(file: Any, size: int, part: int, moved: Moved) -> Iterator[bytes]:
    while size > 0:
        if not (data := file.read(min(part, size))):
            raise OSError(f"{file.name} became shorter while it was read")
        yield data
        moved(len(data))
        size -= len(data)


_ADVICE = (
    ("NoSuchBucket", "there is no such bucket; make it, or correct the address"),
    (
        r"169\.254\.|metadata\.google|InvalidAccessKeyId|SignatureDoesNotMatch|401 Unauthorized|ExpiredToken",
        f"no valid credentials; set {CREDENTIALS}",
    ),
    (
        "AccessDenied|403 Forbidden",
        "access denied; the credentials must be allowed to list the bucket, and to read, write and delete objects",
    ),
    (
        "error sending request|operation timed out|dns error|connection closed",
        "the store does not answer; see its endpoint (AWS_ENDPOINT_URL) and the network",
    ),
)
"""Pattern of obstore's messages -> what it means and what to do. The first that fits counts."""


def _advice(text: str) -> str:
    """Return what an error of obstore says, with what to do if that is known. Signatures in addresses are left out."""
    for pattern, advice in _ADVICE:
        if (match := re.search(pattern, text)) is not None:
            return f"{advice} ({match[0].strip()})"
    first = " ".join(text.partition("\n\nDebug source")[0].partition("<?xml")[0].split())
    return re.sub(r"(://[^\s?]+)\?\S+", r"\1?...", first)[:300]
