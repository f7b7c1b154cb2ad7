"""Handles on Ray actors: calls, streams and objects, with deadlines and errors that say who and why."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

    @property
    def answered(self) -> bool:
        """Whether the answer is in this process already."""
        return False

    def has_answer(self, timeout_s: float = 0.0) -> bool:
        return bool(ray.wait([self.handle], timeout=timeout_s, fetch_local=False)[0])

    def arrives(self) -> bool:
        """Return whether it has something, now that Ray has something for its handle."""
        self.seen = True
        return True

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


NOTHING: tuple[str, Sequence[Any]] = "", ()
"""Method and arguments of a call that is not sent again."""


class _Answers:
    """The answers of `calls` that were sent together: a stream of {number of the call: its answer, pickled}. `failure`:
    the end of the worker, and so of the calls whose answers are not `here`."""

    def __init__(self, stream: Any, calls: Sequence[RayFuture]) -> None:
        self.stream = stream
        # Those without an answer, and whom somebody awaits: a call that was given up is not kept.
        self._awaited = weakref.WeakValueDictionary(enumerate(calls))
        self.here: dict[int, bytes] = {}
        self.failure: RayError | None = None

    def take(self, timeout_s: float) -> None:
        """Take those that are there. If the message has failed, as where an object that one of its calls needs is lost,
        send each call by itself, so that the others are answered."""
        while self._awaited and self.stream.next_ready():
            try:
                came: dict[int, bytes] = ray.get(next(self.stream), timeout=timeout_s)
            except RayError as error:
                if isinstance(error, RayActorError | GetTimeoutError):
                    self.failure = error
                else:
                    for call in self._awaited.values():
                        call.worker.send([call])
                self._awaited.clear()
                return
            for number in came:
                self._awaited.pop(number, None)
            self.here |= came


class RayFuture(_RayCall):
    """The answer of one actor call. `handle`: its ObjectRef, or the stream of `answers`, where it is that of call
    `number`. `asked`: method and arguments of a call of the worker's object, as long as it may be sent again."""

    answers: _Answers | None = None
    number = 0

    def __init__(
        self,
        worker: RayWorker,
        purpose: str,
        handle: Any,
        timeout_s: float,
        request: tuple[str, Sequence[Any]] = NOTHING,
    ) -> None:
        super().__init__(worker, purpose, handle, timeout_s)
        self.asked = request

    @property
    def answered(self) -> bool:
        return self.answers is not None and (self.number in self.answers.here or self.answers.failure is not None)

    def has_answer(self, timeout_s: float = 0.0) -> bool:
        return self.answered or super().has_answer(timeout_s)

    def arrives(self) -> bool:
        if self.answers is None:
            return super().arrives()
        self.answers.take(self.timeout_s)
        return self.answered  # not if it was sent again, by itself

    def result(self) -> Any:
        """Return the answer. One that came in time is returned however late it is asked for."""
        if self.answers is None:
            self._await_answer(self._seconds_left())
            return self.worker.fetch(self.purpose, self.handle)
        while not self.answered:
            self._await_answer(self._seconds_left())
            self.answers.take(self.timeout_s)
            if self.answers is None:  # it was sent again, by itself
                return self.result()
        if self.number not in self.answers.here:
            assert self.answers.failure is not None
            self.worker.fail(self.purpose, self.answers.failure)
        answer = pickle.loads(self.answers.here[self.number])
        if isinstance(answer, RemoteFailure):
            self.worker.fail(self.purpose, answer)
        return answer

    def _seconds_left(self) -> float:
        return max(self.since + self.timeout_s - time.monotonic(), 0.0)


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
    Ray for calls that stream; `concurrent`: it takes several calls at a time."""

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
        concurrent: bool,
    ) -> None:
        self.name = name
        self.actor = actor
        self._call_timeout_s = call_timeout_s
        self._waiting_for = waiting_for
        self._on_death = on_death
        self.watch = watch
        self._stream_options = stream_options
        self._concurrent = concurrent
        self._held: list[RayFuture] | None = None  # calls to be sent together
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
        call = RayFuture(self, purpose or method, None, timeout_s, (method, args))
        if self._held is None:
            self.send([call])
        else:
            self._held.append(call)
        return call

    @contextmanager
    def together(self) -> Iterator[None]:
        if not self._concurrent:
            yield
            return
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            self.send(held)

    def send(self, calls: Sequence[RayFuture]) -> None:
        """Send calls as one message."""
        wholes: dict[ray.ObjectRef, int] = {}
        requests = [_asked(*call.asked, wholes) for call in calls]
        if len(calls) == 1:
            calls[0].handle, calls[0].answers = self.actor.call.remote(requests[0], *wholes), None
            calls[0].asked = NOTHING
        elif calls:
            stream = self.actor.calls.options(num_returns="streaming").remote(requests, *wholes)
            answers = _Answers(stream, calls)
            for number, call in enumerate(calls):
                call.handle, call.answers, call.number = stream, answers, number
        with self._lock:
            self._calls.update(calls)

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


def _asked(method: str, args: Sequence[Any], wholes: dict[ray.ObjectRef, int]) -> Asked:
    """Return a call as `WorkerActor` takes it, and add the objects of the store that it needs to `wholes`."""
    sent_args: list[Any] = list(args)
    references: dict[int, tuple[int, int | None]] = {}
    for position, arg in enumerate(args):
        if isinstance(arg, PartRef | ray.ObjectRef):
            whole, index = (arg.whole, arg.index) if isinstance(arg, PartRef) else (arg, None)
            references[position] = wholes.setdefault(whole, len(wholes)), index
            sent_args[position] = None
    return method, sent_args, references


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
