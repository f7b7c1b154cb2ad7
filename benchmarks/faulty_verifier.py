"""math-verify, but some answers make it do what an answer can do to a verifier."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from grpo_mcore.environments.math.hf_math_verify import hf_math_verify

MARK = "FAULT "
"""Beginning of a faulty answer; the name of its fault follows."""
FAULTS: dict[str, str | tuple[str, ...]] = {
    "hangs in C": "timed out after",
    "is killed": "crashed: the worker process ended: killed by SIGKILL",
    "eats memory": ("out of memory: more than", "timed out after"),
    "hangs in Python": "timed out after",
    "reads address 0": "crashed: the worker process ended: killed by SIGSEGV",
    "sleeps": "timed out after",
    "exits": "crashed: the worker process ended: exit code 3",
    "raises": "crashed: RuntimeError: no verdict",
    "asks for too much memory": "out of memory: more than",
}
"""Fault -> the beginning of the reason that it must get."""


def verify(response: str, truth: str) -> tuple[bool, str | None]:
    """Verify the response, or do what a faulty one asks for."""
    if response.startswith(MARK):
        misbehave(response.removeprefix(MARK))
    return hf_math_verify(response, truth)


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
