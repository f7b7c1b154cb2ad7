"""math-verify, but for answers that are told to do what answers may do to a verifier."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from grpo_mcore.environments.verifiers import make_verifier

MARK = "FAULT "
"""Begins a faulty answer; what it does follows."""
FAULTS = {
    "hangs in Python": "timed out after",
    "hangs in C": "timed out after",
    "sleeps": "timed out after",
    "exits": "crashed: the worker process ended with exit code 3",
    "is killed": "crashed: the worker process was ended by SIGKILL",
    "reads address 0": "crashed: the worker process was ended by SIGSEGV",
    "raises": "crashed: RuntimeError: no verdict",
    "asks for too much memory": "crashed: MemoryError",
    "eats memory": ("crashed: MemoryError", "timed out after"),
}
"""What it does -> how the reason begins that it has to be given."""

_verify = make_verifier("hf_math_verify")  # when this is imported: ahead of the fork


def verify(response: str, truth: str) -> tuple[float, str | None]:
    """The reward and the answer, where the answer lets it."""
    if response.startswith(MARK):
        misbehave(response.removeprefix(MARK))
    return _verify(response, truth)


verify.learns = True  # type: ignore[attr-defined]


def misbehave(fault: str) -> None:
    """Never returns."""
    if fault == "hangs in Python":
        while True:
            pass
    if fault == "hangs in C":
        pow(7, 7**9)
    if fault == "sleeps":
        time.sleep(3600)
    if fault == "exits":
        os._exit(3)
    if fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "reads address 0":
        ctypes.string_at(0)
    if fault == "asks for too much memory":
        bytearray(2**40)
    if fault == "eats memory":
        held = []
        while True:
            held.append(b"x" * 2**20)
    raise RuntimeError("no verdict")
