"""Send metrics to a tracker (Weights & Biases, MLflow, a custom logger, ...) without letting it slow or end a run."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

B = TypeVar("B")

KEPT = 10_000
"""Maximum number of calls that wait for a slow tracker. Further ones are dropped."""

WAITS_S = (1.0, 5.0)
"""Seconds before each further attempt at the first call that fails. Weights & Biases and MLflow have queues and further
attempts of their own."""

CLOSE_S = 20.0
"""Seconds that a tracker gets at the end of a run to take what is left and to close."""


class Tracker(Generic[B]):
    """Runs the calls to one backend in a thread of its own, in order.

    A call that fails is dropped, after further attempts if it is the first: `metrics.jsonl` has everything. An outage
    is logged once, and so is its end. What the tracker has not taken when the run ends is counted and logged.
    """

    def __init__(self, name: str, open_backend: Callable[[], B]) -> None:
        """`name`: the key of the recipe, for messages. `open_backend`: connects; called until it succeeds."""
        self.name = name
        self.outage: str | None = None
        """The error of the last attempt; None if that succeeded."""
        self._open = open_backend
        self._backend: B | None = None
        self._calls: queue.Queue[tuple[str, Callable[[B], None]]] = queue.Queue(KEPT)
        self._made = self._taken = 0
        self._current = "the start"
        self._close: Callable[[B], None] | None = None
        self._first_missing: tuple[str, str | None] | None = None  # and why
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> int:
        """Number of calls that the tracker has not taken so far."""
        return self._made - self._taken

    def call(self, purpose: str, run: Callable[[B], None]) -> None:
        """Queue a call. Returns at once and raises nothing. `purpose`: name of the call in messages, such as "step
        5"."""
        self._made += 1
        try:
            self._calls.put_nowait((purpose, run))
        except queue.Full:
            self._first_missing = self._first_missing or (purpose, f"{KEPT:,} calls wait for it")

    def close(self, close_backend: Callable[[B], None], *, within_s: float = CLOSE_S) -> None:
        """Wait up to `within_s` seconds until the tracker has taken everything and is closed. Log what it lacks."""
        if self._close is not None:
            return
        self._close = close_backend
        self.call("the end of the run", close_backend)
        self._thread.join(within_s)
        if self.missing:
            purpose, reason = self._first_missing or (self._current, f"no answer within {within_s:g} s")
            log.warning(
                "%s lacks %d calls, from %s on: %s; metrics.jsonl has everything",
                *(self.name, self.missing, purpose, reason),
            )

    def _work(self) -> None:
        run = None
        while run is None or run is not self._close:
            self._current, run = self._calls.get()
            if self._takes(run):
                self._taken += 1
            else:
                self._first_missing = self._first_missing or (self._current, self.outage)

    def _takes(self, run: Callable[[B], None]) -> bool:
        """Return whether the backend takes a call, at once or at a further attempt."""
        for wait_s in (0.0, *(WAITS_S if self.outage is None and self._close is None else ())):
            time.sleep(wait_s)
            try:
                if self._backend is None:
                    self._backend = self._open()
                run(self._backend)
            # A tracker may raise anything, also sys.exit's, and none of it is a reason to stop training.
            except (Exception, SystemExit) as error:
                text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if self.outage is None:
                    log.warning("%s does not take %s: %s; the run goes on", self.name, self._current, text)
                self.outage = text
            else:
                if self.outage is not None:
                    log.info("%s takes metrics again", self.name)
                self.outage = None
                return True
        return False
