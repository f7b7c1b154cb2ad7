"""A worker as its pool sees it: what it is at, for how long; and whose turn it is among the slow ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_mcore.environments.worker_process import Times, WorkerProcess

TURN_S = 0.01
"""How often slow jobs change places."""
SHARE = 0.005
"""Of the processors, for slow jobs where the others could use them all."""


@dataclass(frozen=True)
class Result:
    """`value`: what the function returned; `failure`: why there is none. `seconds`: from the start of the job."""

    value: Any
    failure: str | None
    seconds: float


@dataclass(eq=False)
class Job:
    arguments: Sequence[Any]
    future: Future[Result] = field(default_factory=Future)
    started: float = 0.0  # on the pool's clock
    started_at: float = 0.0  # on the machine's
    losses: int = 0  # workers that went under with it through no fault of its own

    def finish(self, value: Any = None, failure: str | None = None) -> None:
        seconds = time.monotonic() - self.started_at if self.started_at else 0.0
        self.future.set_result(Result(value, failure, seconds))


@dataclass(eq=False)
class Worker:
    process: WorkerProcess
    since: float
    """When it was started, given its job, or killed."""
    state: str = "starting"  # then: idle, busy, slow, dying
    job: Job | None = None
    check_at: float = 0.0
    before: Times = Times(0.0, 0.0)
    """Of its process, before its job."""
    paused_at: float | None = None
    paused_s: float = 0.0

    def begin(self, job: Job, now: float) -> None:
        job.started, job.started_at = now, time.monotonic()
        self.job, self.state, self.since = job, "busy", now
        self.before, self.paused_s = self.process.times(), 0.0

    def own_s(self, now: float) -> float:
        """Seconds in which its job ran or slept by itself."""
        paused_s = self.paused_s + (0.0 if self.paused_at is None else now - self.paused_at)
        return max(self.process.own_s(now - self.since - paused_s, self.before), self.ran_s())

    def ran_s(self) -> float:
        """Seconds of a processor that its job has had."""
        return max(self.process.times().ran_s - self.before.ran_s, 0.0)

    def pause(self, now: float) -> None:
        self.paused_at = now
        self.process.pause()

    def resume(self, now: float) -> None:
        if self.paused_at is not None:
            self.paused_s += now - self.paused_at
            self.paused_at = None
            self.process.resume()


class Turns:
    """Who of the slow ones runs: as many as there are processors that nobody else of the pool needs. Where there is
    none, one that has had little, or, on a credit which grows by `SHARE` of the processors, any one. Those come first
    that have had least: a job only somewhat slower than others soon ends, and one that hangs hardly runs (least
    attained service first: Nuyens and Wierman, The Foreground-Background queue, 2008). Those that sleep need no
    turn."""

    def __init__(self, processors: int) -> None:
        self._processors = processors
        self._credit_s, self._since, self.next_at = 0.0, 0.0, 0.0
        self._had: dict[Worker, float] = {}

    def deal(self, slow: Sequence[Worker], others: int, little_s: float, now: float) -> None:
        """`others`: jobs that are not slow. `little_s`: seconds of a processor that count as little."""
        known = self._had  # of one that is paused it does not change
        had = {w: known[w] if w.paused_at is not None and w in known else w.ran_s() for w in slow}
        self._account(had, now)
        wanting = [w for w in slow if w.paused_at is not None or w.process.wants_processor()]
        wanting.sort(key=had.__getitem__)
        places = max(self._processors - others, 0)
        if not places and wanting and (self._credit_s > 0.0 or had[wanting[0]] < little_s):
            places = 1
        for worker in wanting[:places]:
            worker.resume(now)
        for worker in wanting[places:]:
            if worker.paused_at is None:
                worker.pause(now)
        self.next_at = now + TURN_S

    def _account(self, had: dict[Worker, float], now: float) -> None:
        spent = sum(ran - self._had.get(worker, ran) for worker, ran in had.items())
        earned = SHARE * self._processors * min(now - self._since, 1.0)
        self._credit_s = min(max(self._credit_s + earned - spent, -TURN_S), TURN_S)
        self._had, self._since = had, now
