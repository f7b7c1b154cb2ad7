"""Asks environments for verdicts, each call with a deadline, and keeps the damage small where one hangs or dies.

An environment that does not answer in time, or whose process ends, is started anew and asked again about each sample
alone. The one that it fails on once more has no reward and a reason; the others have theirs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_mcore.cluster import Cluster, DeadlineExceeded, Future, ObjectStore, Stream, Worker, WorkerDied
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.rollout.trajectory import Outcome

_FAILURES = 20  # of an environment in a row, without any verdict between them: more end the run


class EnvironmentWorker:
    """An environment in a worker that can be started anew. `calls`: that it takes at a time; `timeout_s`: of each.
    `plays`: it plays whole samples itself.

    `start`: spawns the worker.
    """

    def __init__(
        self, cluster: Cluster, start: Callable[[], Worker], *, calls: int, timeout_s: float, plays: bool = False
    ) -> None:
        self._cluster, self._start = cluster, start
        self.calls, self.timeout_s, self.plays = calls, timeout_s, plays
        self._worker = start()
        self.name = self._worker.name

    def ready(self) -> Future:
        return self._worker.ready()

    def call(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> Future:
        return self._worker.call(method, *args, timeout_s=timeout_s, what=what)

    def stream(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> Stream:
        return self._worker.stream(method, *args, timeout_s=timeout_s, what=what)

    def restart(self) -> None:
        """Ends it, whatever it is doing, and waits for its successor."""
        self.stop()
        self._worker = self._start()
        self._worker.ready().result()

    def stop(self) -> None:
        self._cluster.stop([self._worker])


@dataclass(eq=False)
class ScoreRequest:
    """The samples of a group whose turn is judged."""

    uid: str
    metadata: Sequence[dict[str, Any]]
    references: Sequence[Any]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    unwanted: bool = False


@dataclass(eq=False)
class _Call:
    """`alone`: nothing else is asked of the environment at the same time."""

    ask: ScoreRequest
    positions: list[int]
    alone: bool = False
    pending: Future | None = None
    deadline: float = 0.0


@dataclass(eq=False)
class EnvQueue:
    """One environment, what waits for it and what it is at."""

    worker: Any
    calls: float
    timeout_s: float
    waiting: deque[_Call] = field(default_factory=deque)
    out: list[_Call] = field(default_factory=list)
    failures: int = 0


class RewardScorer:
    """`environments`: task name -> EnvironmentWorker, or any worker: the errors of one that cannot be started anew are
    raised."""

    def __init__(
        self,
        environments: Mapping[str, Worker],
        cluster: Cluster,
        on_restart: Callable[[str, str], None] = lambda worker, why: None,
    ) -> None:
        self._cluster, self._on_restart = cluster, on_restart
        desks: dict[int, EnvQueue] = {}
        for worker in environments.values():
            calls = getattr(worker, "calls", float("inf"))
            timeout_s = getattr(worker, "timeout_s", cluster.call_timeout_s)
            desks.setdefault(id(worker), EnvQueue(worker, calls, timeout_s))
        self._desks = list(desks.values())
        self._by_task = {task: desks[id(worker)] for task, worker in environments.items()}
        self._judged: deque[ScoreRequest] = deque()

    def ask(self, uid: str, task: str, metadata: Sequence[dict[str, Any]], references: Sequence[Any]) -> None:
        """For verdicts on trajectories, which `references` stand for. Does not wait."""
        desk = self._by_task[task]
        desk.waiting.append(_Call(ScoreRequest(uid, metadata, references), list(range(len(references)))))
        self._send(desk)

    def uids(self) -> set[str]:
        """The prompts whose verdict has not been taken."""
        calls = (call for desk in self._desks for call in (*desk.waiting, *desk.out))
        return {call.ask.uid for call in calls if not call.ask.unwanted} | {ask.uid for ask in self._judged}

    def forget(self, uids: Collection[str]) -> None:
        """Nobody wants the verdicts on these any more."""
        for desk in self._desks:
            desk.waiting = deque(call for call in desk.waiting if call.ask.uid not in uids)
            for call in desk.out:
                call.ask.unwanted = call.ask.unwanted or call.ask.uid in uids
        self._judged = deque(ask for ask in self._judged if ask.uid not in uids)

    def pending(self) -> list[Future]:
        """What is being waited for."""
        return [call.pending for desk in self._desks for call in desk.out if call.pending is not None]

    def patience_s(self) -> float:
        """Seconds until the first deadline."""
        now = time.monotonic()
        return min((max(call.deadline - now, 0.0) for desk in self._desks for call in desk.out), default=float("inf"))

    def next(self) -> tuple[str, list[Outcome]] | None:
        """A prompt whose verdicts are all there, with them; None: there is none yet."""
        self._expire()
        if not self._judged:
            return None
        ask = self._judged.popleft()
        return ask.uid, [ask.outcomes[position] for position in range(len(ask.references))]

    def take(self, ready: Any) -> bool:
        """Takes an answer that has come, if it is one to a call of ours. Raises what the environment raised."""
        for desk in self._desks:
            for call in desk.out:
                if call.pending is ready:
                    self._take(desk, call)
                    return True
        return False

    def _take(self, desk: EnvQueue, call: _Call) -> None:
        assert call.pending is not None
        try:
            outcomes = call.pending.result()
        except WorkerDied as error:
            self._recover(desk, call, f"the environment died: {error.cause}", error)
            return
        desk.failures = 0
        desk.out.remove(call)
        self._note(call, outcomes)
        self._send(desk)

    def _note(self, call: _Call, outcomes: Sequence[Outcome]) -> None:
        call.ask.outcomes.update(zip(call.positions, outcomes, strict=True))
        if len(call.ask.outcomes) == len(call.ask.references) and not call.ask.unwanted:
            self._judged.append(call.ask)

    def _send(self, desk: EnvQueue) -> None:
        while desk.waiting and len(desk.out) < desk.calls:
            if desk.out and (desk.waiting[0].alone or desk.out[0].alone):
                return
            call = desk.waiting.popleft()
            metadata = [call.ask.metadata[position] for position in call.positions]
            references = [call.ask.references[position] for position in call.positions]
            what = f"the verdict on {call.ask.uid}"
            call.deadline = time.monotonic() + desk.timeout_s
            call.pending = desk.worker.call("advance", metadata, *references, timeout_s=desk.timeout_s, what=what)
            desk.out.append(call)

    def _expire(self) -> None:
        now = time.monotonic()
        for desk in self._desks:
            for call in [call for call in desk.out if now >= call.deadline]:
                assert call.pending is not None
                try:
                    self._cluster.next_ready([call.pending], 0.0, call.pending.what)  # it may only be to be taken
                except DeadlineExceeded as error:
                    self._recover(desk, call, f"no verdict within {desk.timeout_s:g} s", error)
                    break

    def _recover(self, desk: EnvQueue, culprit: _Call, reason: str, error: Exception) -> None:
        """After a death, or a deadline: who was asked about alone is given up, the others are asked about again."""
        desk.failures += 1
        if not hasattr(desk.worker, "restart") or desk.failures > _FAILURES:
            raise error
        out, desk.out = desk.out, []
        again = [call for call in out if call is not culprit or len(call.positions) > 1 or len(out) > 1]
        for call in reversed(again):
            for position in reversed(call.positions):
                desk.waiting.appendleft(_Call(call.ask, [position], alone=True))
        self._on_restart(desk.worker.name, f"{culprit.ask.uid}: {reason}")
        desk.worker.restart()
        if culprit not in again:
            self._note(culprit, [Outcome(None, None, reason, desk.timeout_s)])
        self._send(desk)


class _InProcess:
    """An environment object of the driver's own, as a script may pass one, in place of a worker."""

    def __init__(self, environment: Any, store: ObjectStore) -> None:
        self.environment, self.store = environment, store

    def advance(self, metadata: Sequence[dict[str, Any]], *references: Any) -> list[Outcome]:
        return self.environment.advance(metadata, *self.store.fetch_many(references))


def as_workers(environments: Mapping[str, Any], cluster: Cluster) -> dict[str, Worker]:
    """Environments by task, each as a worker: those that are objects of this process are wrapped."""
    return {
        task: env if hasattr(env, "call") else LocalWorker(task, _InProcess(env, cluster.store))
        for task, env in environments.items()
    }
