"""Who may use vLLM's engine now: the thread that generates, step by step, or a call from another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock under which generation lets others go first, and which can hold generation back altogether."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._asking = 0
        self._held = False

    @contextmanager
    def step(self, timeout_s: float) -> Iterator[None]:
        """One step of generation, when nobody else asks. Raises TimeoutError after `timeout_s` of being held back."""
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._asking and not self._held, timeout_s):
                    raise TimeoutError(f"generation was held back for {timeout_s:g} s by a refit that did not end")
            with self._lock:
                if not self._held:  # by a call that was faster to the lock
                    yield
                    return

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call between two steps."""
        with self._changed:
            self._asking += 1
        try:
            with self._lock:
                yield
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    def hold(self, held: bool) -> None:
        """Whether generation stands still between calls."""
        with self._changed:
            self._held = held
            self._changed.notify_all()
