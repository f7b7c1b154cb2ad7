"""The input and output of the transformations: numbered lines of a file of any size, plain or gzip, with one line in
memory at a time; and a file that appears whole or not at all."""

import gzip
import io
import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from grpo_mcore.data.interfaces import DataError

LONGEST_LINE = 256 << 20
"""Bytes. A longer line is not read into memory; it is reported as unusable."""
_BUFFER = 1 << 20
_PROGRESS_S = 10.0
_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number from 1, line without the byte order mark, or None where it is longer than LONGEST_LINE), and report
    the progress on stderr every ten seconds.

    Only \\n ends a line: other separators occur within texts. Raises DataError for a file that is missing, is UTF-16,
    or whose compressed data is damaged, since the number of lost lines is then unknown.
    """
    try:
        stored = io.BufferedReader(io.FileIO(path), _BUFFER)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    with stored:
        packed = stored.peek(2)[:2] == _GZIP
        text = io.BufferedReader(gzip.GzipFile(fileobj=stored), _BUFFER) if packed else stored
        size = os.fstat(stored.fileno()).st_size  # 0 for a pipe
        start = shown_at = time.monotonic()
        number = 0
        try:
            while line := text.readline(LONGEST_LINE + 1):
                number += 1
                if number == 1 and line[:2] in _UTF16_MARKS:
                    raise DataError(f"{path}: this is UTF-16 text; make it UTF-8 first (iconv -f UTF-16 -t UTF-8)")
                if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    while (rest := text.readline(_BUFFER)) and not rest.endswith(b"\n"):
                        pass
                    yield number, None
                else:
                    yield number, line.removeprefix(_UTF8_MARK)
                now = time.monotonic()
                if now - shown_at > _PROGRESS_S:
                    shown_at = now
                    share = f"{stored.tell() / size:.0%}, " if size else ""
                    sys.stderr.write(f"{path.name}: {share}{number:,} rows, {number / (now - start):,.0f} rows/s\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path}: the compressed data is cut off or damaged after line {number} ({error}); "
                f"what can still be read: gzip -dc {path.name} > whole.jsonl"
            ) from error


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """Open a file that is written beside `target` and replaces it when the `with` block ends without an error and
    something was written. Otherwise `target` stays as it was. Raises DataError where it cannot be written."""
    whole = target.resolve()
    if whole.exists() and not whole.is_file():
        raise DataError(f"{target}: the output must be a file")
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.partial")
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("wb", buffering=_BUFFER)
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if partial.stat().st_size:
            partial.replace(whole)
    finally:
        partial.unlink(missing_ok=True)
