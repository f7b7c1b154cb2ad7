"""Who may use vLLM's engine now: the thread that takes the steps of generation, or a call from another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class EngineLock:
    """A lock under which generation lets others go first, and which can hold generation back altogether."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: the longest wait for a turn."""
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._asking = 0
        self._held = False
        self._paused = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of generation, when nobody else asks. Raises TimeoutError when it is held back too long; a pause is
        as long as who pauses wants it to be."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._paused)
                if not self._changed.wait_for(lambda: not self._asking and not self._held, self._timeout_s):
                    raise TimeoutError(
                        f"generation was held back for {self._timeout_s:g} s by a refit that did not end"
                    )
            with self._lock:
                if not self._held and not self._paused:  # by a call that was faster to the lock
                    yield
                    return

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call between two steps. Raises TimeoutError when the step before does not end."""
        with self._changed:
            self._asking += 1
        try:
            if not self._lock.acquire(timeout=self._timeout_s):
                raise TimeoutError(f"a step of generation, or a call, did not end within {self._timeout_s:g} s")
            try:
                yield
            finally:
                self._lock.release()
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    def hold(self, held: bool) -> None:
        """Whether generation stands still between calls, for a moment."""
        with self._changed:
            self._held = held
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self, paused: bool) -> None:
        """Whether generation stands still, for as long as somebody else needs what it runs on."""
        with self._changed:
            self._paused = paused
            self._changed.notify_all()
