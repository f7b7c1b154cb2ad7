"""Call many workers and wait for all answers, with one deadline and one error."""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from grpo_mcore.rollout.workers import (
    Cluster,
    DeadlineExceeded,
    Future,
    Stream,
    Worker,
    WorkerDied,
    WorkerFailed,
    remote_call,
)

P = ParamSpec("P")
R = TypeVar("R")

GRACE_S = 10.0
"""Seconds to wait for the other workers once one has failed: ranks of a group mostly fail together, and the error of
the rank that failed first explains the others'."""


class BackgroundWork(Protocol):
    """Work that the driver goes on with while it waits for `gather`, such as rollouts during a training step.

    It has remote calls of its own under way. `gather` waits for them together with its own, and hands those that are
    ready to `take`, on the same thread; so background work goes on without threads and never runs by itself.
    """

    def awaited(self) -> Sequence[Future | Stream]:
        """Return the futures and streams that it waits for at this moment."""

    def take(self, ready: Sequence[Any]) -> None:
        """Process these futures and streams, each of which has an answer, an item, an end or an error. May start
        further calls, and ignores those that it no longer waits for."""


def call_all(
    cluster: Cluster,
    workers: Sequence[Worker],
    method: Callable[Concatenate[Any, P], R],
    *,
    timeout_s: float | None = None,
    purpose: str | None = None,
    grace_s: float = GRACE_S,
    background: BackgroundWork | None = None,
) -> Callable[P, list[R]]:
    """Return a function that calls `method`, of the workers' class, on every worker at once and returns the results by
    worker: `call_all(cluster, workers, PolicyWorker.train)(loss_fn, targets)`. Errors: see `gather`."""
    limit_s, name = cluster.call_timeout_s if timeout_s is None else timeout_s, purpose or method.__name__

    def call(*args: P.args, **kwargs: P.kwargs) -> list[R]:
        futures = [remote_call(worker, method, timeout_s=limit_s, purpose=name)(*args, **kwargs) for worker in workers]
        return gather(cluster, futures, timeout_s=limit_s, purpose=name, grace_s=grace_s, background=background)

    return call


def gather(
    cluster: Cluster,
    futures: Sequence[Future],
    *,
    timeout_s: float,
    purpose: str,
    grace_s: float = GRACE_S,
    background: BackgroundWork | None = None,
    on_result: Callable[[Future], None] = lambda future: None,
    watch: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Wait for all futures, with one deadline, and return their results in order. `background` goes on meanwhile.
    `on_result`: gets each future when it has its result; `watch`: called again and again while nothing comes.

    Raises DeadlineExceeded that names the workers without an answer; or the WorkerFailed of a worker that died, else of
    the first that failed, with a note on each other that failed or was still at work `grace_s` later.
    """
    results: dict[int, Any] = {}
    waiting = {id(future): future for future in futures}
    clock = cluster.clock
    deadline = clock.now() + timeout_s
    failure: WorkerFailed | None = None
    while waiting:
        left = max(deadline - clock.now(), 0.0)
        others = background.awaited() if background and left and failure is None else ()
        try:
            things: list[Any] = [*waiting.values(), *others]
            ready = cluster.ready(things, left, purpose, watch, patient=not others)
        except DeadlineExceeded as error:
            if failure is not None:
                break
            late = ", ".join(future.whom for future in waiting.values())
            raise DeadlineExceeded(purpose, late, timeout_s, error.detail) from None
        own_ready = [waiting.pop(id(thing)) for thing in ready if id(thing) in waiting]
        if background is not None and len(own_ready) < len(ready):
            own_ids = set(map(id, own_ready))
            background.take([thing for thing in ready if id(thing) not in own_ids])
        for future in own_ready:
            try:
                results[id(future)] = future.result()
                on_result(future)
            except WorkerFailed as error:
                if failure is None:
                    deadline = min(deadline, clock.now() + grace_s)
                failure = _merged(failure, error)
    if failure is not None:
        for future in waiting.values():
            failure.add_note(f"{future.whom} was still at work on {future.purpose} {grace_s:.6g} s later")
        raise failure
    return [results[id(future)] for future in futures]


def _merged(failure: WorkerFailed | None, error: WorkerFailed) -> WorkerFailed:
    """Return the failure to raise, with a note on the other. A rank's death comes first: it makes the other ranks fail
    in their collectives, and their errors may arrive before it."""
    if failure is None:
        return error
    if isinstance(error, WorkerDied) and not isinstance(failure, WorkerDied):
        failure, error = error, failure
        for note in getattr(error, "__notes__", []):
            failure.add_note(note)
    failure.add_note(f"{error.worker} failed too: {error.cause}")
    return failure
