"""Jobs in killable worker processes, each with a hard deadline of its own.

A job that hangs costs one worker its life and the other jobs next to nothing: once it is slow it runs when its turn
comes, and its worker's place is taken by one that was started ahead.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.worker_process import Launcher, WorkerStartError
from grpo_mcore.environments.worker_turns import Job, Result, Turns, Worker

# Shares of the deadline after which a job is slow, and very slow.
_SLOW, _VERY_SLOW = 0.015, 0.1
_SLOW_FOR_ITS_KIND = 2.5  # times what jobs take on average: less is not slow, whatever the deadline
_AT_ONCE = 2.0  # times what makes it slow: a slow job has that before it makes way for the others
_SLOW_BESIDE = 32  # slow ones at a time, at least: they wait much more than they run, and must not fill the places
# Deadlines after which a very slow job, and any other, ends although it has not had so much time of a processor.
_STRETCH_VERY_SLOW, _STRETCH = 1.5, 5.0
_BURST = 2  # workers that are started before others are listened to again
_START_FAILURES = 3  # in a row, then the pool gives up
_DYING_S = 5.0  # a killed process frees its memory first
_STOOD_STILL_S = 0.5  # so much later than it wanted does nobody wake up whose machine has time for it


class WorkerPool:
    """`num_workers` jobs at a time, and slow ones beside them where `slow_aside`: up to twice as many, or 32. Usable
    from several threads.

    `timeout_s`: the limit of one job, in seconds in which it runs or sleeps. Those for which it waits for a processor
    do not count, because a busy machine is not the job's fault, up to five times the limit; a job that has had a tenth
    of it ends at one and a half, or as soon as its place is needed. `launcher` starts the workers; `spare`: idle ones
    above `num_workers`, and as many more that have been slow. The constructor waits for the first.

    Raises EnvironmentConfigError where the function cannot be loaded, WorkerStartError where workers cannot be started;
    `run` raises the latter too.
    """

    def __init__(
        self, launcher: Launcher, num_workers: int, timeout_s: float, *, spare: int = 0, slow_aside: bool = True
    ) -> None:
        self.timeout_s, self.num_workers = timeout_s, num_workers
        self._launcher, self._spare = launcher, spare
        self._max_slow = max(2 * num_workers, _SLOW_BESIDE) if slow_aside else 0
        self._turns = Turns(len(os.sched_getaffinity(0)))
        self._usual_s = 0.0  # that jobs ran, on a running average
        self._lost_s = 0.0  # in which this process stood still
        self._jobs: deque[Job] = deque()
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._failed_starts = 0
        self._broken: Exception | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._one_is_up: Future[None] = Future()
        self._thread = threading.Thread(target=self._loop, name="worker pool", daemon=True)
        self._thread.start()
        self._one_is_up.result()

    def run(self, jobs: Sequence[Sequence[Any]]) -> list[Result]:
        """The function on each job's arguments, in order; returns when the last is done."""
        mine = [Job(arguments) for arguments in jobs]
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            self._jobs.extend(mine)
            self._ring()
        return [job.future.result() for job in mine]

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, as of now."""
        return [worker.process.pid for worker in list(self._workers)]

    def close(self) -> None:
        """Ends the workers, whatever they are doing. Jobs that are not done fail."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._ring()
        self._thread.join()

    def _ring(self) -> None:
        """Wakes the pool's thread. Under the lock, and not when it is closed."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._wake, b".")

    # From here on all is done by the pool's own thread.

    def _loop(self) -> None:
        """Waits for: messages and deaths of workers, jobs, deadlines."""
        broken: Exception | None = None
        try:
            while not self._closed:
                began = time.monotonic()
                self._start_workers()
                self._hand_out()
                patience = self._patience()
                for key, _ in self._selector.select(patience):
                    if key.data is None:
                        os.read(self._woken, 4096)
                    else:
                        self._listen(key.data)
                if patience is not None:
                    self._stood_still(time.monotonic() - began - patience)
                self._check_times()
        except Exception as error:
            broken = error
        self._end(broken)

    def _stood_still(self, late_s: float) -> None:
        """Where this thread comes round much later than it wanted, it was stopped, or its machine had no time for it:
        then nor for the workers, and that time is nobody's."""
        if late_s > _STOOD_STILL_S:
            self._lost_s += late_s

    def _now(self) -> float:
        """Seconds on a clock that stands still when this process does."""
        return time.monotonic() - self._lost_s

    def _end(self, broken: Exception | None) -> None:
        with self._lock:
            self._closed, self._broken = True, broken
            left = [*self._jobs, *(worker.job for worker in self._workers if worker.job is not None)]
            self._jobs.clear()
        for job in left:
            if broken is None:
                job.finish(failure="not done: the worker pool was closed")
            else:
                job.future.set_exception(broken)
        if not self._one_is_up.done():
            self._one_is_up.set_exception(broken or RuntimeError("the worker pool was closed"))
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.collect()
        self._workers.clear()
        self._launcher.close()
        self._selector.close()
        os.close(self._woken)
        os.close(self._wake)

    def _count(self, *states: str) -> int:
        return sum(worker.state in states for worker in self._workers)

    def _start_workers(self) -> None:
        missing = self.num_workers + self._spare - self._count("starting", "idle", "busy")
        for _ in range(min(missing, _BURST)):
            worker = Worker(self._launcher.launch(), self._now())
            self._workers.append(worker)
            self._selector.register(worker.process.connection.fileno(), selectors.EVENT_READ, worker)

    def _hand_out(self) -> None:
        free = self.num_workers - self._count("busy")
        idle = [worker for worker in self._workers if worker.state == "idle"]
        for worker in idle[: max(free, 0)]:
            if not self._jobs:
                return
            job = self._jobs.popleft()
            worker.begin(job, self._now())
            worker.check_at = worker.since + self._slow_s()
            try:
                worker.process.tell(job.arguments)
            except OSError:
                self._lost(worker)

    def _patience(self) -> float | None:
        """Seconds until something is to be done even if nobody says anything."""
        if self.num_workers + self._spare > self._count("starting", "idle", "busy"):
            return 0.0
        now = self._now()
        times = [worker.check_at for worker in self._workers if worker.state in ("busy", "slow")]
        if any(worker.state == "slow" for worker in self._workers):
            times.append(self._turns.next_at)
        times += [worker.since + self._launcher.work.start_s for worker in self._workers if worker.state == "starting"]
        times += [worker.since + _DYING_S for worker in self._workers if worker.state == "dying"]
        return max(min(times) - now, 0.0) if times else None

    def _listen(self, worker: Worker) -> None:
        worker.resume(self._now())
        message = worker.process.hear()
        if message is None:
            self._gone(worker)
        elif worker.state == "starting":
            self._started(worker, message)
        elif worker.job is not None:
            job, worker.job = worker.job, None
            self._usual_s += 0.05 * (worker.ran_s() - self._usual_s)
            job.finish(message.get("value"), message.get("failed"))
            if worker.state == "busy" and "value" in message:
                self._launcher.teach(job.arguments)
            if message.get("last") or (worker.state == "slow" and not self._takes_back()):
                self._kill(worker)
            else:
                worker.state = "idle"

    def _takes_back(self) -> bool:
        """One that was slow: its place is taken, so it waits for the next one that is needed."""
        return self._count("starting", "idle", "busy") < self.num_workers + 2 * self._spare

    def _started(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["ready"]:
            self._failed_starts = 0
            worker.state = "idle"
            if not self._one_is_up.done():
                self._one_is_up.set_result(None)
        elif self._one_is_up.done():  # it loaded before
            self._kill(worker)
            self._start_failed(f"failed to load: {message['why']}")
        else:
            raise EnvironmentConfigError(f"{self._launcher.work.what} does not load: {message['why']}")

    def _gone(self, worker: Worker) -> None:
        """Its end of the connection is closed."""
        state, job, worker.job = worker.state, worker.job, None
        end = self._forget(worker)
        if state == "starting":
            self._start_failed(f"ended before it was ready: it {end}")
        elif job is not None and worker.process.orphaned:
            self._again(job)
        elif job is not None:
            seconds, by_timer = self._now() - job.started, end == "was ended by SIGALRM"
            if by_timer and seconds >= self.timeout_s:
                job.finish(failure=self._timed_out)
            elif by_timer and time.monotonic() - job.started_at > seconds + _STOOD_STILL_S:
                self._again(job)  # the timer counted while all stood still
            else:
                job.finish(failure=f"crashed: the worker process {end}")

    def _lost(self, worker: Worker) -> None:
        """It died while it was idle: its new job has not begun."""
        job, worker.job = worker.job, None
        assert job is not None
        self._again(job)
        self._kill(worker)

    def _again(self, job: Job) -> None:
        job.losses += 1
        if job.losses < _START_FAILURES:
            self._jobs.appendleft(job)
        else:
            job.finish(failure="crashed: its worker processes were ended from outside")

    def _start_failed(self, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _START_FAILURES:
            raise WorkerStartError(
                f"{self._launcher.work.what}: a worker process {why}, {self._failed_starts} times in a row; the "
                "machine may be out of memory or overloaded, or num_workers too large for it"
            )

    def _forget(self, worker: Worker) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.process.connection.fileno())
        return worker.process.collect()

    def _kill(self, worker: Worker) -> None:
        """Its death shows at its connection."""
        worker.state, worker.since = "dying", self._now()
        worker.process.kill()

    @property
    def _timed_out(self) -> str:
        return f"timed out after {self.timeout_s:g} s"

    def _check_times(self) -> None:
        now = self._now()
        for worker in list(self._workers):
            if worker.state in ("busy", "slow") and now >= worker.check_at:
                self._check(worker, now)
            elif worker.state == "starting" and now - worker.since >= self._launcher.work.start_s:
                self._kill(worker)
                self._start_failed(f"was not ready after {self._launcher.work.start_s:g} s")
            elif worker.state == "dying" and now - worker.since >= _DYING_S:
                self._forget(worker)  # another process holds its connection open
        slow = [worker for worker in self._workers if worker.state == "slow"]
        if slow and now >= self._turns.next_at:
            self._turns.deal(slow, self._count("busy"), _AT_ONCE * self._slow_s(), now)

    def _check(self, worker: Worker, now: float) -> None:
        if worker.process.connection.poll():  # done, or dead: it is this process that is late
            return
        wall = now - worker.since
        own = worker.own_s(now)
        very_slow = _VERY_SLOW * self.timeout_s
        stretch = _STRETCH_VERY_SLOW if worker.state == "slow" and own >= very_slow else _STRETCH
        if own >= self.timeout_s or wall >= stretch * self.timeout_s:
            if not worker.process.connection.poll():
                self._time_out(worker)
            return
        slow = self._slow_s()
        if worker.state == "busy" and own >= slow and self._room_for_slow(now):
            worker.state = "slow"
            self._turns.next_at = now
        left = self.timeout_s - own
        if worker.state == "slow":  # it may become very slow when it has its turn
            left = min(left, max(_STRETCH_VERY_SLOW * self.timeout_s - wall, 2.0 * very_slow))
        else:  # a slow one, too, makes way as soon as there is room beside
            left = min(left, slow - own if own < slow else slow)
        worker.check_at = now + max(left, 0.01)

    def _slow_s(self) -> float:
        """Seconds after which a job is slow; where none ever is, the deadline."""
        if not self._max_slow:
            return self.timeout_s
        return min(max(_SLOW * self.timeout_s, _SLOW_FOR_ITS_KIND * self._usual_s), _VERY_SLOW * self.timeout_s)

    def _time_out(self, worker: Worker) -> None:
        job, worker.job = worker.job, None
        assert job is not None
        job.finish(failure=self._timed_out)
        self._kill(worker)

    def _room_for_slow(self, now: float) -> bool:
        slow = [worker for worker in self._workers if worker.state == "slow"]
        if len(slow) < self._max_slow:
            return True
        late = [worker for worker in slow if now - worker.since >= self.timeout_s]
        own = {worker: worker.own_s(now) for worker in late}
        longest = max(late, key=own.__getitem__, default=None)
        if longest is None or own[longest] < _VERY_SLOW * self.timeout_s:  # the machine is busy, and not they
            return False
        self._time_out(longest)
        return True
