"""What the worker processes of these tests do, by the name of the job."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any


def make(greeting: str = "") -> Callable[..., Any]:
    """The function of a pool."""

    def do(what: str, *arguments: Any) -> Any:
        return f"{greeting}{arguments[0]}" if what == "say" else globals()[what](*arguments)

    return do


def make_learning(learns: bool = True) -> Callable[[str], list[str]]:
    """What it was asked before, in this process or in the one that it was forked from."""
    before: list[str] = []

    def remember(word: str) -> list[str]:
        if word == "die":
            die()
        before.append(word)
        return before[:-1]

    remember.learns = learns  # type: ignore[attr-defined]
    return remember


def make_nothing() -> Callable[..., Any]:
    raise OSError("no disk")


def die_at_once() -> Callable[..., Any]:
    os._exit(4)


def square(number: int) -> int:
    return number * number


def wait_for(path: str) -> str:
    """Sleeps until there is a file."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return "seen"


kept: list[list[int]] = []


def keep(lists: int) -> int:
    """How often Python searched all for garbage meanwhile."""
    before = gc.get_stats()[2]["collections"]
    kept.extend([] for _ in range(lists))
    return gc.get_stats()[2]["collections"] - before


def pid() -> int:
    return os.getpid()


def sleep() -> None:
    time.sleep(3600)


def spin() -> None:
    while True:
        pass


def busy_for(seconds: float) -> str:
    """Of a processor."""
    while time.process_time() < seconds:
        pass
    return "done"


def compute() -> int:
    return pow(7, 7**9)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("not\ntoday")


def leave_politely() -> None:
    raise SystemExit(5)


def allocate() -> int:
    return len(bytearray(8 * 2**30))


_kept: list[bytearray] = []


def hoard() -> None:
    """Takes what there is and keeps it."""
    while True:
        _kept.append(bytearray(2**24))


def recurse() -> None:
    recurse()


def give_a_set() -> Any:
    return {1}


def environment() -> dict[str, str]:
    return dict(os.environ)
