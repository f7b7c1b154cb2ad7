"""Handles on Ray actors: calls, streams and objects, with deadlines and errors that say who and why."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from grpo_mcore.cluster.diagnostics import Wait, log_tail, stacks
from grpo_mcore.cluster.ray_actor import BEHIND, Asked, RemoteFailure, Sent, entry, in_stream
from grpo_mcore.rollout.workers import DeadlineExceeded, ObjectLost, Parcel, Place, Ref, WorkerDied, WorkerFailed


@dataclass(frozen=True, slots=True)
class PartRef:
    """A reference to the content of one of the parcels that came together, which are one object in the store."""

    whole: ray.ObjectRef
    index: int


WATCH_S = 0.2
"""Seconds between two calls of `watch` in a wait. An exception that a signal's handler raises inside of Ray's own wait
would become a SystemError at its end."""


class _RayCall:
    """A call of an actor. `handle`: Ray's reference to what it answers; `since`: when it was made, or its last item
    came; `seen`: Ray has said that the answer, or the next item, is there."""

    seen = False

    def __init__(self, worker: RayWorker, purpose: str, handle: Any, timeout_s: float) -> None:
        self.worker, self.whom, self.purpose = worker, worker.name, purpose
        self.handle = handle
        self.since = time.monotonic()
        self.timeout_s = timeout_s

    def has_answer(self, timeout_s: float = 0.0) -> bool:
        return bool(ray.wait([self.handle], timeout=timeout_s, fetch_local=False)[0])

    def wait(self) -> Wait | None:
        """Return since when it is waited for, for the wait graph; None if there is an answer."""
        if self.has_answer():
            return None
        seconds = time.monotonic() - self.since
        return Wait(self.whom, self.purpose, seconds, seconds >= self.timeout_s)

    def _await_answer(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.seen:
            self.worker.watch()
            left_s = max(deadline - time.monotonic(), 0.0)
            if self.has_answer(min(left_s, WATCH_S)):
                return
            if left_s <= WATCH_S:
                raise DeadlineExceeded(self.purpose, self.whom, self.timeout_s, self.worker.state())


class RayFuture(_RayCall):
    """The answer of one actor call. `handle`: its ObjectRef."""

    def result(self) -> Any:
        """Return the answer. One that came in time is returned however late it is asked for."""
        self._await_answer(max(self.since + self.timeout_s - time.monotonic(), 0.0))
        return self.worker.fetch(self.purpose, self.handle)


class RayStream(_RayCall):
    """The items of one actor generator. `handle`: its ObjectRefGenerator."""

    _ended = False
    _failure: WorkerFailed | DeadlineExceeded | None = None  # to be raised by the next call

    def has_answer(self, timeout_s: float = 0.0) -> bool:
        return self._ended or self._failure is not None or super().has_answer(timeout_s)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next item; of lists of parcels, all that are there as one list."""
        if self._failure is not None:
            raise self._failure
        item = self._next_item()
        try:
            while isinstance(item, list) and self.handle.next_ready():
                self.seen = True
                item += self._next_item()
        except StopIteration:
            pass
        except (WorkerFailed, DeadlineExceeded) as error:  # it ends the stream, and is left to the next call
            self._failure = error
        return item

    def _next_item(self) -> Any:
        """Return the next item; see `sent`."""
        content = self._next_reference()
        data = self.worker.fetch(self.purpose, content)
        if data == BEHIND:
            content = self._next_reference()
            try:
                label = self._next_reference()
            except StopIteration:  # then what came first is the error that ended the stream
                self.worker.fetch(self.purpose, content)
                raise WorkerFailed(self.whom, self.purpose, "its stream ended in the middle of an item") from None
            data = self.worker.fetch(self.purpose, label)
        item: Sent = pickle.loads(data)
        labels = pickle.loads(item.labels)
        if not item.parcels:
            return labels[0]
        parcels = [Parcel(label, PartRef(content, index)) for index, label in enumerate(labels)]
        return parcels if item.together else parcels[0]

    def _next_reference(self) -> ray.ObjectRef:
        self.seen = self.seen or self.handle.next_ready()  # takes a fraction of the time of a wait
        self._await_answer(self.timeout_s)
        self.since, self.seen = time.monotonic(), False
        try:
            return next(self.handle)
        except StopIteration:
            self._ended = True
            raise


