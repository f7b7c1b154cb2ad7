"""Handles on Ray actors: calls, streams and objects, with deadlines and errors that say who and why."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from grpo_mcore.cluster.host import ParcelHead, RemoteFailure, in_stream
from grpo_mcore.cluster.reports import frames, log_tail, stacks
from grpo_mcore.cluster.wait_graph import Wait
from grpo_mcore.rollout.workers import DeadlineExceeded, ObjectLost, Parcel, Place, Ref, WorkerDied, WorkerFailed


class RayPending:
    """The answer of one actor call. `handle`: its ObjectRef."""

    def __init__(self, worker: RayWorker, what: str, handle: ray.ObjectRef, timeout_s: float) -> None:
        self.worker, self.whom, self.what = worker, worker.name, what
        self.handle = handle
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s

    def wait(self) -> Wait | None:
        """For the driver's watchdog. None: the answer is there."""
        if ray.wait([self.handle], timeout=0, fetch_local=False)[0]:
            return None
        now = time.monotonic()
        return Wait(self.whom, self.what, now - self._began, now >= self._deadline)

    def result(self) -> Any:
        """An answer that came in time is given whenever it is asked for."""
        left = max(self._deadline - time.monotonic(), 0.0)
        ready, _ = ray.wait([self.handle], timeout=left, fetch_local=False)
        if not ready:
            raise DeadlineExceeded(self.what, self.whom, self._timeout_s, self.worker.state())
        return self.worker.fetched(self.what, self.handle)


class RayStream:
    """The items of one actor generator. `handle`: its ObjectRefGenerator."""

    def __init__(self, worker: RayWorker, what: str, handle: ray.ObjectRefGenerator, timeout_s: float) -> None:
        self.worker, self.whom, self.what = worker, worker.name, what
        self.handle = handle
        self._timeout_s = timeout_s
        self._moved, self._over = time.monotonic(), False

    def wait(self) -> Wait | None:
        """For the driver's watchdog. None: it is over, or an item is there."""
        if self._over or ray.wait([self.handle], timeout=0, fetch_local=False)[0]:
            return None
        seconds = time.monotonic() - self._moved
        return Wait(self.whom, self.what, seconds, seconds >= self._timeout_s)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self.worker.fetched(self.what, self._next_reference())
        return Parcel(item.label, self._next_reference()) if isinstance(item, ParcelHead) else item

    def _next_reference(self) -> ray.ObjectRef:
        ready, _ = ray.wait([self.handle], timeout=self._timeout_s, fetch_local=False)
        if not ready:
            raise DeadlineExceeded(self.what, self.whom, self._timeout_s, self.worker.state())
        self._moved = time.monotonic()
        try:
            return next(self.handle)
        except StopIteration:
            self._over = True
            raise


