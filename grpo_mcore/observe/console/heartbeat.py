"""Say what a command is doing wherever its console would be silent: while it imports, checks and starts."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from grpo_mcore.base.clock import REAL
from grpo_mcore.observe.console.console_stream import UnfailingStream

logger = logging.getLogger(__name__)

QUIET_S = 10.0
"""Longest silence of the console, in seconds, while no steps are shown."""
LOOK_S = 0.5
PACKAGE = __name__.partition(".")[0]


class Heartbeat:
    """Prints a line after each `quiet_s` seconds in which nothing was printed, with what the main thread is doing.

    While steps are shown, one may take twice as long as the step before it: see `expect`."""

    expected_s = 0.0
    """Seconds of silence that are usual now. Of the class, since there is one console in a process."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s, self._since, self._said_at = quiet_s, REAL.now(), REAL.now()

    def look(self) -> None:
        """Print the line, if it is due."""
        now, spoke_at = REAL.now(), UnfailingStream.spoke_at
        if spoke_at > self._said_at:  # something else was printed since
            self._since = self._said_at = spoke_at
        if now - self._said_at > max(self._quiet_s - LOOK_S, Heartbeat.expected_s):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            logger.info("  ... %.0f s: %s", now - self._since, doing(frame))
            self._said_at = max(REAL.now(), UnfailingStream.spoke_at)


@contextmanager
def heartbeat() -> Iterator[None]:
    """Let no silence of the console last longer than QUIET_S inside the block."""
    expect(0.0)
    end = REAL.beat(LOOK_S, Heartbeat(QUIET_S).look, "heartbeat")
    try:
        yield
    finally:
        end()


def expect(seconds: float) -> None:
    """Let the console be silent for so long, such as for two steps; 0: only for QUIET_S."""
    Heartbeat.expected_s = seconds


def doing(frame: FrameType | None) -> str:
    """Return what a thread does, by its innermost frame: the library that it imports, or the function of this package
    that it is in."""
    function, library = "", ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "importlib._bootstrap" and frame.f_code.co_name == "_find_and_load":
            name = str(frame.f_locals.get("name", "")).partition(".")[0]
            library = name if name != PACKAGE else library
        elif module.startswith(f"{PACKAGE}.") and not function:
            function = f"{frame.f_code.co_name} in {module.replace('.', '/')}.py"
        frame = frame.f_back
    return f"importing {library}" if library else function or "working"
