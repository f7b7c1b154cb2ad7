"""The base of environments whose agents generate whole samples, asking the policy's endpoint for each turn."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from grpo_mcore.environments.agents.samples import AgentFailure, AgentOutcome, AgentSample
from grpo_mcore.environments.agents.stages import AgentConfig
from grpo_mcore.environments.http_retries import RetryPolicy
from grpo_mcore.environments.interfaces import EnvironmentBase
from grpo_mcore.rollout.trajectory import AgentRequest, Sampling, Score, Trajectory

BACKOFF_S = 0.5
"""Seconds before the second attempt of a rollout."""
OPEN_S = 120.0
"""Seconds in which an environment opens what all its samples share, and closes it."""
BEAT_S = 1.0
"""Seconds between two signs of life of the event loop."""
_REQUEST: ContextVar[AgentRequest | None] = ContextVar("request", default=None)
"""The sample that the current task works for."""


class PolicyEndpoint(Protocol):
    """The address of the policy's own chat endpoint. `url` ends before the API's `/v1`. `model`: its name there."""

    @property
    def url(self) -> str: ...

    @property
    def token(self) -> str: ...

    @property
    def model(self) -> str: ...


class AgentLoop:
    """The event loop of all agents of a process, in a thread: their libraries keep locks of one loop. It notices code
    that holds it."""

    _current: ClassVar[AgentLoop | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.loop, self._beat = asyncio.new_event_loop(), time.monotonic()
        self._request_of = WeakKeyDictionary[asyncio.Future[Any], AgentRequest]()
        self.loop.set_task_factory(self._new_task)
        threading.Thread(target=self.loop.run_forever, name="agents", daemon=True).start()
        self.loop.call_soon_threadsafe(self._mark_beat)

    @classmethod
    def of_process(cls) -> AgentLoop:
        """Return the loop of this process, a new one if the last is held for good."""
        with cls._lock:
            if cls._current is None or cls._current.held()[0] is not None:
                cls._current = cls()
            return cls._current

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(OPEN_S)

    def _new_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Return a new task, and remember the sample that it works for."""
        task = asyncio.Task(work, loop=loop, **options)
        if (request := _REQUEST.get()) is not None:
            self._request_of[task] = request
        return task

    def begin(self, request: AgentRequest) -> None:
        """Let the current task, and those that it starts, work for a sample."""
        _REQUEST.set(request)
        if (task := asyncio.current_task()) is not None:
            self._request_of[task] = request

    def _mark_beat(self) -> None:
        self._beat = time.monotonic()
        self.loop.call_later(BEAT_S, self._mark_beat)

    def held(self) -> tuple[AgentRequest | None, float]:
        """Return the sample whose code has held the loop for more than a beat, and for how many seconds."""
        seconds, task = time.monotonic() - self._beat - BEAT_S, asyncio.current_task(self.loop)
        return (self._request_of.get(task) if task is not None and seconds > BEAT_S else None), seconds


