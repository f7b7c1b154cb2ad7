"""Ask environments for rewards, each call with a deadline, and keep the damage small when one hangs or dies.

An environment that exceeds its deadline, or whose process ends, is restarted and asked about each sample separately.
One that raises is asked about each sample of that call separately. The sample on which it fails again has no reward,
but a reason; the others have their rewards. An environment that raises for every sample ends the run all the same: the
schedule tolerates few prompts without any reward.
"""

import logging
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile
from typing import Any

from grpo_mcore.cluster import (
    Cluster,
    DeadlineExceeded,
    Future,
    ObjectStore,
    Stream,
    Worker,
    WorkerDied,
    WorkerFailed,
    remote_call,
)
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.rollouts.hooks import NO_HOOKS, RolloutHooks
from grpo_mcore.environments.interfaces import EnvironmentInterface, RemoteEnvironment
from grpo_mcore.parallel.platform import Platform, PlatformChoice
from grpo_mcore.rollout.life import OpenSample
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


@dataclass(eq=False)
class EnvironmentWorker:
    """An environment in a `worker` that can be restarted. `start`: spawns it. `calls`: how many calls it takes at a
    time; `timeout_s`: deadline of each. `runs_agents`: it generates whole samples itself, through the policy's
    endpoint. `batch`: limits of a call."""

    cluster: Cluster
    start: Callable[[], Worker]
    _: KW_ONLY
    calls: int
    timeout_s: float
    runs_agents: bool = False
    batch: BatchLimits = BatchLimits()

    def __post_init__(self) -> None:
        self.worker = self.start()

    def restart(self) -> None:
        """End it, whatever it is doing, and wait for its successor."""
        self.cluster.stop([self.worker])
        self.worker = self.start()
        self.worker.ready().result()


@dataclass(eq=False, slots=True)
class _Call:
    """A call about some samples. `alone`: the environment gets no other call at the same time. `since`: when it began,
    by the cluster's clock."""

    samples: list[OpenSample]
    alone: bool = False
    since: float = 0.0

    @property
    def label(self) -> str:
        """The prompts it is about, for errors."""
        uids = list(dict.fromkeys(sample.group.uid for sample in self.samples))
        return uids[0] if len(uids) == 1 else f"{uids[0]} and {len(uids) - 1} more"


