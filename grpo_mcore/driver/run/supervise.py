"""Restart a run from its newest checkpoint after it lost a process or a node (cluster.max_restarts).

The run has a process of its own, because Ray ends its driver when it ends, and because a driver may be killed.
"""

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from grpo_mcore.base import orphan_reaper, processes
from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.base.stopping import StopNow, handled, is_ignored
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.observe.console.heartbeat import expect
from grpo_mcore.recipe import MasterConfig

logger = logging.getLogger(__name__)

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

EXIT_S = 60.0
"""Seconds that the process of a run gets to end once the run is over."""

REAPER_S = 10.0
"""Seconds to wait until the orphan reaper of a killed run has ended Ray and removed its files."""

Attempt = Callable[[MasterConfig, "str | bool | None", float], "tuple[int, str | None]"]
"""(recipe, checkpoint to resume from, unix time at which the first attempt began) -> (exit code, the loss that ended
the run or None). Must be a function of a module, or a partial of one, so that another process can call
it, and unblock signals by `stopping.on_signal` and `on_sigterm`."""


@dataclass
class _Child:
    """The process of the run, if there is one. `asked`: the last signal that this process got. `waiting`: one that the
    run has not got yet, because its process was just being started."""

    process: Any = None
    asked: int | None = None
    waiting: int | None = None

    def forward(self) -> None:
        """Pass a signal that waits on to the process of the run, if it is there."""
        if self.process is not None and self.process.is_alive():
            number, self.waiting = self.waiting, None
            if number is not None:
                os.kill(self.process.pid, number)


def supervise(
    attempt: Attempt, config: MasterConfig, resume: str | bool | None, began: float, *, verb: str = "train"
) -> int:
    """Run `attempt` in a process of its own, and again after each loss, until cluster.max_restarts restarts in a row
    have brought no new checkpoint. Return the exit code of the last attempt. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are
    forwarded to it. `verb`: the command, for the messages."""
    processes.adopt_orphans()
    expect(float("inf"))  # the process of the run prints
    child = _Child()
    with _forward_signals(child):
        once = partial(_run, child, attempt, config, began)
        return until_over(once, config, resume, lambda: child.asked, verb)


def until_over(
    attempt: Callable[[str | bool | None], tuple[int, str | None]],
    config: MasterConfig,
    resume: str | bool | None,
    asked: Callable[[], int | None] = lambda: None,
    verb: str = "train",
    clock: Clock = REAL,
) -> int:
    """Call `attempt` with the checkpoint to resume from until it ends without a loss, or too often with one. Return its
    exit code. `attempt`: returns that and the loss or None; `asked`: returns the signal that asks the run to stop."""
    checkpoints = CheckpointManager(config.checkpointing)
    retries = Retries(config.cluster.max_restarts, config.cluster.retry_wait_s, clock, partial(_end_if, asked))
    newest = checkpoints.latest_if_readable()  # the attempt says whether it can be resumed
    while True:
        code, loss = attempt(resume)
        if loss is None or asked() is not None:
            return code
        if (latest := checkpoints.latest_if_readable(newest)) != newest:
            newest, resume = latest, True  # the newest: if it is damaged, the one before it
            retries.reset()
        if retries.exhausted:
            logger.warning(
                "grpo-mcore %s: the run was lost: %s; that was %d times in a row (cluster.max_restarts) without a new "
                "checkpoint, so it ends",
                *(verb, loss, config.cluster.max_restarts + 1),
            )
            return code
        logger.warning("grpo-mcore %s: the run was lost: %s; it goes on %s", verb, loss, _from(newest, resume))
        with suppress(StopNow):
            retries.failed(RuntimeError(loss))
        if (number := asked()) is not None:
            return 128 + number


def _end_if(asked: Callable[[], int | None]) -> None:
    """End the wait for the next attempt where a signal asks the run to stop."""
    if asked() is not None:
        raise StopNow


def _run(
    child: _Child, attempt: Attempt, config: MasterConfig, began: float, resume: str | bool | None
) -> tuple[int, str | None]:
    """Run one attempt. Return its exit code, and the loss that ended it or None."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child.process = context.Process(target=_serve, args=(os.getpid(), sender, attempt, config, resume, began))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # in the child until `stopping` handles them
    try:
        child.process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    child.forward()  # another thread of this process may have taken a signal meanwhile
    children = [process for process in processes.descendants() if process.pid != child.process.pid]
    sender.close()
    try:
        ended = receiver.recv()  # when the run is over, or its process has ended
    except (EOFError, OSError):
        ended = None
    receiver.close()
    child.process.join(None if ended is None else EXIT_S)
    if child.process.is_alive():
        logger.warning("the run is over, but its process did not end within %g s; it is killed", EXIT_S)
        child.process.kill()
        child.process.join()
    _end_orphans(children)
    if ended is not None:
        return ended["code"], ended["loss"]
    number = child.process.exitcode
    code = number if number >= 0 else 128 - number
    return code, f"its driver was {processes.describe_exit(number)}" if number < 0 else "Ray ended its driver"


def _end_orphans(children: Collection[psutil.Process]) -> None:
    """Kill the processes that a killed run has left behind: they have become children of this one, in addition to its
    `children`. Those that clean up are only waited for: the reaper of Ray ends when it has ended Ray and removed its
    files, Python's resource trackers when they have removed the shared memory of the killed processes."""
    orphans = [process for process in processes.descendants() if process not in children]
    processes.end([process for process in orphans if not _cleans_up(process)], grace_s=0)
    processes.wait(orphans, REAPER_S)


def _cleans_up(process: psutil.Process) -> bool:
    try:
        is_reaper = Path(orphan_reaper.__file__).name in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False
    return is_reaper or orphan_reaper.is_tracker(process.pid)


def _serve(
    parent: int, pipe: Connection, attempt: Attempt, config: MasterConfig, resume: str | bool | None, began: float
) -> None:
    """Run one attempt, in its own process."""
    processes.die_with_parent(parent, signal.SIGTERM)
    os.setsid()  # a terminal's Ctrl-C goes to the parent, which passes it on: once
    code, loss = 1, None
    try:
        code, loss = attempt(config, resume, began)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # it is over: a signal must not change its exit code
        sys.stdout.flush()
        pipe.send({"loss": loss, "code": code})  # without this it did not end by itself
        pipe.close()
    sys.exit(code)


@contextmanager
def _forward_signals(child: _Child) -> Iterator[None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        child.asked = child.waiting = number
        child.forward()

    with handled({number: forward for number in FORWARDED if not is_ignored(number)}):
        yield


def _from(newest: Path | None, resume: str | bool | None) -> str:
    return f"from {newest}" if newest is not None else f"from {resume}" if resume else "from the start"
