"""The lock of vLLM's engine, for the thread that runs generation steps and for calls from other threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class EngineLock:
    """A lock in which calls go before generation steps, and which can hold generation back altogether."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: longest wait for the lock."""
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._asking = 0
        self._held = False
        self._paused = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the lock for one generation step, once no call waits. Raises TimeoutError if `hold` lasts too long; a
        `pause` may last as long as the caller wants."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._paused)
                if not self._changed.wait_for(lambda: not self._asking and not self._held, self._timeout_s):
                    raise TimeoutError(
                        f"generation was held back for {self._timeout_s:g} s by a refit that did not end"
                    )
            with self._lock:
                if not self._held and not self._paused:  # by a call that took the lock first
                    yield
                    return

    @contextmanager
    def call(self) -> Iterator[None]:
        """Hold the lock for a call between two steps. Raises TimeoutError if the step before does not end."""
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
        """Hold generation back, or let it go on, over a few calls."""
        with self._changed:
            self._held = held
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self, paused: bool) -> None:
        """Pause or resume generation, for as long as somebody else needs the device."""
        with self._changed:
            self._paused = paused
            self._changed.notify_all()
