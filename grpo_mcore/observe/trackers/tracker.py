"""Send metrics to a tracker (Weights & Biases, MLflow, a custom logger, ...) without letting it slow or end a run."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

B = TypeVar("B")

KEPT = 10_000
"""Maximum number of calls that are kept for a tracker that does not answer. The oldest are dropped."""

ATTEMPTS = 3
"""Failed attempts after which a call lets the others go first: a tracker may refuse this one alone."""

LONGEST_WAIT_S = 60.0
"""Maximum wait between two attempts. The first is a second, each further one twice the wait before."""

CLOSE_S = 20.0
"""Seconds that a tracker gets at the end of a run to take what is left. The last half is for
closing it."""


@dataclass
class _Call(Generic[B]):
    what: str
    run: Callable[[B], None]
    number: int
    failures: int = 0


class Tracker(Generic[B]):
    """Runs the calls to one backend in a thread of its own, in order.

    A call that fails is kept and tried again, so that a tracker lacks nothing after an outage. An outage is said once,
    and so is its end. What the tracker has not taken when the run ends is counted and said.
    """

    def __init__(self, name: str, open_backend: Callable[[], B], *, first_wait_s: float = 1.0) -> None:
        """`name`: the key of the recipe, for messages. `open_backend`: connects; it is tried again like any call."""
        self.name = name
        self._open, self._first_wait_s = open_backend, first_wait_s
        self._backend: B | None = None
        self._calls: deque[_Call[B]] = deque()
        self._changed = threading.Condition()
        self._closing_by: float | None = None  # monotonic time
        self._drop_from = math.inf  # while it closes: from when on calls that fail are dropped
        self._outage: str | None = None
        self._dropped = 0
        self._made = 0
        self._first_dropped: tuple[_Call[B], str | None] | None = None  # the earliest call, and the outage then
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> int:
        """Number of calls that the tracker has not taken so far."""
        with self._changed:
            return len(self._calls) + self._dropped

    @property
    def outage(self) -> str | None:
        """The error of the last attempt; None if that succeeded."""
        return self._outage

    def call(self, what: str, run: Callable[[B], None]) -> None:
        """Queue a call. Returns at once and raises nothing. `what`: for messages, such as "step 5"."""
        with self._changed:
            self._append(what, run)
            if len(self._calls) > KEPT:
                self._drop()
            self._changed.notify()

    def close(self, close_backend: Callable[[B], None], *, within_s: float = CLOSE_S) -> None:
        """Wait up to `within_s` seconds until the tracker has taken everything and is closed. Say what it lacks."""
        if self._closing_by is not None:
            return
        with self._changed:
            self._closing_by = time.monotonic() + within_s
            self._drop_from = self._closing_by - within_s / 2
            self._append("the end of the run", close_backend)
            self._changed.notify()
        self._thread.join(within_s + 1.0)
        with self._changed:  # of the calls that are left, one that failed may stand behind later ones
            lacking = [(call, self._outage) for call in self._calls]
            lacking += [self._first_dropped] if self._first_dropped else []
            missing = len(self._calls) + self._dropped
        if missing:
            first, outage = min(lacking, key=lambda one: one[0].number)
            why = outage or f"no answer within {within_s:g} s"
            log.warning(
                "%s lacks %d calls, from %s on: %s; metrics.jsonl has everything",
                *(self.name, missing, first.what, why),
            )

    def _work(self) -> None:
        wait_s = self._first_wait_s
        while True:
            with self._changed:
                while not self._calls:
                    if self._closing_by is not None:
                        return
                    self._changed.wait()
                call = self._calls[0]
            try:
                if self._backend is None:
                    self._backend = self._open()
                call.run(self._backend)
            # A tracker may raise anything, also sys.exit's, and none of it is a reason to stop training.
            except (Exception, SystemExit) as error:
                if not self._failed(call, error, wait_s):
                    return
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                self._taken(call)
                wait_s = self._first_wait_s

    def _taken(self, call: _Call[B]) -> None:
        with self._changed:
            if self._calls and self._calls[0] is call:  # not dropped meanwhile
                self._calls.popleft()
        if self._outage is not None:
            self._outage = None
            log.info("%s takes metrics again", self.name)

    def _append(self, what: str, run: Callable[[B], None]) -> None:
        self._calls.append(_Call(what, run, self._made))
        self._made += 1

    def _drop(self) -> None:
        call = self._calls.popleft()
        self._dropped += 1
        if self._first_dropped is None or call.number < self._first_dropped[0].number:
            self._first_dropped = (call, self._outage)

    def _failed(self, call: _Call[B], error: BaseException, wait_s: float) -> bool:
        """Say what is wrong, once, and wait for the next attempt. Return whether there is time for one."""
        first, self._outage = self._outage is None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if first:
            log.warning(
                "%s does not take %s: %s; the run goes on, and it is tried again",
                *(self.name, call.what, self._outage),
            )
        call.failures += 1
        failed_at = time.monotonic()
        with self._changed:
            others = len(self._calls) - 1 - (self._closing_by is not None)  # the last closes the tracker
            if failed_at >= self._drop_from:  # what closes the tracker, and sends what it holds, gets its turn
                while len(self._calls) > 1:
                    self._drop()
            if call.failures % ATTEMPTS == 0 and others > 0 and self._calls[0] is call:
                self._calls.popleft()
                self._calls.insert(others, call)
            while True:
                end = failed_at + wait_s
                if self._closing_by is not None:
                    end = min(failed_at + self._first_wait_s, self._closing_by)
                if (left_s := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            return self._closing_by is None or time.monotonic() < self._closing_by
