"""The driver's clock: one object that is passed in, so that a run also works in virtual time.

Everything on the driver's side of `Cluster` takes its time from `cluster.clock`. Workers, and what talks to the world
outside a run (leases of folders, trackers), have the machine's time.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol


class Clock(Protocol):
    """Tells the time, and lets it pass."""

    def now(self) -> float:
        """Return seconds, for differences: they never go back."""

    def unix(self) -> float:
        """Return the seconds since 1970."""

    def sleep(self, seconds: float) -> None: ...

    def thread(self, name: str) -> Executor:
        """Return an executor with one thread. Under a virtual clock, which no thread can follow, it runs each task at
        once."""

    def beat(self, seconds: float, action: Callable[[], object], name: str) -> Callable[[], None]:
        """Call `action` every `seconds` in a thread, until the returned function is called. Under a virtual clock
        nothing is done: no other process sees its time."""


class RealClock:
    """The machine's time."""

    def now(self) -> float:
        return time.perf_counter()

    def unix(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def thread(self, name: str) -> Executor:
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def beat(self, seconds: float, action: Callable[[], object], name: str) -> Callable[[], None]:
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(seconds):
                action()

        def end() -> None:
            ended.set()
            thread.join(seconds)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return end


REAL = RealClock()
