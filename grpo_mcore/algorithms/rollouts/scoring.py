"""Ask environments for rewards, each call with a deadline, and keep the damage small when one hangs or dies.

An environment that exceeds its deadline, or whose process ends, is restarted and asked about each sample separately.
One that raises is asked about each sample of that call separately. The sample on which it fails again has no reward,
but a reason; the others have their rewards. An environment that raises for every sample ends the run all the same: the
schedule tolerates few prompts without any reward.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
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
)
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.environments.interfaces import RemoteEnvironment
from grpo_mcore.parallel.platform import Platform, PlatformChoice
from grpo_mcore.rollout.trajectory import Outcome

_MAX_FAILURES = 20
"""Consecutive failures of one environment that are tolerated; the next one ends the run."""

logger = logging.getLogger(__name__)


class EnvironmentWorker:
    """An environment in a worker that can be restarted."""

    def __init__(
        self, cluster: Cluster, start: Callable[[], Worker], *, calls: int, timeout_s: float, runs_agents: bool = False
    ) -> None:
        """`start`: spawns the worker. `calls`: how many calls it takes at a time; `timeout_s`: deadline of each.
        `runs_agents`: it generates whole samples itself, through the policy's endpoint."""
        self._cluster, self._start = cluster, start
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

    def call(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> Future:
        return self._worker.call(method, *args, timeout_s=timeout_s, what=what)

    def stream(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> Stream:
        return self._worker.stream(method, *args, timeout_s=timeout_s, what=what)

    def restart(self) -> None:
        """End it, whatever it is doing, and wait for its successor."""
        self.stop()
        self._worker = self._start()
        self._worker.ready().result()

    def stop(self) -> None:
        self._cluster.stop([self._worker])


@dataclass(eq=False)
class ScoreRequest:
    """The samples of one group whose last turn is to be scored. `outcomes`: by position in `references`."""

    uid: str
    metadata: Sequence[dict[str, Any]]
    references: Sequence[Any]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    given_up: bool = False


@dataclass(eq=False)
class _Call:
    """A call about some samples of a request. `alone`: the environment gets no other call at the same time."""

    request: ScoreRequest
    positions: list[int]
    alone: bool = False
    pending: Future = field(init=False)
    deadline: float = field(init=False)
    since: float = field(init=False)


@dataclass(eq=False)
class EnvQueue:
    """One environment with the calls that wait for it and those under way. `max_calls`: at a time."""

    worker: Worker
    max_calls: float
    timeout_s: float
    waiting: deque[_Call] = field(default_factory=deque)
    running: list[_Call] = field(default_factory=list)
    failures: int = 0


class RewardScorer:
    """Collects the rewards of groups from several environments.

    `environments`: by task name. An EnvironmentWorker is restarted when it hangs or dies; other workers cannot be, and
    the error is raised. `on_restart`: gets the name of each worker that is restarted, and the reason. `on_span`: as in
    `Rollouts`.
    """

    def __init__(
        self,
        environments: Mapping[str, Worker],
        cluster: Cluster,
        on_restart: Callable[[str, str], None] = lambda worker, why: None,
        on_span: Callable[[str, str, float, float], None] = lambda worker, what, start, end: None,
    ) -> None:
        self._on_restart, self._on_span = on_restart, on_span
        queues: dict[int, EnvQueue] = {}
        for worker in environments.values():
            limits = (float("inf"), cluster.call_timeout_s)
            if isinstance(worker, EnvironmentWorker):
                limits = (worker.calls, worker.timeout_s)
            queues.setdefault(id(worker), EnvQueue(worker, *limits))
        self._queues = list(queues.values())
        self._by_task = {task: queues[id(worker)] for task, worker in environments.items()}
        self._scored: deque[ScoreRequest] = deque()
        self._exceptions: set[str] = set()  # that were logged

    def submit(self, uid: str, task: str, metadata: Sequence[dict[str, Any]], references: Sequence[Any]) -> None:
        """Request the rewards of a group's trajectories, given by reference. Does not wait."""
        queue = self._by_task[task]
        queue.waiting.append(_Call(ScoreRequest(uid, metadata, references), list(range(len(references)))))
        self._send(queue)

    def uids(self) -> set[str]:
        """Return the prompts whose rewards have not been taken by `next`."""
        calls = (call for queue in self._queues for call in (*queue.waiting, *queue.running))
        unscored = {call.request.uid for call in calls if not call.request.given_up}
        return unscored | {request.uid for request in self._scored}

    def give_up(self, uids: Collection[str]) -> None:
        """Drop the requests of these prompts."""
        for queue in self._queues:
            queue.waiting = deque(call for call in queue.waiting if call.request.uid not in uids)
            for call in queue.running:
                call.request.given_up = call.request.given_up or call.request.uid in uids
        self._scored = deque(request for request in self._scored if request.uid not in uids)

    def awaited(self) -> list[Future]:
        """Return the calls under way."""
        return [call.pending for queue in self._queues for call in queue.running]

    def seconds_left(self) -> float:
        """Return the seconds until the first deadline of a call."""
        now = time.monotonic()
        deadlines = (call.deadline for queue in self._queues for call in queue.running)
        return min((max(deadline - now, 0.0) for deadline in deadlines), default=float("inf"))

    def next(self) -> tuple[str, list[Outcome]] | None:
        """Return the uid and the outcomes of a group whose rewards have all come; None if there is no such group."""
        now = time.monotonic()
        for queue in self._queues:
            while late := next((call for call in queue.running if now >= call.deadline), None):
                self._take(queue, late)
        if not self._scored:
            return None
        request = self._scored.popleft()
        return request.uid, [request.outcomes[position] for position in range(len(request.references))]

    def take(self, ready: Future | Stream) -> bool:
        """Process an answer that has come; return False if it is not one of `awaited`."""
        for queue in self._queues:
            for call in queue.running:
                if call.pending is ready:
                    self._take(queue, call)
                    return True
        return False

    def _take(self, queue: EnvQueue, call: _Call) -> None:
        self._on_span(queue.worker.name, "reward", call.since, time.perf_counter())
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
        queue.running.remove(call)
        self._record(call, outcomes)
        self._send(queue)

    def _record(self, call: _Call, outcomes: Sequence[Outcome]) -> None:
        request = call.request
        request.outcomes.update(zip(call.positions, outcomes, strict=True))
        for outcome in outcomes:
            if outcome.traceback is not None:
                logger.warning("%s: no reward for a sample of %s\n%s", outcome.reason, request.uid, outcome.traceback)
        if len(request.outcomes) == len(request.references) and not request.given_up:
            self._scored.append(request)

    def _send(self, queue: EnvQueue) -> None:
        """Start the calls that wait, as many as the environment takes."""
        while queue.waiting and len(queue.running) < queue.max_calls:
            if queue.running and (queue.waiting[0].alone or queue.running[0].alone):
                return
            call = queue.waiting.popleft()
            metadata = [call.request.metadata[position] for position in call.positions]
            references = [call.request.references[position] for position in call.positions]
            what = f"the verdict on {call.request.uid}"
            call.since = time.perf_counter()
            call.deadline = time.monotonic() + queue.timeout_s
            call.pending = queue.worker.call("advance", metadata, *references, timeout_s=queue.timeout_s, what=what)
            queue.running.append(call)

    def _record_exception(self, queue: EnvQueue, call: _Call, error: WorkerFailed) -> None:
        """Give the sample on which an environment raised no reward. Ask again about each sample of several."""
        queue.running.remove(call)
        if len(call.positions) > 1:
            queue.waiting.extendleft(_Call(call.request, [position]) for position in reversed(call.positions))
        else:
            reason = f"the environment raised {error.cause}"
            if reason not in self._exceptions:
                self._exceptions.add(reason)
                logger.warning("%s: no reward for a sample of %s: %s", queue.worker.name, call.request.uid, error)
            self._record(call, [Outcome(None, None, reason, 0.0)])
        self._send(queue)

    def _recover(self, queue: EnvQueue, culprit: _Call, reason: str, error: Exception) -> None:
        """Restart an environment that died or exceeded the deadline of `culprit`.

        If `culprit` was about one sample and ran alone, that sample has no reward. All others are asked about again,
        one by one."""
        queue.failures += 1
        worker = queue.worker
        if not isinstance(worker, EnvironmentWorker) or queue.failures > _MAX_FAILURES:
            raise error
        calls, queue.running = queue.running, []
        again = [call for call in calls if call is not culprit or len(call.positions) > 1 or len(calls) > 1]
        for call in reversed(again):
            for position in reversed(call.positions):
                queue.waiting.appendleft(_Call(call.request, [position], alone=True))
        self._on_restart(worker.name, f"{culprit.request.uid}: {reason}")
        worker.restart()
        if culprit not in again:
            self._record(culprit, [Outcome(None, None, reason, queue.timeout_s)])
        self._send(queue)


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
