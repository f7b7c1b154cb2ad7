"""The numbered lines of a file of any size, plain or gzip, with one line in memory at a time."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from grpo_mcore.data.interfaces import DataError

LONGEST_LINE = 256 << 20
"""Bytes. A longer line is not read into memory; it is reported as unusable."""
_BUFFER = 1 << 20
_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class LineReader:
    """Iterates over (number from 1, line without the byte order mark, or None where it is longer than `longest`).

    Only \\n ends a line: other separators occur within texts. Raises DataError for a file that is missing, is UTF-16,
    or whose compressed data is damaged, since the number of lost lines is then unknown.
    """

    def __init__(self, path: Path, longest: int = LONGEST_LINE) -> None:
        self.path = path
        self.longest = longest
        try:
            self._stored = io.BufferedReader(io.FileIO(path), _BUFFER)
            self.size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        self._text: io.BufferedIOBase = self._stored
        if self._stored.peek(2)[:2] == _GZIP:
            self._text = io.BufferedReader(gzip.GzipFile(fileobj=self._stored), _BUFFER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._text.close()
        self._stored.close()

    @property
    def position(self) -> int:
        """Bytes read so far out of `size`, the size on disk; both are 0 for a pipe."""
        return self._stored.tell() if self._stored.seekable() else 0

    @property
    def seekable(self) -> bool:
        """Whether `block` works: the file is neither compressed nor a pipe."""
        return self._text is self._stored and self._stored.seekable()

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        return self._lines()

    def block(self, start: int, end: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield the lines that begin in the bytes [start, end), numbered from 1."""
        self._stored.seek(max(start - 1, 0))
        before = start - 1
        while start and before < end:  # the rest of a line that began earlier
            piece = self._stored.readline(min(_BUFFER, end - before))
            before += len(piece)
            if not piece or piece[-1:] == b"\n":
                break
        return self._lines(end - max(before, 0), at_start=not start)

    def _lines(self, size: float = math.inf, at_start: bool = True) -> Iterator[tuple[int, bytes | None]]:
        """Yield the lines that begin in the next `size` bytes."""
        readline, most = self._text.readline, self.longest + 1
        number = 0
        try:
            while size > 0 and (line := readline(most)):
                number += 1
                size -= len(line)
                if number == 1 and at_start and line[:2] in _UTF16_MARKS:
                    raise DataError(f"{self.path}: this is UTF-16 text; make it UTF-8 first (iconv -f UTF-16 -t UTF-8)")
                if len(line) == most and line[-1:] != b"\n":
                    size -= self._skip_line()
                    yield number, None
                else:
                    yield number, line[3:] if line[:3] == _UTF8_MARK else line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self.path}: the compressed data is cut off or damaged after line {number} ({error}); "
                f"what can still be read: gzip -dc {self.path.name} > whole.jsonl"
            ) from error

    def _skip_line(self) -> int:
        """Skip the rest of the line and return its length."""
        length = 0
        while piece := self._text.readline(_BUFFER):
            length += len(piece)
            if piece[-1:] == b"\n":
                break
        return length