class RayWorker:
    """A handle on one `Host` actor. `waiting_for`: says why its process may not be up yet; `on_death`: called
    when it turns out to be dead; `stream_options`: Ray's, of a call that streams."""

    def __init__(
        self,
        name: str,
        actor: Any,
        *,
        start_timeout_s: float,
        call_timeout_s: float,
        waiting_for: Callable[[], str],
        on_death: Callable[[], None],
        stream_options: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.actor = actor
        self._call_timeout_s = call_timeout_s
        self._waiting_for = waiting_for
        self._on_death = on_death
        self._stream_options = stream_options
        self._place = RayPending(self, "start of its process", actor.place.remote(), start_timeout_s)
        self._start_timeout_s = start_timeout_s
        self._ready: RayPending | None = None
        self._calls: weakref.WeakSet[RayPending | RayStream] = weakref.WeakSet()

    def build(self, cls: Callable[..., Any], *args: Any) -> None:
        """Starts the constructor."""
        self._started(self.actor.build.remote(cls, *args))

    def build_rank(self, cls: Callable[..., Any], *args: Any) -> None:
        """Starts the constructor of a group's worker; see Host.build_rank."""
        self._started(self.actor.build_rank.remote(cls, *args))

    def _started(self, built: ray.ObjectRef) -> None:
        self._ready = RayPending(self, "its constructor", built, self._start_timeout_s)

    def ready(self) -> RayPending:
        assert self._ready is not None
        return self._ready

    def place(self) -> Place:
        return self._place.result()

    def call(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> RayPending:
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        pending = RayPending(self, what or method, self.actor.call.remote(method, *args), timeout_s)
        self._calls.add(pending)
        return pending

    def stream(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> RayStream:
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        handle = self.actor.stream.options(num_returns="streaming", **self._stream_options).remote(method, *args)
        stream = RayStream(self, what or method, handle, timeout_s)
        self._calls.add(stream)
        return stream

    def waits(self) -> list[Wait]:
        """The calls that are waited for."""
        return [wait for call in self._calls if (wait := call.wait()) is not None]

    def frames(self) -> str | None:
        """What its threads are doing; None where that cannot be found out here."""
        place = self.known_place()
        return None if place is None else frames(place)

    def known_place(self) -> Place | None:
        """The place if the process is up; does not wait."""
        ready, _ = ray.wait([self._place.handle], timeout=0)
        try:
            return ray.get(self._place.handle) if ready else None
        except RayError:
            return None

    def state(self) -> str:
        """What it is doing, for an error about its lateness."""
        place = self.known_place()
        if place is None:
            return f"{self.name} has no process yet: {self._waiting_for()}"
        return stacks(self.name, place)

    def fetched(self, what: str, reference: ray.ObjectRef) -> Any:
        """What a call has returned: brought here, or its error raised."""
        try:
            return ray.get(reference, timeout=self._call_timeout_s)
        except GetTimeoutError:
            whom = f"the object store of {self.name}"
            raise DeadlineExceeded(f"the result of {what}", whom, self._call_timeout_s) from None
        except RayError as error:
            self.fail(what, error)

    def fail(self, what: str, error: RayError) -> NoReturn:
        """Raises the WorkerFailed that `error` amounts to."""
        cause, detail, original = _explain(error)
        died = isinstance(error, RayActorError)
        if died:
            self._on_death()
        place = self.known_place()
        if place is not None:
            detail += "\n" + log_tail(place.log)
        raise (WorkerDied if died else WorkerFailed)(self.name, what, cause, detail.strip()) from original


class RayStore:
    """Ray's object store."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def put(self, obj: Any) -> Ref:
        if getattr(in_stream, "now", False):
            # Ray may delete the object before the caller knows of the yielded reference (ray issue 58080)
            raise RuntimeError("put() inside a stream: the object may get lost; yield Parcel(label, object)")
        return ray.put(obj)

    def fetch(self, ref: Ref) -> Any:
        return self.fetch_many([ref])[0]

    def fetch_many(self, refs: Sequence[Ref]) -> list[Any]:
        what = f"fetch of {len(refs)} objects"
        try:
            return ray.get(list(refs), timeout=self._timeout_s)
        except GetTimeoutError:
            raise DeadlineExceeded(what, "the object store", self._timeout_s) from None
        except RayError as error:
            cause, detail, original = _explain(error)
            raise ObjectLost("the object store", what, cause, detail) from original


def _explain(error: RayError) -> tuple[str, str, BaseException | None]:
    """(cause in a line, details, the exception itself) of what Ray raised."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, RemoteFailure):
            return error.cause.cause, error.cause.trace, error.cause.original()
        first = str(error.cause).strip().partition("\n")[0]
        return f"{type(error.cause).__name__}: {first}", str(error), error.cause
    if isinstance(error, RayActorError):
        return f"{type(error).__name__}: its process ended", _reason_of_death(str(error)), error
    return f"{type(error).__name__}: {str(error).strip()}", "", error


def _reason_of_death(told: str) -> str:
    """Ray's text without the ids before the reason and without the general advice after it."""
    _, _, reason = told.rpartition("The actor is dead because ")
    return reason.partition(" Some common causes include")[0].strip()
