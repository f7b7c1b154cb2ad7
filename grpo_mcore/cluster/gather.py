"""One call to many workers: all answers in order, or the error of the one that failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from grpo_mcore.rollout.workers import Cluster, DeadlineExceeded, Future, Stream, Worker, WorkerDied, WorkerFailed

GRACE_S = 10.0
"""How long the others are waited for once one has failed. Ranks of a group mostly fail together."""


class BackgroundWork(Protocol):
    """Work of the driver that goes on while it waits for something else."""

    def awaited(self) -> Sequence[Future | Stream]:
        """What it waits for now."""

    def take(self, ready: Any) -> None:
        """One of these has something: goes on with it."""


def call_all(
    cluster: Cluster,
    workers: Sequence[Worker],
    method: str,
    *args: Any,
    args_per_worker: Sequence[Sequence[Any]] | None = None,
    timeout_s: float | None = None,
    what: str | None = None,
    grace_s: float = GRACE_S,
    meanwhile: BackgroundWork | None = None,
) -> list[Any]:
    """`method(*args)` on every worker, or `method(*args_per_worker[i])` on worker i; the results by worker.

    Raises as `gather`.
    """
    if args_per_worker is None:
        args_per_worker = [args] * len(workers)
    timeout_s = cluster.call_timeout_s if timeout_s is None else timeout_s
    pendings = [
        worker.call(method, *own, timeout_s=timeout_s, what=what)
        for worker, own in zip(workers, args_per_worker, strict=True)
    ]
    return gather(cluster, pendings, timeout_s=timeout_s, what=what or method, grace_s=grace_s, meanwhile=meanwhile)


def gather(
    cluster: Cluster,
    pendings: Sequence[Future],
    *,
    timeout_s: float,
    what: str,
    grace_s: float = GRACE_S,
    meanwhile: BackgroundWork | None = None,
) -> list[Any]:
    """The results in the order of `pendings`, with one deadline for all. What `meanwhile` waits for is handed to it as
    it comes.

    Raises DeadlineExceeded that names those who have not answered; WorkerFailed of the first that died, else of the
    first that failed, with a note on each other that failed or was still at work `grace_s` later.
    """
    results: dict[int, Any] = {}
    waiting = list(pendings)
    start = time.monotonic()
    deadline = start + timeout_s
    failure: WorkerFailed | None = None
    while waiting:
        left = max(deadline - time.monotonic(), 0.0)
        others = meanwhile.awaited() if meanwhile and left and failure is None else ()
        try:
            ready: Any = cluster.next_ready([*waiting, *others], left, what)
        except DeadlineExceeded as error:
            if failure is not None:
                break
            late = ", ".join(pending.whom for pending in waiting)
            raise DeadlineExceeded(what, late, timeout_s, error.detail) from None
        pending = next((pending for pending in waiting if pending is ready), None)
        if pending is None:
            assert meanwhile is not None
            meanwhile.take(ready)
            continue
        waiting.remove(pending)
        try:
            results[id(pending)] = pending.result()
        except WorkerFailed as error:
            if failure is None:
                deadline = min(deadline, time.monotonic() + grace_s)
            failure = _culprit(failure, error)
    if failure is not None:
        for pending in waiting:
            failure.add_note(f"{pending.whom} was still at work on {pending.what} {grace_s:.6g} s later")
        raise failure
    return [results[id(pending)] for pending in pendings]


def _culprit(failure: WorkerFailed | None, error: WorkerFailed) -> WorkerFailed:
    """The one of two failures to raise, with a note on the other. Where a rank has died the others fail in what they
    did together with it, and may be heard of first."""
    if failure is None:
        return error
    if isinstance(error, WorkerDied) and not isinstance(failure, WorkerDied):
        failure, error = error, failure
        for note in getattr(error, "__notes__", []):
            failure.add_note(note)
    failure.add_note(f"{error.worker} failed too: {error.cause}")
    return failure
