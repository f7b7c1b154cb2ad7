"""A run that is asked to end. SIGUSR1: finish this step, save, and leave. SIGTERM: leave in order, as on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """`reason` once somebody has asked, None before."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason


@contextmanager
def on_signal() -> Iterator[StopRequest]:
    """Inside, SIGUSR1 asks the run to stop after its step. Batch systems send it before the time limit.

    In a thread other than the main one there are no signals; the request can then only be made by `ask`.
    """
    request = StopRequest()
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
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt. Ray sets a handler of its own when it is imported: enter this after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
