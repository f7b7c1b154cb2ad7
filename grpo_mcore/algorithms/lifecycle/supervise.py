"""A run that goes on by itself after a loss (cluster.max_restarts): it is a process of its own, and this one starts it
again from its newest checkpoint.

A process of its own, because Ray ends the driver with itself, and a driver may be killed as well.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from grpo_mcore.algorithms.checkpointing.checkpoints import CheckpointManager
from grpo_mcore.algorithms.engines.retries import Retries
from grpo_mcore.cluster import orphan_reaper
from grpo_mcore.recipe import MasterConfig

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
ORPHANS_S = 10.0
"""How long what a killed run has left behind may take to end."""

Attempt = Callable[[MasterConfig, "str | bool | None", float], "tuple[int, str | None]"]
"""One run from a recipe, what it resumes from, and the unix time at which the first one began. Returns its exit code,
and the loss that ended it, or None. A function of a module."""


@dataclass
class _Child:
    """The process of the run, while there is one. `asked`: the last signal that was passed on to it."""

    process: Any = None
    asked: int | None = None


def supervise(attempt: Attempt, config: MasterConfig, resume: str | bool | None, began: float) -> int:
    """Runs `attempt` in a process of its own, again after each loss, cluster.max_restarts times in a row without a new
    checkpoint between. Returns the exit code of the last one. SIGINT, SIGTERM and SIGUSR1 are passed on to it."""
    checkpoints = CheckpointManager(config.checkpointing)
    retries = Retries(config.cluster.max_restarts, config.cluster.retry_wait_s)
    newest = checkpoints.latest()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = _Child()
    with _signals_go_to(child):
        while True:
            code, loss = _run(child, attempt, config, resume, began)
            if loss is None or child.asked is not None:
                return code
            if (found := checkpoints.latest()) != newest:
                newest, resume = found, str(found)
                retries.reset()
            if retries.exhausted:
                times = f"{config.cluster.max_restarts + 1} times in a row (cluster.max_restarts)"
                _tell(f"the run was lost: {loss}; that was {times} without a new checkpoint, so it ends")
                return code
            _tell(f"the run was lost: {loss}; it goes on {_from(newest, resume)}")
            retries.failed(RuntimeError(loss))
            if child.asked is not None:
                return 128 + child.asked


def _run(
    child: _Child, attempt: Attempt, config: MasterConfig, resume: str | bool | None, began: float
) -> tuple[int, str | None]:
    """(exit code, the loss that ended it, or None) of one attempt."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child.process = context.Process(target=_serve, args=(there, attempt, config, resume, began))
    child.process.start()
    own = [process for process in psutil.Process().children(recursive=True) if process.pid != child.process.pid]
    there.close()
    child.process.join()
    _end_orphans(own)
    number = child.process.exitcode
    code = number if number >= 0 else 128 - number
    try:
        ended = here.recv() if here.poll() else None
    except (EOFError, OSError):
        ended = None
    here.close()
    if ended is not None:
        return code, ended["loss"]
    return code, f"its driver was killed by {signal.Signals(-number).name}" if number < 0 else "Ray ended its driver"


def _end_orphans(own: Collection[psutil.Process]) -> None:
    """What a killed run has left behind: its processes have become children of this one, beside its `own`. The reaper
    of Ray ends by itself, when it has ended Ray and removed its files."""
    orphans = [process for process in psutil.Process().children(recursive=True) if process not in own]
    for process in orphans:
        with suppress(psutil.NoSuchProcess):
            if Path(orphan_reaper.__file__).name not in " ".join(process.cmdline()):
                process.kill()
    psutil.wait_procs(orphans, timeout=ORPHANS_S)


def _serve(pipe: Connection, attempt: Attempt, config: MasterConfig, resume: str | bool | None, began: float) -> None:
    """The process of one attempt."""
    os.setsid()  # a terminal's Ctrl-C goes to the parent, which passes it on: once
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    code, loss = 1, None
    try:
        code, loss = attempt(config, resume, began)
    finally:
        sys.stdout.flush()
        pipe.send({"loss": loss})  # without this it did not end by itself
    sys.exit(code)


def _end_with_parent(pipe: Connection) -> None:
    try:
        pipe.recv()  # nothing is ever sent: it ends when the parent does
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _signals_go_to(child: _Child) -> Iterator[None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        child.asked = number
        if child.process is not None and child.process.is_alive():
            os.kill(child.process.pid, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _from(newest: Path | None, resume: str | bool | None) -> str:
    return f"from {newest}" if newest is not None else f"from {resume}" if resume else "from the start"


def _tell(text: str) -> None:
    print(f"grpo-mcore train: {text}", file=sys.stderr, flush=True)
