"""Standard output and error that neither fail nor block: whoever reads them can neither end a run nor make it wait."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

PATIENCE_S = 1.0
"""Seconds that a flush waits for a reader. Then nothing waits for it any more until it has caught up."""

LAST_S = 3.0
"""Seconds that a reader gets for what is left at the end of the run."""

KEPT = 10_000
"""Pieces of text, mostly lines, that wait for a reader; further ones are left out, and their lines counted."""


class UnfailingStream:
    """A text stream whose `write` and `flush` never fail: a console is no reason to end a run.

    What cannot be written, since the disk is full or the terminal or the reader of a pipe is gone, is left out. Such a
    terminal or pipe is replaced by /dev/null, so that nothing else that prints in this process fails. With a `writer`
    they do not block either.
    """

    def __init__(self, stream: Any, writer: Writer | None = None) -> None:
        """`stream`: None where the process was started without one."""
        self._stream = io.StringIO() if stream is None else stream
        self._writer = writer if _has_file(self._stream) else None

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def write(self, text: str) -> int:
        if self._writer is not None and self._writer.is_here:
            self._writer.put(self, text)
            return len(text)
        try:
            self._attempt(lambda: self._stream.write(text))
        except UnicodeEncodeError as error:  # the terminal's encoding lacks a character, such as a bar's
            shown = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            self._attempt(lambda: self._stream.write(shown))
        return len(text)

    def flush(self) -> None:
        if self._writer is not None and self._writer.is_here:
            self._writer.wait()
        else:
            self._attempt(self._stream.flush)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def write_to_file(self, text: str) -> None:
        """Write past the buffer of the stream: a thread that waits there would hold its lock when the process ends."""
        self._attempt(lambda: _write(self._stream.fileno(), text.encode(self._stream.encoding, "backslashreplace")))

    def discard(self) -> None:
        """Give up what could not be written so far: Python would end the process with exit code 120 because of it."""
        try:
            self._stream.flush()
        except ValueError:  # it is closed
            pass
        except OSError:
            self._replace_by_null()

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except UnicodeEncodeError:
            raise
        except ValueError:  # it is closed
            pass
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):
                self._replace_by_null()

    def _replace_by_null(self) -> None:
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
        self._changed = threading.Condition()  # its lock may be taken again by a signal's handler that prints
        self._kept: deque[tuple[UnfailingStream, str]] = deque()
        self._omitted = 0
        self._late = self._ended = False
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def is_here(self) -> bool:
        """Whether the thread runs in this process: a fork has the streams, but not the thread."""
        return os.getpid() == self._pid and not self._ended

    def put(self, stream: UnfailingStream, text: str) -> None:
        with self._changed:
            if len(self._kept) >= KEPT:
                self.wait()
            if self._omitted or len(self._kept) >= KEPT:
                self._omitted += text.count("\n")
                return
            self._kept.append((stream, text))
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all is written, unless the reader is known to be late."""
        with self._changed:
            if not self._late and not self._changed.wait_for(lambda: not self._kept, PATIENCE_S):
                self._late = True

    def close(self) -> None:
        """Give up what nobody has read by now."""
        if not self.is_here:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._kept, LAST_S)
            self._ended = True
            self._changed.notify_all()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._kept) or self._ended)
                if self._ended:
                    return
                stream, text = self._kept[0]
            stream.write_to_file(text)
            with self._changed:
                self._kept.popleft()
                if self._kept:
                    continue
                self._late, omitted, self._omitted = False, self._omitted, 0
                if omitted:
                    self.put(stream, f"\n[{omitted} lines are left out here: nobody read this output for a while]\n")
                self._changed.notify_all()


@contextmanager
def unfailing_console() -> Iterator[None]:
    """Replace standard output and error by streams that neither fail nor block, inside the block."""
    before, writer = (sys.stdout, sys.stderr), Writer()
    replaced = UnfailingStream(sys.stdout, writer), UnfailingStream(sys.stderr, writer)
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", replaced)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        writer.close()
        for stream in replaced:
            stream.discard()


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