class EnvQueue:
    """The queue of one environment, see `rollouts.py`: turns that wait for their scores, and the calls under way."""

    def __init__(
        self,
        environment: EnvironmentWorker,
        resume: Callable[[OpenSample, Outcome], None],
        hooks: RolloutHooks = NO_HOOKS,
        *,
        joins: bool = True,
    ) -> None:
        """`resume`: gets each sample whose turn is scored. `joins`: a call holds what waits, up to the limit of a call;
        otherwise the samples of one group, all of them."""
        self._environment, self._clock = environment, environment.cluster.clock
        self._resume, self._hooks, self._joins = resume, hooks, joins
        self._max_calls, self._timeout_s, self._batch = environment.calls, environment.timeout_s, environment.batch
        self._retries = Retries(_MAX_FAILURES, 0.0)
        self._waiting: deque[tuple[float, OpenSample]] = deque()  # with the times since when
        self._again: deque[_Call] = deque()  # about one sample each, whose call has failed: before all others
        self._running: OrderedDict[Any, _Call] = OrderedDict()  # by future, first deadline first
        self._exceptions: set[str] = set()  # that were logged

    def add(self, samples: Iterable[OpenSample]) -> None:
        self._waiting.extend((self._clock.now(), sample) for sample in samples)

    def send(self, *, hold: bool = True) -> None:
        """Start the calls that wait, as many as the environment takes. `hold` False: also those that are held back to
        be joined by others. To be called when all that came at one time has been added, so that it goes in one call."""
        while self._running:
            answer, call = next(iter(self._running.items()))
            if self._clock.now() < call.since + self._timeout_s:
                break
            self._take(answer, call)  # it is late
        while len(self._running) < self._max_calls and (call_now := self._next_call(hold)) is not None:
            self._start(call_now)

    def awaited(self) -> list[Future | Stream]:
        return list(self._running)

    def take(self, ready: Any) -> bool:
        if (call := self._running.get(ready)) is not None:
            self._take(ready, call)
        return call is not None

    def drop(self, samples: Collection[OpenSample], *, close: bool) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[1].wait is not None)
        self._again = deque(call for call in self._again if call.samples[0].wait is not None)

    def seconds_left(self) -> float:
        """Return the seconds until the first deadline of a call, or until what is held back is sent."""
        left_s = math.inf
        if self._running:
            left_s = max(0.0, next(iter(self._running.values())).since + self._timeout_s - self._clock.now())
        if len(self._running) < self._max_calls:
            left_s = min(left_s, self._hold_s() or math.inf)
        return left_s

    def _hold_s(self) -> float:
        """Return the seconds for which what waits is still held back, to be joined by others."""
        if not (self._waiting and self._joins and len(self._waiting) < self._batch.max_size):
            return 0.0
        return max(0.0, self._waiting[0][0] + self._batch.max_wait_s - self._clock.now())

    def _next_call(self, hold: bool) -> _Call | None:
        """Take the next call of what waits; None if there is none yet. Unless the recipe prefers large calls, samples
        are spread over all calls that the environment takes now: it may work through those of one call in turn."""
        first = next(iter(self._running.values()), None)
        if first is not None and (first.alone or (self._again and self._again[0].alone)):
            return None
        if self._again:
            return self._again.popleft()
        waiting = self._waiting
        if not waiting or (hold and self._hold_s() > 0):
            return None
        size = min(len(waiting), self._batch.max_size)
        if not self._joins:
            size = sum(1 for _ in takewhile(lambda entry: entry[1].group is waiting[0][1].group, waiting))
        elif not self._batch.max_wait_s:
            size = min(size, math.ceil(len(waiting) / (self._max_calls - len(self._running))))
        return _Call([waiting.popleft()[1] for _ in range(size)])

    def _start(self, call: _Call) -> None:
        turns: list[Any] = [sample.wait for sample in call.samples]
        advance = remote_call(
            self._environment.worker,
            EnvironmentInterface.advance,
            timeout_s=self._timeout_s,
            purpose=f"the score of {call.label}",
        )
        call.since = self._clock.now()
        answer = advance([turn.metadata for turn in turns], *(turn.trajectory.ref for turn in turns))
        self._running[answer] = call

    def _take(self, answer: Future, call: _Call) -> None:
        self._hooks.on_span(self._environment.worker.name, "reward", call.since, self._clock.now())
        try:
            outcomes = answer.result()
        except WorkerDied as error:
            self._recover(answer, f"the environment died: {error.cause}", error)
        except DeadlineExceeded as error:
            self._recover(answer, f"no score within {self._timeout_s:g} s", error)
        except WorkerFailed as error:
            del self._running[answer]
            self._record_exception(call, error)
        else:
            del self._running[answer]
            self._retries.reset()
            self._record(call, outcomes)

    def _record(self, call: _Call, outcomes: Sequence[Outcome]) -> None:
        for sample, outcome in zip(call.samples, outcomes, strict=True):
            if outcome.traceback is not None:
                uid = sample.group.uid
                logger.warning("%s: no reward for a sample of %s\n%s", outcome.reason, uid, outcome.traceback)
            if sample.wait is not None:
                self._resume(sample, outcome)

    def _record_exception(self, call: _Call, error: WorkerFailed) -> None:
        """Give the sample on which an environment raised no reward. Ask again about each sample of several."""
        if len(call.samples) > 1:
            self._ask_again([call])
            return
        reason = f"the environment raised {error.cause}"
        if reason not in self._exceptions:
            self._exceptions.add(reason)
            logger.warning("%s: no reward for a sample of %s: %s", self._environment.worker.name, call.label, error)
        self._record(call, [Outcome(None, None, reason, 0.0)])

    def _recover(self, answer: Future, reason: str, error: Exception) -> None:
        """Restart the environment, which died or exceeded the deadline of a call.

        If the call was about one sample and ran alone, that sample has no reward. All others are asked about again, one
        by one."""
        self._retries.failed(error)
        calls, culprit = list(self._running.values()), self._running[answer]
        self._running = OrderedDict()
        is_known = len(calls) == 1 and len(culprit.samples) == 1
        if not is_known:
            self._ask_again(calls, alone=True)
        self._hooks.on_restart(self._environment.worker.name, f"{culprit.label}: {reason}")
        self._environment.restart()
        if is_known:
            self._record(culprit, [Outcome(None, None, reason, self._timeout_s)])

    def _ask_again(self, calls: Sequence[_Call], *, alone: bool = False) -> None:
        """Ask about each sample of these calls before all others, in a call of its own."""
        calls = [_Call([sample], alone) for call in calls for sample in call.samples if sample.wait is not None]
        self._again.extendleft(reversed(calls))


class _LocalEnvironment:
    """An environment object of the driver's process, called like a worker's."""

    def __init__(self, environment: Any, store: ObjectStore) -> None:
        self.environment, self.store = environment, store

    def advance(self, metadata: Sequence[dict[str, Any]], *references: Any) -> list[Outcome]:
        return self.environment.advance(metadata, *self.store.fetch_many(references))


def as_workers(
    environments: Mapping[str, Any], cluster: Cluster, platform: PlatformChoice = "auto"
) -> dict[str, EnvironmentWorker]:
    """Return a worker for each task. Environments that are objects of this process are wrapped, whatever the cluster,
    and those of `Environment.remote` are started on it, once. `platform`: cluster.platform of the recipe."""
    return {task: _as_worker(task, env, cluster, platform) for task, env in environments.items()}


def _as_worker(task: str, env: Any, cluster: Cluster, platform: PlatformChoice) -> EnvironmentWorker:
    if isinstance(env, RemoteEnvironment):
        if id(cluster) not in env.workers:
            env.workers[id(cluster)] = _start_remote(f"environment-{task}", env, cluster, platform)
        return env.workers[id(cluster)]
    if isinstance(env, EnvironmentWorker):
        return env
    local = LocalWorker(task, _LocalEnvironment(env, cluster.store))
    return EnvironmentWorker(cluster, lambda: local, calls=sys.maxsize, timeout_s=cluster.call_timeout_s)


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
