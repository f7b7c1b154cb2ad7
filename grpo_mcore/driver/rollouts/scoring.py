"""Ask environments for rewards, each call with a deadline, and keep the damage small when one hangs or dies.

An environment that exceeds its deadline, or whose process ends, is restarted and asked about each sample separately.
One that raises is asked about each sample of that call separately. The sample on which it fails again has no reward,
but a reason; the others have their rewards. An environment that raises for every sample ends the run all the same: the
schedule tolerates few prompts without any reward.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from grpo_mcore.cluster import (
    Cluster,
    DeadlineExceeded,
    Future,
    ObjectStore,
    Place,
    Stream,
    Worker,
    WorkerDied,
    WorkerFailed,
    remote_call,
)
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.environments.interfaces import EnvironmentInterface, RemoteEnvironment
from grpo_mcore.parallel.platform import Platform, PlatformChoice
from grpo_mcore.rollout.trajectory import Outcome

_MAX_FAILURES = 20
"""Consecutive failures of one environment that are tolerated; the next one ends the run."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchLimits:
    """Samples of several requests that one call of an environment may hold, and for how many seconds a call that is
    not full waits for more of them."""

    max_size: int = 32
    max_wait_s: float = 0.0


class EnvironmentWorker:
    """An environment in a worker that can be restarted."""

    def __init__(
        self,
        cluster: Cluster,
        start: Callable[[], Worker],
        *,
        calls: int,
        timeout_s: float,
        runs_agents: bool = False,
        batch: BatchLimits = BatchLimits(),
    ) -> None:
        """`start`: spawns the worker. `calls`: how many calls it takes at a time; `timeout_s`: deadline of each.
        `runs_agents`: it generates whole samples itself, through the policy's endpoint. `batch`: limits of a call."""
        self._cluster, self._start = cluster, start
        self.batch = batch
        self.calls, self.timeout_s, self.runs_agents = calls, timeout_s, runs_agents
        self._worker = start()
        self.name = self._worker.name

    @property
    def spawn_seconds(self) -> float:
        return self._worker.spawn_seconds

    def ready(self) -> Future:
        return self._worker.ready()

    def place(self) -> Place:
        return self._worker.place()

    def call(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> Future:
        return self._worker.call(method, *args, timeout_s=timeout_s, purpose=purpose)

    def stream(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> Stream:
        return self._worker.stream(method, *args, timeout_s=timeout_s, purpose=purpose)

    def together(self) -> AbstractContextManager[object]:
        return self._worker.together()

    def restart(self) -> None:
        """End it, whatever it is doing, and wait for its successor."""
        self.stop()
        self._worker = self._start()
        self._worker.ready().result()

    def stop(self) -> None:
        self._cluster.stop([self._worker])


@dataclass(eq=False, slots=True)
class ScoreRequest:
    """Samples of one group whose last turn is to be scored: all of them, or one as it comes. `indices`: their
    generation indexes; `by_position`: the outcomes that have come, by position in `references`."""

    uid: str
    metadata: Sequence[dict[str, Any]]
    references: Sequence[Any]
    indices: Sequence[int]
    by_position: dict[int, Outcome] = field(default_factory=dict)
    dropped: bool = False

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes, by position in `references`, once all have come."""
        return [self.by_position[position] for position in range(len(self.references))]


@dataclass(eq=False, slots=True)
class _Call:
    """A call about some samples: (request, position) of each. `alone`: the environment gets no other call at the same
    time. `again`: one of its samples has failed before, and no other sample joins it. `queued_at`: time on the
    cluster's clock."""

    samples: list[tuple[ScoreRequest, int]]
    queued_at: float
    alone: bool = False
    again: bool = False
    pending: Future = field(init=False)
    deadline: float = field(init=False)
    since: float = field(init=False)

    @property
    def label(self) -> str:
        """The prompts it is about, for errors."""
        uids = list(dict.fromkeys(request.uid for request, _ in self.samples))
        return uids[0] if len(uids) == 1 else f"{uids[0]} and {len(uids) - 1} more"


@dataclass(eq=False)
class EnvQueue:
    """One environment with the calls that wait for it and those under way. `max_calls`: maximum number of calls at a
    time. `batch`: limits of the calls that join samples of several requests."""

    worker: Worker
    max_calls: float
    timeout_s: float
    batch: BatchLimits
    waiting: deque[_Call] = field(default_factory=deque)
    running: OrderedDict[Any, _Call] = field(default_factory=OrderedDict)  # by future, first deadline first
    failures: int = 0

    def hold_s(self, now: float) -> float:
        """Return the seconds for which the first call that waits is still held back, to be joined by others."""
        first, wait_s = self.waiting[0], self.batch.max_wait_s
        if not wait_s or first.again or first.alone:
            return 0.0
        size = 0
        for call in self.waiting:
            size += len(call.samples)
            if size >= self.batch.max_size:
                return 0.0
        return max(0.0, first.queued_at + wait_s - now)


class RewardScorer:
    """Collects the rewards of groups from several environments.

    `environments`: workers by task name. An EnvironmentWorker is restarted when it hangs or dies; other workers cannot
    be, and the error is raised. `on_restart`: gets the name of each worker that is restarted, and the reason.
    `on_span`: as in `Rollouts`. `joins`: a call may hold samples of several requests; otherwise each request is a call.
    """

    def __init__(
        self,
        environments: Mapping[str, Worker],
        cluster: Cluster,
        on_restart: Callable[[str, str], None] = lambda worker, reason: None,
        on_span: Callable[[str, str, float, float], None] = lambda worker, action, start, end: None,
        *,
        joins: bool = False,
    ) -> None:
        self._on_restart, self._on_span, self._joins = on_restart, on_span, joins
        self._clock = cluster.clock
        queues: dict[int, EnvQueue] = {}
        for worker in environments.values():
            limits: tuple[float, float, BatchLimits] = (float("inf"), cluster.call_timeout_s, BatchLimits())
            if isinstance(worker, EnvironmentWorker):
                limits = (worker.calls, worker.timeout_s, worker.batch)
            queues.setdefault(id(worker), EnvQueue(worker, *limits))
        self._queues = list(queues.values())
        self._by_task = {task: queues[id(worker)] for task, worker in environments.items()}
        self._scored: deque[ScoreRequest] = deque()
        self._exceptions: set[str] = set()  # that were logged

    def submit(
        self,
        uid: str,
        task: str,
        metadata: Sequence[dict[str, Any]],
        references: Sequence[Any],
        indices: Sequence[int] = (),
    ) -> None:
        """Request the rewards of trajectories of one group, given by reference; `send` asks for them. `indices`: their
        generation indexes; none: 0, 1, ..."""
        queue = self._by_task[task]
        request = ScoreRequest(uid, metadata, references, indices or range(len(references)))
        queue.waiting.append(_Call([(request, position) for position in range(len(references))], self._clock.now()))

    def uids(self) -> set[str]:
        """Return the prompts whose rewards have not been taken by `next`."""
        return {request.uid for request in self._requests()}

    def samples(self) -> list[tuple[str, int]]:
        """Return (uid, generation index) of each sample whose reward has not been taken by `next`."""
        return [(request.uid, index) for request in self._requests() for index in request.indices]

    def _requests(self) -> list[ScoreRequest]:
        calls = (call for queue in self._queues for call in (*queue.waiting, *queue.running.values()))
        requests = dict.fromkeys(request for call in calls for request, _ in call.samples)
        return [request for request in (*requests, *self._scored) if not request.dropped]

    def drop(self, uids: Collection[str], indices: Collection[int] | None = None) -> None:
        """Drop the requests of these prompts, or of these samples of them."""
        for request in self._requests():
            if request.uid in uids and (indices is None or set(request.indices) <= set(indices)):
                request.dropped = True
        for queue in self._queues:
            for call in queue.waiting:
                call.samples = [sample for sample in call.samples if not sample[0].dropped]
            queue.waiting = deque(call for call in queue.waiting if call.samples)
        self._scored = deque(request for request in self._scored if not request.dropped)

    def awaited(self) -> list[Future]:
        """Return the calls under way."""
        return list(itertools.chain.from_iterable(queue.running for queue in self._queues))

    def seconds_left(self) -> float:
        """Return the seconds until the first deadline of a call, or until a call that is held back is sent."""
        now = self._clock.now()
        deadlines = [next(iter(queue.running.values())).deadline - now for queue in self._queues if queue.running]
        held = [queue.hold_s(now) for queue in self._queues if queue.waiting and len(queue.running) < queue.max_calls]
        return min((max(left, 0.0) for left in (*deadlines, *filter(None, held))), default=float("inf"))

    def send(self, *, hold: bool = True) -> None:
        """Start the calls that wait, as many as each environment takes. To be called when all that came at one time has
        been given to `submit` and `take`, so that it goes in one call. `hold` False: also those that are held back to
        be joined by others."""
        for queue in self._queues:
            if queue.waiting:
                with queue.worker.together():
                    self._send(queue, hold)

    def next(self) -> ScoreRequest | None:
        """Return a request whose rewards have all come; None if there is no such request."""
        now = self._clock.now()
        for queue in self._queues:
            while queue.running and now >= (first := next(iter(queue.running.values()))).deadline:
                self._take(queue, first)
        return self._scored.popleft() if self._scored else None

    def take(self, ready: Future | Stream) -> bool:
        """Process an answer that has come; return False if it is not one of `awaited`."""
        for queue in self._queues:
            if (call := queue.running.get(ready)) is not None:
                self._take(queue, call)
                return True
        return False

    def _take(self, queue: EnvQueue, call: _Call) -> None:
        self._on_span(queue.worker.name, "reward", call.since, self._clock.now())
        try:
            outcomes = call.pending.result()
        except WorkerDied as error:
            self._recover(queue, call, f"the environment died: {error.cause}", error)
            return
        except DeadlineExceeded as error:
            self._recover(queue, call, f"no verdict within {queue.timeout_s:g} s", error)
            return
        except WorkerFailed as error:
            self._record_exception(queue, call, error)
            return
        queue.failures = 0
        del queue.running[call.pending]
        self._record(call, outcomes)

    def _record(self, call: _Call, outcomes: Sequence[Outcome]) -> None:
        for (request, position), outcome in zip(call.samples, outcomes, strict=True):
            request.by_position[position] = outcome
            if outcome.traceback is not None:
                logger.warning("%s: no reward for a sample of %s\n%s", outcome.reason, request.uid, outcome.traceback)
            if len(request.by_position) == len(request.references) and not request.dropped:
                self._scored.append(request)

    def _send(self, queue: EnvQueue, hold: bool) -> None:
        while queue.waiting and len(queue.running) < queue.max_calls:
            if queue.running and (queue.waiting[0].alone or next(iter(queue.running.values())).alone):
                return
            if hold and self._joins and queue.hold_s(self._clock.now()):
                return
            call = self._next_call(queue)
            metadata = [request.metadata[position] for request, position in call.samples]
            references = [request.references[position] for request, position in call.samples]
            call.since = self._clock.now()
            call.deadline = self._clock.now() + queue.timeout_s
            purpose, limit_s = f"the verdict on {call.label}", queue.timeout_s
            call.pending = remote_call(queue.worker, EnvironmentInterface.advance, timeout_s=limit_s, purpose=purpose)(
                metadata, *references
            )
            queue.running[call.pending] = call

    def _next_call(self, queue: EnvQueue) -> _Call:
        """Take the first call that waits, joined by others up to the limit of a call. Unless the recipe prefers large
        calls, those that wait are spread over all calls that the environment takes now: it may work through the samples
        of one call in turn."""
        size = queue.batch.max_size
        if not queue.batch.max_wait_s:
            size = min(size, math.ceil(len(queue.waiting) / (queue.max_calls - len(queue.running))))
        call, waiting = queue.waiting.popleft(), queue.waiting
        if self._joins and not (call.alone or call.again):
            while waiting and not (waiting[0].alone or waiting[0].again):
                if len(call.samples) + len(waiting[0].samples) > size:
                    break
                call.samples += waiting.popleft().samples
        return call

    def _record_exception(self, queue: EnvQueue, call: _Call, error: WorkerFailed) -> None:
        """Give the sample on which an environment raised no reward. Ask again about each sample of several."""
        del queue.running[call.pending]
        if len(call.samples) > 1:
            queue.waiting.extendleft(_Call([sample], call.queued_at, again=True) for sample in reversed(call.samples))
        else:
            reason = f"the environment raised {error.cause}"
            if reason not in self._exceptions:
                self._exceptions.add(reason)
                logger.warning("%s: no reward for a sample of %s: %s", queue.worker.name, call.label, error)
            self._record(call, [Outcome(None, None, reason, 0.0)])

    def _recover(self, queue: EnvQueue, culprit: _Call, reason: str, error: Exception) -> None:
        """Restart an environment that died or exceeded the deadline of `culprit`.

        If `culprit` was about one sample and ran alone, that sample has no reward. All others are asked about again,
        one by one."""
        queue.failures += 1
        worker = queue.worker
        if not isinstance(worker, EnvironmentWorker) or queue.failures > _MAX_FAILURES:
            raise error
        calls, queue.running = list(queue.running.values()), OrderedDict()
        again = [call for call in calls if call is not culprit or len(call.samples) > 1 or len(calls) > 1]
        for call in reversed(again):
            for sample in reversed(call.samples):
                queue.waiting.appendleft(_Call([sample], call.queued_at, alone=True))
        self._on_restart(worker.name, f"{culprit.label}: {reason}")
        worker.restart()
        if culprit not in again:
            self._record(culprit, [Outcome(None, None, reason, queue.timeout_s)])


class _LocalEnvironment:
    """An environment object of the driver's process, called like a worker's."""

    def __init__(self, environment: Any, store: ObjectStore) -> None:
        self.environment, self.store = environment, store

    def advance(self, metadata: Sequence[dict[str, Any]], *references: Any) -> list[Outcome]:
        return self.environment.advance(metadata, *self.store.fetch_many(references))


def as_workers(
    environments: Mapping[str, Any], cluster: Cluster, platform: PlatformChoice = "auto"
) -> dict[str, Worker]:
    """Return a worker for each task. Environments that are objects of this process are wrapped, whatever the cluster,
    and those of `Environment.remote` are started on it, once. `platform`: cluster.platform of the recipe."""
    return {task: _as_worker(task, env, cluster, platform) for task, env in environments.items()}


def _as_worker(task: str, env: Any, cluster: Cluster, platform: PlatformChoice) -> Worker:
    if isinstance(env, RemoteEnvironment):
        if id(cluster) not in env.workers:
            env.workers[id(cluster)] = _start_remote(f"environment-{task}", env, cluster, platform)
        return env.workers[id(cluster)]
    return env if hasattr(env, "call") else LocalWorker(task, _LocalEnvironment(env, cluster.store))


def _start_remote(name: str, env: RemoteEnvironment, cluster: Cluster, platform: PlatformChoice) -> EnvironmentWorker:
    needs, gpu = env.cls.resources(env.config), Platform.detect(platform).on_gpu

    def start() -> Worker:
        return cluster.spawn(
            name,
            env.cls,
            env.config,
            cpus=needs["cpus"] if gpu else 0.1,
            gpus=needs["gpus"] if gpu else 0.0,
            concurrency=env.cls.concurrent_calls,
        )

    return EnvironmentWorker(cluster, start, calls=env.cls.concurrent_calls, timeout_s=cluster.call_timeout_s)
