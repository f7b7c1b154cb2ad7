"""A run that is asked to end. SIGUSR1: finish this step, save, and leave. SIGTERM: save what is trained so far and
leave; a second one, like Ctrl-C: leave in order, as it is."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class StopNow(BaseException):
    """Raised in the main thread where a wait is cut short. Only inside `StopRequest.interruptible`."""


class StopRequest:
    """`reason` once somebody has asked, None before. `at_once`: the step that has begun is not finished."""

    def __init__(self, save_by: float | None = None) -> None:
        """`save_by`: unix time after which the run is to end by itself."""
        self.at_once = False
        self._reason: str | None = None
        self._save_by = save_by
        self._heeded = 0
        self._cut_short = False

    @property
    def reason(self) -> str | None:
        if self._save_by is not None and time.time() >= self._save_by:
            self.ask("checkpointing.checkpoint_must_save_by has come")
        return self._reason

    @property
    def is_heeded(self) -> bool:
        """Whether a loop is running that looks for requests."""
        return self._heeded > 0

    def ask(self, reason: str, *, at_once: bool = False) -> None:
        self._reason = self._reason or reason
        self.at_once = self.at_once or at_once
        if at_once and self._cut_short:
            raise StopNow

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Inside, somebody looks for requests."""
        self._heeded += 1
        try:
            yield
        finally:
            self._heeded -= 1

    def interruptible(self, wait: Callable[[], T]) -> T | None:
        """What `wait` returns; None where a request that is to be met at once has ended it, or has come before. Nothing
        must depend on what `wait` does then."""
        if self.at_once:
            return None
        self._cut_short = True
        try:
            return wait()
        except StopNow:
            return None
        finally:
            self._cut_short = False


@contextmanager
def on_signal(save_by: float | None = None) -> Iterator[StopRequest]:
    """Inside, SIGUSR1 asks the run to stop after its step. Batch systems send it before the time limit.

    In a thread other than the main one there are no signals; the request can then only be made by `ask`.
    """
    request = StopRequest(save_by)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _frame: FrameType | None) -> None:
        request.ask(f"{signal.Signals(number).name} asked the run to stop")
        print(f"{signal.Signals(number).name}: this step is finished and saved, then the run ends", flush=True)

    before = signal.signal(signal.SIGUSR1, note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def on_sigterm(request: StopRequest) -> Iterator[None]:
    """Inside, SIGTERM asks the run to save and stop at once, where its loop is running; else, and the second time, it
    raises KeyboardInterrupt. Ray sets a handler of its own when it is imported: enter this after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not request.is_heeded:
            raise KeyboardInterrupt
        print("SIGTERM: what is trained so far is saved, then the run ends", flush=True)
        request.ask("SIGTERM asked the run to stop", at_once=True)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
