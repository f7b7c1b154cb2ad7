"""What a worker's log says, and what a late worker is doing: the second half of an error message."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from grpo_mcore.rollout.workers import Place

TAIL_LINES = 15
DUMP_S = 2.0
"""How long a late worker gets to write its stacks."""


def log_tail(log: str, lines: int = TAIL_LINES) -> str:
    """The end of a worker's log, with its path."""
    path = Path(log)
    try:
        text = _read_from(path, max(0, path.stat().st_size - 16384))
    except OSError:
        return f"its log is on its node: {log}"
    last = [line for line in text.splitlines() if not line.startswith((":job_id:", ":actor_name:"))][-lines:]
    if not last:
        return f"its log is empty: {log}"
    return "\n".join([f"end of its log, {log}:", *(f"    {line}" for line in last)])


def stacks(name: str, place: Place) -> str:
    """What the threads of a worker on this machine are doing."""
    told = frames(place)
    if told is None:
        return f"{name} is on {place.address}, its log: {place.log}"
    told = told or "no stack: it does not run Python"
    return f"{name} (process {place.pid}) is at, innermost first:\n{told}\nits log: {place.log}"


def frames(place: Place) -> str | None:
    """The stacks of a worker, which it writes to its log on SIGUSR1. None: its process is not on this machine."""
    path = Path(place.log)
    if not _is_worker(place):
        return None
    before = path.stat().st_size
    os.kill(place.pid, signal.SIGUSR1)
    deadline = time.monotonic() + DUMP_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if size == (size := path.stat().st_size) and size > before:
            break
    return own_frames(_read_from(path, before))


def own_frames(dump: str) -> str:
    """What matters of faulthandler's dump of all threads: without the threads of Python's and Ray's own
    machinery, and without what called the worker's method."""
    threads = []
    for thread in re.split(r"\n\n(?=(?:Current t|T)hread 0x)", dump.strip()):
        frames = [line for line in thread.splitlines() if line.startswith("  File ")]
        called = [index for index, frame in enumerate(frames) if "/grpo_mcore/cluster/host.py" in frame]
        frames = frames[: called[0]] if called else frames
        if not all(re.search(r"/ray/|/threading\.py|/concurrent/futures/", frame) for frame in frames):
            threads.append("\n".join(frames))
    return "\n  another thread:\n".join(threads)


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def _is_worker(place: Place) -> bool:
    """Whether the process of that number on this machine prints to that log: no other gets a signal."""
    try:
        return os.path.samefile(f"/proc/{place.pid}/fd/2", place.log)
    except OSError:
        return False