class RayWorker:
    """A handle on one `WorkerActor`. `waiting_for`: returns why its process may not be up yet; `on_death`: called when
    it turns out to be dead; `watch`: called again and again while somebody waits for it; `stream_options`: options of
    Ray for calls that stream."""

    spawn_seconds = 0.0

    def __init__(
        self,
        name: str,
        actor: Any,
        *,
        start_timeout_s: float,
        call_timeout_s: float,
        waiting_for: Callable[[], str],
        on_death: Callable[[], None],
        watch: Callable[[], None],
        stream_options: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.actor = actor
        self._call_timeout_s = call_timeout_s
        self._waiting_for = waiting_for
        self._on_death = on_death
        self.watch = watch
        self._stream_options = stream_options
        self._place = RayFuture(self, "start of its process", actor.place.remote(), start_timeout_s)
        self._known_place: Place | None = None
        self._start_timeout_s = start_timeout_s
        self._ready: RayFuture | None = None
        self._calls: weakref.WeakSet[RayFuture | RayStream] = weakref.WeakSet()
        self._lock = threading.Lock()  # an inspection, on another thread, reads them

    def build(self, cls: Callable[..., Any], *args: Any, rank: tuple[int, int, int] | None = None) -> None:
        """Start the constructor. `rank`: see WorkerActor.build."""
        built = self.actor.build.remote(rank, cls, *args)
        self._ready = RayFuture(self, "its constructor", built, self._start_timeout_s)

    def ready(self) -> RayFuture:
        assert self._ready is not None
        return self._ready

    def place(self) -> Place:
        return self._place.result()

    def call(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> RayFuture:
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        request, wholes = _asked(method, args)
        call = RayFuture(self, purpose or method, self.actor.call.remote(request, *wholes), timeout_s)
        with self._lock:
            self._calls.add(call)
        return call

    def stream(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> RayStream:
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        handle = self.actor.stream.options(num_returns="streaming", **self._stream_options).remote(method, *args)
        stream = RayStream(self, purpose or method, handle, timeout_s)
        with self._lock:
            self._calls.add(stream)
        return stream

    def waits(self) -> list[Wait]:
        """Return the calls without an answer."""
        with self._lock:
            calls = list(self._calls)
        return [wait for call in calls if (wait := call.wait()) is not None]

    def known_place(self) -> Place | None:
        """Return the worker's place without waiting; None if its process is not up."""
        if self._known_place is None:
            ready, _ = ray.wait([self._place.handle], timeout=0)
            try:
                self._known_place = ray.get(self._place.handle) if ready else None
            except RayError:
                return None
        return self._known_place

    def state(self) -> str:
        """Return what it is doing, for an error about its lateness."""
        place = self.known_place()
        if place is None:
            return f"{self.name} has no process yet: {self._waiting_for()}"
        return stacks(self.name, place)

    def fetch(self, purpose: str, reference: ray.ObjectRef | list[ray.ObjectRef]) -> Any:
        """Return the value of an answer, or of each of several, or raise its error."""
        try:
            return ray.get(reference, timeout=self._call_timeout_s)
        except RayError as error:
            self.fail(purpose, error)

    def fail(self, purpose: str, error: RayError | RemoteFailure) -> NoReturn:
        """Raise `error` as a WorkerFailed, or as a DeadlineExceeded."""
        if isinstance(error, GetTimeoutError):
            whom = f"the object store of {self.name}"
            raise DeadlineExceeded(f"the result of {purpose}", whom, self._call_timeout_s) from None
        cause, detail, original = _explain(error)
        died = isinstance(error, RayActorError)
        if died:
            self._on_death()
        place = self.known_place()
        if place is not None:
            detail += "\n" + log_tail(place.log)
        raise (WorkerDied if died else WorkerFailed)(self.name, purpose, cause, detail.strip()) from original


def _asked(method: str, args: Sequence[Any]) -> tuple[Asked, Sequence[ray.ObjectRef]]:
    """Return a call as `WorkerActor` takes it, and the objects of the store that it needs."""
    wholes: dict[ray.ObjectRef, int] = {}
    sent_args: list[Any] = list(args)
    references: dict[int, tuple[int, int | None]] = {}
    for position, arg in enumerate(args):
        if isinstance(arg, PartRef | ray.ObjectRef):
            whole, index = (arg.whole, arg.index) if isinstance(arg, PartRef) else (arg, None)
            references[position] = wholes.setdefault(whole, len(wholes)), index
            sent_args[position] = None
    return (method, sent_args, references), list(wholes)


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
        purpose = f"fetch of {len(refs)} objects"
        try:
            wholes = list(dict.fromkeys(ref.whole if isinstance(ref, PartRef) else ref for ref in refs))
            objects = dict(zip(wholes, ray.get(wholes, timeout=self._timeout_s), strict=True))
            return [entry(objects[ref.whole], ref.index) if isinstance(ref, PartRef) else objects[ref] for ref in refs]
        except GetTimeoutError:
            raise DeadlineExceeded(purpose, "the object store", self._timeout_s) from None
        except RayError as error:
            cause, detail, original = _explain(error)
            # A RayTaskError is what was to be stored: the call that should have made it failed.
            failed = WorkerFailed if isinstance(error, RayTaskError) else ObjectLost
            raise failed("the object store", purpose, cause, detail) from original


def _explain(error: RayError | RemoteFailure) -> tuple[str, str, BaseException | None]:
    """Return (cause in one line, details, the exception itself) of an error that Ray raised."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, RemoteFailure):
        error = error.cause
    if isinstance(error, RemoteFailure):
        return error.cause, error.trace, error.original()
    if isinstance(error, RayTaskError):
        first = str(error.cause).strip().partition("\n")[0]
        return f"{type(error.cause).__name__}: {first}", str(error), error.cause
    if isinstance(error, RayActorError):
        return f"{type(error).__name__}: its process ended", _reason_of_death(str(error)), error
    return f"{type(error).__name__}: {str(error).strip()}", "", error


def _reason_of_death(text: str) -> str:
    """Return Ray's text without the ids before the reason and the general advice after it."""
    _, _, reason = text.rpartition("The actor is dead because ")
    return reason.partition(" Some common causes include")[0].strip()
