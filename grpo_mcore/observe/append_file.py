"""A file of lines that only grows, and outlives a kill and a full disk."""

import itertools
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

logger = logging.getLogger(__name__)


class AppendFile:
    """Appends lines. Each is handed to the system at once, so it survives the end of this process.

    Lines that the disk has no room for are kept in memory and written with the next one, so that nothing is missing in
    between. `lines`: number of whole lines in the file and in memory.
    """

    def __init__(self, path: Path) -> None:
        """Open for appending, without a last line that a kill has cut off: the next line would be joined to it."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = _cut_torn_end(path) if path.exists() else 0
        self._file = path.open("a+b", buffering=0)
        # Where in the file the text begins that may not be in it yet, and the text. One value: Ctrl-C may come between
        # any two instructions.
        self._pending = (self._file.tell(), b"")
        self._at_end = True  # the file ends where the pending text begins
        self._complained = False

    def write_json(self, fields: Mapping[str, Any]) -> None:
        """Append an object of JSON as a line."""
        try:
            line = msgspec.json.encode(fields)
        except (TypeError, ValueError, OverflowError):  # half a surrogate pair, a number of numpy, a huge integer
            line = json.dumps(fields).encode()
        self._append(line)

    def write(self, line: str) -> None:
        """Append a line, given without its end."""
        self._append(line.encode())

    def _append(self, line: bytes) -> None:
        start, text = self._pending
        self._pending = (start, text + line + b"\n")
        self.lines += 1
        try:
            self._flush()
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning(
                    "%s cannot be written: %s; its lines are kept in memory, and written when there is room",
                    *(self.path, error.strerror or error),
                )

    def sync(self) -> int:
        """Flush all lines to the disk. Return their number. Raises OSError if there is no room for them."""
        self._flush()
        os.fsync(self._file.fileno())
        return self.lines

    def line(self, number: int) -> bytes:
        """Return line `number`, from 1 on, of those on the disk, with its end; b"" if there is none."""
        with self._content() as file:  # a file of bytes ends its lines at \n alone
            return next(itertools.islice(file, number - 1, None), b"") if number else b""

    def restore(self) -> bool:
        """Make the file anew, with all its lines, where it was removed: what is open still has them. Say so, and return
        whether it was removed. Another file in its place is left alone."""
        try:
            self.path.stat()
            return False
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # it cannot be looked at, which does not mean that it is gone
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            with self._content() as lines, partial.open("wb") as copy:
                shutil.copyfileobj(lines, copy)
            partial.replace(self.path)
            new = self.path.open("a+b", buffering=0)
        except OSError as error:
            logger.warning("%s was removed, and cannot be made anew: %s", self.path, error.strerror or error)
            return True
        self._file.close()
        self._file = new
        logger.warning("%s was removed while the run goes on: it is made anew, and no line is missing", self.path)
        return True

    def _content(self) -> BinaryIO:
        """Open what has been written, also where the file's name is gone. Lines are appended wherever it is read."""
        content = os.fdopen(os.dup(self._file.fileno()), "rb")
        content.seek(0)
        return content

    def close(self) -> None:
        """May be called again."""
        if self._file.closed:
            return
        try:
            self._flush()
        except OSError as error:
            lost = self._pending[1].count(b"\n")
            logger.error("the last %d lines of %s could not be written: %s", lost, self.path, error.strerror or error)
        self._file.close()

    def _flush(self) -> None:
        while True:
            start, text = self._pending
            if not self._at_end:
                end = os.fstat(self._file.fileno()).st_size  # a write that was interrupted right after it counts too
                self._pending = (end, text[max(0, end - start) :])
                self._at_end = True
            elif text:
                self._at_end = False
                written = self._file.write(text) or 0
                self._pending = (start + written, text[written:])
                self._at_end = True
            else:
                break
        if self._complained:
            self._complained = False
            logger.warning("%s can be written again; no line is missing", self.path)


def _cut_torn_end(path: Path) -> int:
    """Remove a last line that a kill cut off. Return the number of whole lines."""
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
    return text.count(b"\n")
