"""Several callers of one engine: one of those who wait takes the steps for all, and each gets its own samples.

No thread of its own: with one caller every step runs on that caller's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Caller:
    """Who waits for samples. `running`: request id -> the engine's id of it; `finished`: outputs to be fetched."""

    running: dict[str, str] = field(default_factory=dict)
    finished: deque[Any] = field(default_factory=deque)
    error: Exception | None = None


class SharedSteps:
    """`add` requests, then `next` until nothing is left. A step's error reaches every caller who waits for requests."""

    def __init__(
        self,
        step: Callable[[Callable[[Iterable[Any]], None]], None],
        timeout_s: float,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`step(deliver)`: one step of the engine; calls `deliver` with the finished outputs (each has a `request_id`)
        before anybody else may use the engine. `timeout_s`: the longest that a caller waits for a step of another's,
        unless generation is `paused`.
        """
        self._step, self._timeout_s, self._paused = step, timeout_s, paused
        self._changed = threading.Condition()
        self._owners: dict[str, Caller] = {}
        self._leading = False  # somebody takes steps
        self._stepped_at = 0.0

    @property
    def generating(self) -> bool:
        """Whether a request of any caller is unfinished."""
        return bool(self._owners)

    def add(self, caller: Caller, request_id: str, engine_id: str) -> None:
        with self._changed:
            caller.running[request_id] = engine_id
            self._owners[request_id] = caller

    def drop(self, caller: Caller) -> list[str]:
        """The caller wants no more. Returns the engine's ids of what is unfinished; outputs of it go nowhere."""
        with self._changed:
            for request_id in caller.running:
                del self._owners[request_id]
            unfinished, caller.running = list(caller.running.values()), {}
            return unfinished

    def give_up(self, request_ids: Iterable[str]) -> list[str]:
        """Nobody wants these any more, whoever asked for them. Returns the engine's ids of the unfinished ones."""
        with self._changed:
            unfinished = []
            for request_id in request_ids:
                if (caller := self._owners.pop(request_id, None)) is not None:
                    unfinished.append(caller.running.pop(request_id))
            self._changed.notify_all()
            return unfinished

    def resumed(self) -> None:
        """After a pause: who waits for another's step has as long as before."""
        self._stepped_at = time.monotonic()

    def next(self, caller: Caller) -> Any:
        """The next finished output of the caller's; None where nothing is to come.

        Raises what a step raised; another's step that failed is the cause of a RuntimeError. Raises TimeoutError when
        another's step does not end.
        """
        while not caller.finished:
            if not caller.running:
                return None
            if self._wait_to_lead(caller):
                try:
                    while caller.running and not caller.finished:
                        self._step(self._deliver)
                        self._stepped_at = time.monotonic()
                except Exception as error:
                    with self._changed:
                        for other in self._owners.values():
                            other.error = error
                    raise
                finally:
                    with self._changed:
                        self._leading = False
                        self._changed.notify_all()
        return caller.finished.popleft()

    def _wait_to_lead(self, caller: Caller) -> bool:
        """True: it is on the caller to step. False: there is an output for it, or nothing to wait for."""
        with self._changed:
            while not self._changed.wait_for(
                lambda: caller.finished or caller.error or not caller.running or not self._leading, self._timeout_s
            ):
                if not self._paused() and time.monotonic() - self._stepped_at > self._timeout_s:
                    raise TimeoutError(
                        f"a step of generation, taken for another caller, took over {self._timeout_s:g} s"
                    )
            if caller.finished or not caller.running:
                return False
            if caller.error is not None:
                raise RuntimeError(f"a step of generation failed: {caller.error}") from caller.error
            self._leading, self._stepped_at = True, time.monotonic()
            return True

    def _deliver(self, outputs: Iterable[Any]) -> None:
        with self._changed:
            found = False
            for output in outputs:
                caller = self._owners.pop(output.request_id, None)
                if caller is not None:
                    del caller.running[output.request_id]
                    caller.finished.append(output)
                    found = True
            if found:  # there may be hundreds who wait
                self._changed.notify_all()
