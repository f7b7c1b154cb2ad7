"""Stop a run on request. SIGUSR1: finish the step, save, and exit. SIGTERM: save what is trained so far and exit. A
second SIGTERM, or Ctrl-C: exit in order without saving."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class StopNow(BaseException):
    """Raised in the main thread to interrupt a wait, only inside `StopRequest.waiting`."""


class StopRequest:
    """A request to stop. `reason`: why, None as long as nobody has asked; `at_once`: do not finish the current step."""

    def __init__(self, save_by: float | None = None) -> None:
        """`save_by`: unix time after which the run stops by itself."""
        self.at_once = False
        self._reason: str | None = None
        self._save_by = save_by
        self._heeded = 0
        self._interruptible = self._waiting = False

    @property
    def reason(self) -> str | None:
        if self._save_by is not None and time.time() >= self._save_by:
            self.ask("checkpointing.checkpoint_must_save_by has come")
        return self._reason

    @property
    def is_heeded(self) -> bool:
        """Whether a loop is running that reacts to requests."""
        return self._heeded > 0

    def ask(self, reason: str, *, at_once: bool = False) -> None:
        self._reason = self._reason or reason
        self.at_once = self.at_once or at_once
        if at_once and self._waiting:
            raise StopNow

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Mark the block in which a loop reacts to requests."""
        self._heeded += 1
        try:
            yield
        finally:
            self._heeded -= 1

    def interruptible(self, wait: Callable[[], T]) -> T | None:
        """Return what `wait` returns, or None where an urgent request was there before or has interrupted it at one of
        its `waiting` blocks."""
        if self.at_once:
            return None
        self._interruptible = True
        try:
            return wait()
        except StopNow:
            return None
        finally:
            self._interruptible = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the block in which an interruptible wait only waits. An urgent request raises nowhere else: between the
        reads of a stream it would leave the rollouts half updated, and they go on while the checkpoint is saved."""
        self._waiting = self._interruptible
        try:
            if self._waiting and self.at_once:
                raise StopNow
            yield
        finally:
            self._waiting = False


@contextmanager
def on_signal(save_by: float | None = None) -> Iterator[StopRequest]:
    """Let SIGUSR1 ask the run to stop after its step. Batch systems send it before the time limit.

    Threads other than the main one get no signals; there, only `ask` makes the request.
    """
    request = StopRequest(save_by)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _frame: FrameType | None) -> None:
        request.ask(f"{signal.Signals(number).name} asked the run to stop")
        logger.info("%s: this step is finished and saved, then the run ends", signal.Signals(number).name)

    before = signal.signal(signal.SIGUSR1, note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def on_sigterm(request: StopRequest) -> Iterator[None]:
    """Let SIGTERM ask the run to save and stop at once. The second time, and while no loop is running, it raises
    KeyboardInterrupt. Importing Ray installs a handler too, so enter this block afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not request.is_heeded:
            raise KeyboardInterrupt
        logger.info("SIGTERM: what is trained so far is saved, then the run ends")
        request.ask("SIGTERM asked the run to stop", at_once=True)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