class AgentEnvironment(EnvironmentBase):
    """Runs the agents in the event loop of its process. Several threads may use one instance.

    A sample whose code holds the event loop beyond the deadline of its stage, such as a reward function that does not
    end, cannot be interrupted: it has no reward, and the environment is restarted for the others."""

    concurrent_calls = 4
    config_class: ClassVar[type[AgentConfig]]
    config: Any
    ends_run: ClassVar[type[Exception] | tuple[type[Exception], ...]] = ()
    """Errors that no other sample would do better with."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._agents = AgentLoop.of_process()
        self._agents.call(self.open())
        self.room = asyncio.Semaphore(self.config.num_samples_in_parallel or 10**9)
        """How many samples may run at a time."""

    def stage_of(self, request: AgentRequest) -> tuple[str, float]:
        """Return the stage that a sample is in, and its deadline in seconds."""
        return "play", self.config.rollout_timeout_s

    async def open(self) -> None:
        """Open what all samples share."""

    async def close(self) -> None:
        """Close what `open` has opened."""

    @abstractmethod
    async def attempt(
        self, request: AgentRequest, sampling: Sampling, endpoint: PolicyEndpoint, start: float
    ) -> tuple[AgentSample, Sequence[Any], Callable[[], Any]]:
        """Return a sample, the weight versions of its calls, and a function that gives the agent's result. `start`:
        when the sample began, by time.perf_counter. Raises AgentFailure."""

    async def _sample(
        self, request: AgentRequest, sampling: Sampling, endpoint: PolicyEndpoint, keep_result: bool
    ) -> AgentOutcome:
        """Return the outcome of one sample. What fails costs this sample alone, unless it is an `ends_run`."""
        start, failures = time.perf_counter(), list[str]()
        uid, index = request.uid, request.generation_index

        def repetition_wait_s(error: BaseException) -> float | None:
            return error.wait_s if isinstance(error, AgentFailure) and error.again else None

        async def attempt() -> tuple[AgentSample, Trajectory, Callable[[], Any]]:
            try:
                sample, versions, result = await self.attempt(request, sampling, endpoint, start)
                return sample, sample.trajectory(uid, index, versions), result
            except AgentFailure as failure:
                failures.extend([failure.kind] if failure.kind else [])
                raise

        try:
            policy = RetryPolicy(self.config.max_row_attempts - 1, BACKOFF_S)
            sample, trajectory, result = await policy.run(attempt, repetition_wait_s)
        except self.ends_run:
            raise
        except Exception as error:  # agents are others' code: a result of an unforeseen form costs its own sample
            unforeseen = f"the agent's result cannot be read: {type(error).__name__}: {error}"
            reason = str(error) if isinstance(error, AgentFailure) else unforeseen
            score = Score(None, None, reason, time.perf_counter() - start, terminated=False, failures=tuple(failures))
            return AgentOutcome(uid, index, None, score)
        score = replace(sample.score, solved_at=self.solved_at, failures=(*failures, *sample.score.failures))
        return AgentOutcome(uid, index, trajectory, score, result() if keep_result else None)

    def play(
        self, requests: Sequence[AgentRequest], sampling: Sampling, endpoint: PolicyEndpoint, keep_results: bool = False
    ) -> Iterator[AgentOutcome]:
        """Yield each outcome when its sample ends, in any order. `endpoint`: the policy's. Raises `ends_run`: no
        other sample would do better then."""
        done: queue.SimpleQueue[AgentOutcome | Exception] = queue.SimpleQueue()

        async def run(request: AgentRequest) -> None:
            self._agents.begin(request)
            try:
                done.put(await self._sample(request, sampling, endpoint, keep_results))
            except Exception as error:  # raised below, in the thread of the caller
                done.put(error)

        samples = [asyncio.run_coroutine_threadsafe(run(request), self._agents.loop) for request in requests]
        try:
            for _ in requests:
                while (outcome := _next(done)) is None:
                    request, seconds = self._agents.held()
                    if request is None or request not in requests:
                        continue
                    if seconds > (limit := self.stage_of(request))[1]:
                        yield _held_outcome(request, limit[0], seconds)
                        raise AgentFailure(f"{request.uid}: its code holds the event loop; the others are asked again")
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            for sample in samples:
                sample.cancel()

    def shutdown(self) -> None:
        if self._agents.held()[0] is None:  # otherwise nothing runs there any more
            self._agents.call(self.close())


def _next(done: queue.SimpleQueue[AgentOutcome | Exception]) -> AgentOutcome | Exception | None:
    try:
        return done.get(timeout=BEAT_S)
    except queue.Empty:
        return None


def _held_outcome(request: AgentRequest, stage: str, seconds: float) -> AgentOutcome:
    reason = f"{stage}: its code has held the event loop for {seconds:.0f} s"
    score = Score(None, None, reason, seconds, terminated=False, failures=(f"{stage}: timeout",))
    return AgentOutcome(request.uid, request.generation_index, None, score)
