"""Answers by prompt, for files of any size: texts in a temporary file; where they lie, and their rewards, sorted."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from grpo_mcore.data.gym.disk_sort import RUN_BYTES, DiskSort, Record


class Entry(NamedTuple):
    """One answer. `prompt`, `text`: 64-bit hashes; `lowness`: the reward with the other sign, so that the best come
    first; `place`: byte offset of the prompt, which the answer follows; sizes in bytes."""

    prompt: int
    lowness: float
    place: int
    text: int
    prompt_size: int
    text_size: int

    @property
    def reward(self) -> float:
        return -self.lowness


_KINDS = "qdqqii"

Pair = tuple[int, Entry, Entry]
"""(place where the prompt first occurs, chosen, rejected)"""


class PairIndex:
    """`add` every answer, then read `groups`, then `add_pairs`, then read `pairs` and their `texts`."""

    def __init__(self, folder: Path, run_bytes: int = RUN_BYTES) -> None:
        self._texts = tempfile.TemporaryFile(dir=folder, buffering=1 << 20)
        self._size = 0
        self._answers = DiskSort(folder, _KINDS, keys=3, run_bytes=run_bytes)
        self._pairs = DiskSort(folder, "qq" + 2 * _KINDS, keys=2, run_bytes=run_bytes)
        self._number = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for file in (self._texts, self._answers, self._pairs):
            file.close()

    def add(self, answer: tuple[int, float, int, bytes, bytes]) -> None:
        """(prompt's hash, reward, hash of the text, the prompt as it will be written, the text)"""
        prompt, reward, text_hash, head, text = answer
        self._answers.add(prompt, -reward, self._size, text_hash, len(head), len(text))
        self._texts.write(head)
        self._texts.write(text)
        self._size += len(head) + len(text)

    def groups(self) -> Iterator[Iterator[Record]]:
        """The answers of each prompt, best first, then in the order of the file; values of an Entry."""
        self._texts.flush()
        for _, group in groupby(self._answers, key=itemgetter(0)):
            yield group

    def add_pairs(self, pairs: Iterable[Pair]) -> None:
        for first, chosen, rejected in pairs:
            self._pairs.add(first, next(self._number), *chosen, *rejected)

    def pairs(self) -> Iterator[tuple[Entry, Entry]]:
        """(chosen, rejected), by where their prompts first occur, those of one prompt as they were added."""
        fields = len(_KINDS)
        for record in self._pairs:
            yield Entry._make(record[2 : 2 + fields]), Entry._make(record[2 + fields :])

    def texts(self, entry: Entry) -> tuple[bytes, bytes]:
        """(prompt, answer), as they were added."""
        both = os.pread(self._texts.fileno(), entry.prompt_size + entry.text_size, entry.place)
        return both[: entry.prompt_size], both[entry.prompt_size :]
