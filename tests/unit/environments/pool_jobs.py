"""Jobs for the worker processes of the tests, by name, and a verifier by import path."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTED_IN = os.getpid()


def make(start_s: float = 0.0) -> Callable[..., Any]:
    """Return the function of a pool, after `start_s` seconds."""
    time.sleep(start_s)
    return lambda job, *arguments: globals()[job](*arguments)


def make_nothing() -> Callable[..., Any]:
    raise OSError("no disk")


def die_at_once() -> Callable[..., Any]:
    os._exit(4)


def verify(response: str, truth: str) -> object:
    """A verifier that does what the response says."""
    if response in ("die", "sleep"):
        globals()[response]()
    return 0.5 if response == "half" else (response == truth, response)


def square(number: int) -> int:
    return number * number


def processes() -> tuple[int, int]:
    """This worker's process id, and that of the process that imported this module."""
    return os.getpid(), IMPORTED_IN


def sleep(seconds: float = 3600.0) -> None:
    time.sleep(seconds)


def start_process(file: str, seconds: float) -> None:
    """Start a process that would run for an hour, and leave it; then sleep."""
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    Path(file).write_text(str(child.pid))
    time.sleep(seconds)


def spin() -> None:
    while True:
        pass


def compute() -> int:
    return pow(7, 7**9)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(3)


def leave_politely() -> None:
    raise SystemExit(5)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("not\ntoday")


def allocate() -> int:
    return len(bytearray(8 * 2**30))


_kept: list[bytearray] = []


def hoard() -> None:
    """Take all memory there is, and keep it."""
    while True:
        _kept.append(bytearray(2**24))


def recurse() -> None:
    recurse()


def give_a_set() -> Any:
    return {1}


def environment() -> dict[str, str]:
    return dict(os.environ)
