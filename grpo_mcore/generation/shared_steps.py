"""Several callers of one engine: one waiting caller runs the steps for all, and each gets its own samples.

There is no extra thread: with one caller every step runs on that caller's thread.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Caller:
    """A thread that waits for samples. `running`: request id -> the engine's id; `finished`: outputs not yet taken;
    `joining`: number of threads that are about to add requests; `closed`: it takes no more requests."""

    running: dict[str, str] = field(default_factory=dict)
    finished: list[Any] = field(default_factory=list)
    joining: int = 0
    closed: bool = False
    error: Exception | None = None


class SharedSteps:
    """Shares the engine's steps: `add` requests, then call `next` until it returns nothing. Another thread may add
    requests meanwhile, see `held_open`. A step's error reaches every waiting caller."""

    def __init__(
        self,
        step: Callable[[Callable[[Iterable[Any]], None]], None],
        timeout_s: float,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`step(deliver)`: runs one step of the engine and calls `deliver` with the finished outputs (each has a
        `request_id`) before anybody else may use the engine. `timeout_s`: longest wait for another caller's step,
        unless generation is `paused`.
        """
        self._step, self._timeout_s, self._paused = step, timeout_s, paused
        self._changed = threading.Condition()
        self._owners: dict[str, Caller] = {}
        self._leading = False  # a caller is running steps
        self._stepped_at = 0.0

    @property
    def generating(self) -> bool:
        """Return whether a request of any caller is unfinished."""
        return bool(self._owners)

    def add(self, caller: Caller, request_id: str, engine_id: str) -> None:
        with self._changed:
            caller.running[request_id] = engine_id
            self._owners[request_id] = caller
            if caller.joining:
                self._changed.notify_all()  # it may have had nothing to wait for

    @contextmanager
    def held_open(self, caller: Caller) -> Iterator[bool]:
        """Keep a caller from running out of requests inside the context. Yield False if it takes no more of them."""
        with self._changed:
            is_open = not caller.closed
            caller.joining += 1
        try:
            yield is_open
        finally:
            with self._changed:
                caller.joining -= 1
                self._changed.notify_all()

    def close(self, caller: Caller) -> None:
        """Let a caller take no more requests."""
        with self._changed:
            caller.closed = True

    def give_up(self, request_ids: Iterable[str]) -> list[str]:
        """Remove requests of any caller. Returns the engine's ids of the unfinished ones."""
        with self._changed:
            unfinished = []
            for request_id in request_ids:
                if (caller := self._owners.pop(request_id, None)) is not None:
                    unfinished.append(caller.running.pop(request_id))
            self._changed.notify_all()
            return unfinished

    def resumed(self) -> None:
        """Restart the timeout of waiting callers after a pause."""
        self._stepped_at = time.monotonic()

    def next(self, caller: Caller) -> list[Any]:
        """Wait, and return the caller's finished outputs, at least one; none if it has no request left. It then takes
        no more requests.

        Raises the error of its own step, a RuntimeError caused by the error of another caller's step, or TimeoutError
        if another caller's step does not end.
        """
        while not caller.finished:
            if not self._wait_for_requests(caller):
                return []
            if self._wait_to_lead(caller):
                try:
                    while caller.running and not caller.finished:
                        self._step(self.deliver)
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
        with self._changed:
            outputs, caller.finished = caller.finished, []
        return outputs

    def _wait_for_requests(self, caller: Caller) -> bool:
        """Return whether the caller has a request, after those that are being added. Otherwise close it."""
        with self._changed:
            self._changed.wait_for(lambda: caller.running or caller.finished or not caller.joining)
            caller.closed = not (caller.running or caller.finished)
            return not caller.closed

    def _wait_to_lead(self, caller: Caller) -> bool:
        """Wait. Return True if this caller must run the steps, False if it has an output or nothing to wait for."""
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

    def deliver(self, outputs: Iterable[Any]) -> None:
        """Hand finished outputs to their callers. Outputs of dropped requests are discarded."""
        with self._changed:
            delivered = False
            for output in outputs:
                caller = self._owners.pop(output.request_id, None)
                if caller is not None:
                    del caller.running[output.request_id]
                    caller.finished.append(output)
                    delivered = True
            if delivered:  # hundreds of threads may be waiting
                self._changed.notify_all()
