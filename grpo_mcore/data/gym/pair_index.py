"""Answers by prompt in a temporary SQLite database, so that memory does not grow with the file."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from grpo_mcore.data.interfaces import DataError

BATCH_BYTES = 4 << 20
"""Bytes of texts that are collected in memory before they are written."""
_CACHE_KB = 32 << 10

# The database is private and deleted at the end: it needs neither a journal nor fsync. `reward` has no type, which
# would turn -0.0 into 0.0.
_SCHEMA = f"""
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA cache_size = -{_CACHE_KB};
CREATE TABLE prompts (hash INTEGER PRIMARY KEY, first INTEGER);
CREATE TABLE texts (place INTEGER PRIMARY KEY, head BLOB, text BLOB);
CREATE TABLE answers (first INTEGER, reward, place INTEGER, text INTEGER, PRIMARY KEY (first, reward DESC, place))
    WITHOUT ROWID;
BEGIN;
"""


class Answer(NamedTuple):
    """One answer of the index. `place` is the number of bytes of text before it, `first` that of the first answer to
    its prompt, `text` a 64-bit hash of its text."""

    first: int
    reward: float
    place: int
    text: int


class PairIndex:
    """Collects answers with `add`, then gives them back by prompt. The database lies in `folder` and is deleted when
    the `with` block ends. An error of the database, such as a full disk, leaves the block as a DataError."""

    def __init__(self, folder: Path) -> None:
        file, self._path = tempfile.mkstemp(prefix=".pairs-", suffix=".sqlite", dir=folder)
        os.close(file)
        self._database = sqlite3.connect(self._path, isolation_level=None)
        self._database.executescript(_SCHEMA)
        self._waiting: list[tuple[int, float, int, int, bytes, bytes]] = []
        self._size = self._stored = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._database.close()
        os.unlink(self._path)
        if isinstance(error, sqlite3.Error):
            raise DataError(f"the temporary database {self._path} failed: {error}") from error

    def add(self, answer: tuple[int, float, int, bytes, bytes]) -> None:
        """Add (prompt's hash, reward, hash of the text, the prompt as it will be written, the text)."""
        prompt, reward, text_hash, head, text = answer
        self._waiting.append((prompt, reward, self._size, text_hash, head, text))
        self._size += len(head) + len(text)
        if self._size - self._stored >= BATCH_BYTES:
            self._store()

    def _store(self) -> None:
        rows, write = self._waiting, self._database.executemany
        write("INSERT OR IGNORE INTO prompts VALUES (?, ?)", ((row[0], row[2]) for row in rows))
        write("INSERT INTO texts VALUES (?, ?, ?)", ((row[2], row[4], row[5]) for row in rows))
        write(
            "INSERT INTO answers SELECT first, ?, ?, ? FROM prompts WHERE hash = ?",
            ((row[1], row[2], row[3], row[0]) for row in rows),
        )
        self._waiting, self._stored = [], self._size

    def groups(self) -> Iterator[Iterator[Answer]]:
        """Yield the answers of each prompt, in the order in which prompts first occur; best answer first, equally good
        ones in the order of the file."""
        self._store()
        found = self._database.execute("SELECT * FROM answers ORDER BY first, reward DESC, place")
        for _, group in groupby(map(Answer._make, found), key=itemgetter(0)):
            yield group

    def texts(self, answer: Answer) -> tuple[bytes, bytes]:
        """Return the prompt and the text of an answer, as they were added."""
        query = "SELECT head, text FROM texts WHERE place = ?"
        head, text = self._database.execute(query, (answer.place,)).fetchone()
        return head, text
