"""Standard output and error that neither fail nor block: whoever reads them can neither end a run nor make it wait."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TextIO, cast

from grpo_mcore.base.clock import REAL

KEPT = 10_000
"""Pieces of text, mostly lines, that wait for a reader; further ones are left out."""

LAST_S = 3.0
"""Seconds that a reader gets for what is left at the end of the run."""


class UnfailingStream:
    """A text stream whose `write` and `flush` never fail: a console is no reason to end a run.

    What cannot be written, since the disk is full or the terminal or the reader of a pipe is gone, is left out. Such a
    terminal or pipe is replaced by /dev/null, so that nothing else that prints in this process fails. With a `writer`
    they do not block either.
    """

    spoke_at = float("-inf")
    """When any of them was last written to, by `REAL.now`."""

    def __init__(self, stream: Any, writer: Writer | None = None) -> None:
        """`stream`: None where the process was started without one."""
        self._stream = io.StringIO() if stream is None else stream
        self._writer = writer if _has_file(self._stream) else None

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def write(self, text: str) -> int:
        UnfailingStream.spoke_at = REAL.now()
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        shown = text.encode(encoding, "backslashreplace")  # it may lack a character, such as a bar's
        if self._writer is not None and self._writer.is_here:
            self._writer.put(self, shown)
        else:
            self._attempt(lambda: self._stream.write(shown.decode(encoding)))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def write_to_file(self, content: bytes) -> None:
        """Write past the buffer of the stream: a thread that waits there would hold its lock when the process ends."""
        self._attempt(lambda: _write(self._stream.fileno(), content))

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except ValueError:  # it is closed
            pass
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):
                with suppress(OSError, ValueError):  # a stream without a file
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, self._stream.fileno())
                    os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Writer(threading.Thread):
    """Writes for the streams of one process: a pipe that nobody reads (`| less`) and a stopped terminal (Ctrl-S) block
    this thread alone. What comes meanwhile is kept, up to KEPT pieces, and written when the reader goes on."""

    def __init__(self) -> None:
        super().__init__(name="console", daemon=True)
        self._pid = os.getpid()
        self._kept: SimpleQueue[tuple[UnfailingStream, bytes] | None] = SimpleQueue()  # signals' handlers may print
        self.start()

    @property
    def is_here(self) -> bool:
        """Whether the thread runs in this process: a fork has the streams, but not the thread."""
        return os.getpid() == self._pid and self.is_alive()

    def put(self, stream: UnfailingStream, content: bytes) -> None:
        if self._kept.qsize() < KEPT:
            self._kept.put((stream, content))

    def close(self) -> None:
        """Give up what nobody reads within LAST_S."""
        self._kept.put(None)
        self.join(LAST_S)

    def run(self) -> None:
        while (piece := self._kept.get()) is not None:
            stream, content = piece
            stream.write_to_file(content)


@contextmanager
def unfailing_console() -> Iterator[None]:
    """Replace standard output and error by streams that neither fail nor block, inside the block."""
    before, writer = (sys.stdout, sys.stderr), Writer()
    streams = UnfailingStream(sys.stdout, writer), UnfailingStream(sys.stderr, writer)
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        writer.close()


def _has_file(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (OSError, ValueError):  # text in memory, or closed
        return False


def _write(file: int, content: bytes) -> None:
    """Write all of it, also to a pipe that somebody has set not to block."""
    while content:
        try:
            content = content[os.write(file, content) :]
        except BlockingIOError:
            select.select([], [file], [])
