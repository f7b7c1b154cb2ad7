"""A cluster in virtual time: an event queue in place of processes, so that a day of thousands of ranks takes minutes.

Workers are objects of this process. A method that takes time is a coroutine, a stream that does is an asynchronous
generator: `await sleep(3.0)` lets time pass, `await condition.wait()` waits for another call. Other methods take none.

The driver is ordinary code. Wherever it waits (`result`, `next`, `ready`, `clock.sleep`), events happen in the order of
their times, those of one time in an order that the seed draws. Nothing else moves the clock: what the driver itself
computes takes no virtual time. With one seed, one run.
"""

from __future__ import annotations

import heapq
import inspect
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from grpo_mcore.base.imports import exited
from grpo_mcore.rollout.workers import (
    Cluster,
    DeadlineExceeded,
    NodeLost,
    NotEnoughResources,
    ObjectLost,
    Parcel,
    Place,
    Ref,
    Rendezvous,
    SpawnOptions,
    SpawnOrder,
    T,
    Worker,
    WorkerDied,
    WorkerFailed,
)

LATE_S = 1e-6
"""Seconds by which a wait overruns its deadline, so that the time left is then exactly 0 and not a rounding error."""
CIRCLES, CIRCLE_S = 200_000, 1.0
"""More than CIRCLES waits of the driver within CIRCLE_S virtual seconds mean that it makes no progress."""
GIVEN_UP_S = 90.0
"""Virtual seconds after its deadline in which a call must be over: its worker was asked for its health, which has a
deadline of its own, and replaced, or the run is lost. 15 of them are the driver's: it trained, and began a refit,
before it came to wait for that worker."""
PATIENCE_S = 0.5
"""Virtual seconds that a patient wait gives the others once one answer has come."""
Resume = Callable[[Any], None]


class _AtOnce(Executor):
    """Does what is submitted at once: a thread would not follow the virtual clock."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # raised by result(), as from a thread
            future.set_exception(error)
        return future


class VirtualClock:
    """The event queue. `begin`: unix time at which it starts; `seed`: orders events of one time. `timer`: measures
    `spent`; to ask the system for a thread's seconds can take longer than an event."""

    def __init__(self, seed: int = 0, begin: float = 1_700_000_000.0, timer: Callable[[], float] | None = None) -> None:
        self._now, self._begin = 0.0, begin
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._draw, self._count = random.Random(seed).random, 0
        self._circles, self._circled_at = 0, 0.0  # waits since then
        self._timer = timer
        self.spent = 0.0
        """Seconds that the events have taken, by the timer; the rest of the process's time is the driver's."""

    def now(self) -> float:
        return self._now

    def unix(self) -> float:
        return self._begin + self._now

    def sleep(self, seconds: float) -> None:
        self.run(lambda: False, self._now + seconds)

    def thread(self, name: str) -> Executor:
        return _AtOnce()

    def beat(self, seconds: float, action: Callable[[], object], name: str) -> Callable[[], None]:
        return lambda: None

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let an event happen in `seconds`."""
        self._count += 1
        heapq.heappush(self._events, (self._now + seconds, self._draw(), self._count, event))

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Let events happen until `until()` or the deadline, and return whether it was `until()`."""
        if self._timer is None:
            return self._run(until, deadline)
        started_at = self._timer()
        try:
            return self._run(until, deadline)
        finally:
            self.spent += self._timer() - started_at

    def _run(self, until: Callable[[], bool], deadline: float) -> bool:
        self._circles += 1
        if self._now > self._circled_at + CIRCLE_S:
            self._circles, self._circled_at = 0, self._now
        if self._circles > CIRCLES:
            raise RuntimeError(f"the driver goes round in circles: {CIRCLES:,} waits took less than {CIRCLE_S:g} s")
        events = self._events
        while not until():
            if not events or events[0][0] > deadline:
                if deadline == float("inf"):
                    raise RuntimeError("the driver waits for ever, and nothing will happen any more")
                self._now = max(self._now, deadline) + LATE_S
                return False
            self._now, _, _, event = heapq.heappop(events)
            event()
        return True


class _Wait:
    """An awaitable of a worker's coroutine. `start` gets the clock and the function that resumes the coroutine."""

    def __init__(self, start: Callable[[VirtualClock, Resume], None]) -> None:
        self.start = start

    def __await__(self) -> Generator[_Wait, Any, Any]:
        return (yield self)


def sleep(seconds: float) -> _Wait:
    """Let virtual seconds pass, in a method of a worker."""
    return _Wait(lambda clock, resume: clock.after(seconds, lambda: resume(None)))


class Condition:
    """Lets methods wait until another one calls `notify`."""

    def __init__(self) -> None:
        self._waiting: list[Resume] = []

    def wait(self, seconds: float | None = None) -> _Wait:
        """Wait for `notify`, at most `seconds`."""

        def start(clock: VirtualClock, resume: Resume) -> None:
            gone_on = False

            def once(value: Any) -> None:
                nonlocal gone_on
                if not gone_on:
                    gone_on = True
                    resume(value)

            self._waiting.append(once)
            if seconds is not None:
                clock.after(seconds, lambda: once(None))

        return _Wait(start)

    def notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume(None)


@dataclass(eq=False)
class Node:
    """A machine. `free`: accelerators that nobody holds."""

    name: str
    gpus: int
    free: list[int] = field(default_factory=list)
    alive: bool = True


@dataclass(frozen=True, eq=False)
class VirtualRef:
    """A reference to an object. `owner`: the worker that dies with it; `node`: the machine on which it lies."""

    obj: Any
    owner: VirtualWorker | None = None
    node: Node | None = None
    lost: list[bool] = field(default_factory=list)  # an entry: the store has lost it by itself

    def is_lost(self) -> bool:
        gone = (self.owner is not None and not self.owner.alive) or (self.node is not None and not self.node.alive)
        return gone or bool(self.lost)


class VirtualStore:
    """Holds objects as they are. What a worker puts is lost with it, everything of a node with the node."""

    def __init__(self) -> None:
        self.worker: VirtualWorker | None = None
        """The worker whose code runs now; None while the driver's does."""
        self.kept = WeakSet[VirtualRef]()
        """References to objects of workers, as long as somebody has them."""

    def put(self, obj: Any) -> Ref:
        return VirtualRef(obj, self.worker, self.worker.node if self.worker else None)

    def keep(self, obj: Any, worker: VirtualWorker) -> VirtualRef:
        """Return a reference to what a worker hands over: it outlives the worker, not its node."""
        ref = VirtualRef(obj, None, worker.node)
        self.kept.add(ref)
        return ref

    def fetch(self, ref: Ref) -> Any:
        if ref.is_lost():
            raise ObjectLost("the object store", "fetch", "who held it is gone")
        return ref.obj

    def fetch_many(self, refs: Sequence[Ref]) -> list[Any]:
        return [self.fetch(ref) for ref in refs]


class _Call:
    """The driver's end of a call. `ready`: whether there is an answer, an item, an end or an error."""

    def __init__(self, worker: VirtualWorker, purpose: str, timeout_s: float) -> None:
        self.whom, self.purpose, self.timeout_s = worker.name, purpose, timeout_s
        self.worker, self.cluster = worker, worker.cluster
        self.since = self.cluster.clock.now()
        self.ready = self.over = False

    def _await(self, deadline: float) -> None:
        def look() -> bool:
            self.cluster.watch()
            return self.ready

        if not self.cluster.clock.run(look, deadline):
            state = "it stands still" if self.worker.hung else "it is at work"
            raise DeadlineExceeded(self.purpose, self.whom, self.timeout_s, f"{self.whom}: {state}")

    def _came(self) -> None:
        waited = self.cluster.clock.now() - self.since
        if not self.ready and waited > self.timeout_s + GIVEN_UP_S:
            text = (
                f"{self.whom} owed the answer to {self.purpose} for {waited:.0f} s, of which the driver promises to "
                f"wait {self.timeout_s:.0f}"
            )
            self.cluster.overdue.append((waited - self.timeout_s, text))
        self.ready = True
        self.cluster.came(self)


class VirtualFuture(_Call):
    value: Any = None
    error: Exception | None = None

    def answer(self, value: Any, error: Exception | None) -> None:
        if not self.over:
            self.value, self.error, self.over = value, error, True
            self._came()

    def result(self) -> Any:
        self._await(self.since + self.timeout_s)
        if self.error is not None:
            raise self.error
        return self.value


class VirtualStream(_Call):
    def __init__(self, worker: VirtualWorker, purpose: str, timeout_s: float) -> None:
        super().__init__(worker, purpose, timeout_s)
        self._items: deque[Any] = deque()
        self._error: Exception | None = None

    def add(self, item: Any) -> None:
        if not self.over:
            self._items.append(item)
            self._came()

    def answer(self, value: Any, error: Exception | None) -> None:
        if not self.over:
            self._error, self.over = error, True
            self._came()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._await(self.cluster.clock.now() + self.timeout_s)
        self.since = self.cluster.clock.now()
        if self._items:
            item = self._items.popleft()
            self.ready = bool(self._items) or self.over
            return item
        error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration


@dataclass(eq=False)
class _Lane:
    """Calls that share a worker's threads. `free`: threads without a call."""

    free: int
    waiting: deque[Callable[[], None]] = field(default_factory=deque)


class VirtualWorker:
    """A handle on a worker, and the worker itself. `target`: the object, once it is built; its method `died`, if it has
    one, is called at the death of its process."""

    spawn_seconds = 0.0

    def __init__(self, cluster: VirtualCluster, name: str, node: Node, gpus: Sequence[int], options: SpawnOptions):
        self.cluster, self.name, self.node, self.gpus = cluster, name, node, tuple(gpus)
        cluster.processes += 1
        self.pid = cluster.processes
        self.alive, self.hung = True, False
        self.target: Any = None
        self._failure: Exception | None = None  # of the constructor
        self._built = False
        self._tasks: set[_Task] = set()
        self._open: dict[int, VirtualFuture | VirtualStream] = {}  # by id, in the order in which they were made
        self._calls = _Lane(options.concurrency)
        self._streams = _Lane(options.streams) if options.streams else self._calls
        self._inbox: deque[tuple[_Lane, Callable[[], None]]] = deque()  # messages do not overtake each other

    def build(self, cls: Callable[..., Any], args: Sequence[Any]) -> None:
        """Start the constructor. An object with a coroutine `starting` is ready when that has ended."""
        self._ready = VirtualFuture(self, "its constructor", float("inf"))
        self._open[id(self._ready)] = self._ready

        async def construct() -> None:
            self.target = cls(*map(self._given, args))
            if hasattr(self.target, "starting"):
                await self.target.starting()

        def constructed(value: Any, error: Exception | None) -> None:
            self._built = True
            if error is not None:
                self._failure = _failed(self.name, "its constructor", error)
            self._answered(self._ready, None, self._failure)
            for lane in {id(lane): lane for lane in (self._calls, self._streams)}.values():
                self._next(lane)

        self.cluster.clock.after(self.cluster.latency(), lambda: self._run(construct, constructed))

    def ready(self) -> VirtualFuture:
        return self._ready

    def place(self) -> Place:
        return Place(self.node.name, self.node.name, self.pid, tuple(map(str, self.gpus)), "")

    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None
    ) -> VirtualFuture:
        future = VirtualFuture(self, purpose or method, self._timeout(timeout_s))
        self._start(future, self._calls, method, args)
        return future

    def stream(
        self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None
    ) -> VirtualStream:
        stream = VirtualStream(self, purpose or method, self._timeout(timeout_s))
        self._start(stream, self._streams, method, args)
        return stream

    def _timeout(self, timeout_s: float | None) -> float:
        return self.cluster.call_timeout_s if timeout_s is None else timeout_s

    def _start(self, call: Any, lane: _Lane, method: str, args: Sequence[Any]) -> None:
        """Send a call to the worker, where it waits for a thread of its lane."""
        self._open[id(call)] = call
        if not self.alive:
            self.cluster.clock.after(
                self.cluster.latency(), lambda: self._answered(call, None, self._died(call.purpose))
            )
            return

        def run() -> None:
            lane.free -= 1
            self.cluster.observe(self, method)
            self._run(lambda: self._perform(call, method, args), over)

        def over(value: Any, error: Exception | None) -> None:
            lane.free += 1
            failure = None if error is None else _failed(self.name, call.purpose, error)
            self.cluster.clock.after(self.cluster.latency(), lambda: self._answered(call, value, failure))
            self._next(lane)

        self._inbox.append((lane, run))
        self.cluster.clock.after(self.cluster.latency(), self._arrive)

    def _arrive(self) -> None:
        lane, run = self._inbox.popleft()
        if self.alive:
            lane.waiting.append(run)
            self._next(lane)

    def _next(self, lane: _Lane) -> None:
        while self._built and lane.free and lane.waiting and self.alive:
            lane.waiting.popleft()()

    async def _perform(self, call: Any, method: str, args: Sequence[Any]) -> Any:
        if self._failure is not None:
            raise self._failure
        made = getattr(self.target, method)(*map(self._given, args))
        if isinstance(call, VirtualFuture):
            return await made if inspect.isawaitable(made) else made
        if hasattr(made, "__aiter__"):
            async for item in made:
                self._hand_over(call, item)
        else:
            for item in made:
                self._hand_over(call, item)
                await sleep(0.0)
        return None

    def _hand_over(self, stream: VirtualStream, item: Any) -> None:
        many = item if isinstance(item, list) else [item]
        if many and all(isinstance(entry, Parcel) for entry in many):
            parcels = [Parcel(parcel.label, self.cluster.store.keep(parcel.content, self)) for parcel in many]
            item = parcels if isinstance(item, list) else parcels[0]
        stream.add(item)

    def _given(self, arg: Any) -> Any:
        return self.cluster.store.fetch(arg) if isinstance(arg, VirtualRef) else arg

    def _run(self, start: Callable[[], Any], over: Callable[[Any, Exception | None], None]) -> None:
        if self.alive:
            _Task(self, start(), over).go_on(None)

    def _answered(self, call: Any, value: Any, error: Exception | None) -> None:
        if self._open.pop(id(call), None) is not None:
            call.answer(value, error)

    def _died(self, purpose: str) -> WorkerDied:
        return WorkerDied(self.name, purpose, "its process ended")

    def end(self, notice_s: float = 0.0) -> None:
        """End its process. Its callers hear of it after `notice_s`."""
        if not self.alive:
            return
        self.alive = False
        for task in list(self._tasks):
            task.cancel()
        self.node.free += self.gpus
        for lane in (self._calls, self._streams):
            lane.waiting.clear()
        getattr(self.target, "died", lambda: None)()
        for call in list(self._open.values()):
            self.cluster.clock.after(notice_s, lambda call=call: self._answered(call, None, self._died(call.purpose)))  # type: ignore[misc]


class _Task:
    """A worker's coroutine that has begun."""

    def __init__(self, worker: VirtualWorker, coroutine: Any, over: Callable[[Any, Exception | None], None]) -> None:
        self.worker, self._coroutine, self._over = worker, coroutine, over
        worker._tasks.add(self)

    def cancel(self) -> None:
        self.worker._tasks.discard(self)
        self._coroutine.close()

    def go_on(self, value: Any) -> None:
        """Run the coroutine up to its next wait. Do nothing if its worker has ended, and hold the step back if its
        worker hangs."""
        worker = self.worker
        if self not in worker._tasks:
            return
        if worker.hung:
            worker.cluster.standing.setdefault(worker, []).append(lambda: self.go_on(value))
            return
        store, before = worker.cluster.store, worker.cluster.store.worker
        store.worker = worker
        try:
            wait = self._coroutine.send(value)
        except StopIteration as end:
            self._end(end.value, None)
        except SystemExit as error:
            self._end(None, exited("it", error))
        except Exception as error:
            self._end(None, error)
        else:
            wait.start(worker.cluster.clock, self.go_on)
        finally:
            store.worker = before

    def _end(self, value: Any, error: Exception | None) -> None:
        self.worker._tasks.discard(self)
        self._over(value, error)


class VirtualCluster(Cluster):
    """The Cluster interface in virtual time.

    `stand_in`: returns what is built in place of a class; `nodes`, `gpus`: machines, and accelerators of each;
    `latency_s`: longest time of a message, shorter ones are drawn; `observe`: gets (worker, method) of each call that
    begins to run. `death_notice_s`: longest time until callers hear of a death.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        stand_in: Callable[[Any], Callable[..., Any]] = lambda cls: cls,
        nodes: int = 1,
        gpus: int = 8,
        call_timeout_s: float = 3600.0,
        latency_s: float = 0.0,
        death_notice_s: float = 0.0,
        clock: VirtualClock | None = None,
        observe: Callable[[VirtualWorker, str], None] = lambda worker, method: None,
    ) -> None:
        self.clock = clock or VirtualClock(seed)
        self.store = VirtualStore()
        self.call_timeout_s, self.address = call_timeout_s, "driver"
        self.nodes = [Node(f"node-{number}", gpus, list(range(gpus))) for number in range(nodes)]
        self.processes = 0
        self.observe = observe
        self.overdue: list[tuple[float, str]] = []
        """(Seconds overdue, message) of every call still open GIVEN_UP_S after its deadline."""
        self.standing: dict[VirtualWorker, list[Callable[[], None]]] = {}
        """Steps of hung workers that are held back."""
        self.workers: dict[str, VirtualWorker] = {}
        """The living ones, by name."""
        self._stand_in, self._latency_s, self._death_notice_s = stand_in, latency_s, death_notice_s
        self._draw = random.Random(seed ^ 0x5EED)
        self._awaited: Mapping[int, Any] = {}
        self._has_come = False

    def latency(self) -> float:
        """Return how long a message takes."""
        return self._draw.uniform(0.0, self._latency_s) if self._latency_s else 0.0

    def came(self, call: _Call) -> None:
        """Note that a call has something for its caller."""
        self._has_come = self._has_come or id(call) in self._awaited

    def start(
        self, name: str, cls: Callable[..., Any], args: Sequence[Any], options: SpawnOptions, beside: Sequence[Worker]
    ) -> VirtualWorker:
        (worker,) = self._place([name], options, 1, [beside] if beside else [])
        worker.build(self._stand_in(cls), args)
        return worker

    def start_group(self, order: SpawnOrder) -> Sequence[VirtualWorker]:
        size, options = len(order.args_per_rank), order.options
        workers = self._place([f"{order.name}-{rank}" for rank in range(size)], options, order.nodes, order.beside)
        local: dict[Node, int] = {}
        for rank, (worker, args) in enumerate(zip(workers, order.args_per_rank, strict=True)):
            index = local[worker.node] = local.get(worker.node, -1) + 1
            meeting = Rendezvous(rank, size, 0 if options.gpus else index, workers[0].node.name, 1024)
            worker.build(self._stand_in(order.cls), (meeting, *args))
        return workers

    def _place(
        self, names: Sequence[str], options: SpawnOptions, nodes: int, beside: Sequence[Sequence[Worker]]
    ) -> list[VirtualWorker]:
        for name in names:
            if name in self.workers:
                raise ValueError(f"{name}: there is a worker of this name already")
        if beside:  # on the devices of their neighbours: they hold none for themselves
            homes = [others[0].node for others in beside if isinstance(others[0], VirtualWorker)]
            if lost := [node.name for node in homes if not node.alive]:
                raise NodeLost(f"{names[0]}: its node {lost[0]} is gone")
            return [self._worker(name, node, (), options) for name, node in zip(names, homes, strict=True)]
        need, per_node = int(options.gpus), -(-len(names) // nodes)
        spots: list[tuple[Node, list[int]]] = []
        for node in (node for node in self.nodes if node.alive):
            room = min(per_node if nodes > 1 else len(names), len(node.free) // need if need else len(names))
            if nodes > 1 and room < per_node:
                continue
            for _ in range(min(room, len(names) - len(spots))):
                spots.append((node, [node.free.pop(0) for _ in range(need)]))
        if len(spots) < len(names):
            for node, taken in spots:
                node.free += taken
            whole = sum(node.gpus for node in self.nodes) >= need * len(names) and len(self.nodes) >= nodes
            text = f"{names[0]}: {len(names)} x {need} accelerators on {nodes} nodes"
            if whole and not all(node.alive for node in self.nodes):
                raise NodeLost(f"{text}: a node is gone")
            raise NotEnoughResources(f"{text} are more than the cluster has free")
        return [self._worker(name, node, taken, options) for name, (node, taken) in zip(names, spots, strict=True)]

    def _worker(self, name: str, node: Node, gpus: Sequence[int], options: SpawnOptions) -> VirtualWorker:
        worker = self.workers[name] = VirtualWorker(self, name, node, gpus, options)
        return worker

    def wait(
        self, things: Sequence[T], timeout_s: float, purpose: str, watch: Callable[[], None], patient: bool
    ) -> Sequence[T]:
        calls: Sequence[Any] = things
        answered = [thing for thing in calls if not isinstance(thing, _Call)]
        if answered:  # calls of objects of this process: they have run already
            return answered
        deadline = self.clock.now() + timeout_s

        def look() -> bool:
            watch()
            self.watch()
            return self._has_come

        look()
        if not any(call.ready for call in calls):
            self._awaited, self._has_come = {id(call): call for call in calls}, False
            try:
                if not self.clock.run(look, deadline):
                    whom = ", ".join(call.whom for call in calls[:3]) + (" ..." if len(calls) > 3 else "")
                    raise DeadlineExceeded(purpose, whom, timeout_s)
            finally:
                self._awaited = {}
        if patient:
            rest = [call for call in calls if not call.ready]
            until = min(deadline, self.clock.now() + PATIENCE_S)
            while rest and self.clock.run(lambda: rest[-1].ready, until):
                rest.pop()
        return [call for call in calls if call.ready]

    def last_log_line(self, worker: str) -> str:
        return "it prints nothing in virtual time"

    def stop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            assert isinstance(worker, VirtualWorker)
            if worker.alive and worker._built and not worker.hung:
                getattr(worker.target, "shutdown", lambda: None)()
            self._forget(worker)
            worker.end()

    def shutdown(self) -> None:
        self.stop(list(self.workers.values())[::-1])

    def kill(self, name: str) -> None:
        """End a worker's process, as the kernel would."""
        if (worker := self.workers.get(name)) is not None:
            self._forget(worker)
            worker.end(self._draw.uniform(0.0, self._death_notice_s))

    def kill_node(self, node: Node) -> None:
        """Switch a machine off, with all its workers and objects."""
        node.alive = False
        for worker in [worker for worker in self.workers.values() if worker.node is node]:
            self.kill(worker.name)

    def restore_node(self, node: Node) -> None:
        """Put another machine in its place."""
        node.alive, node.free = True, list(range(node.gpus))

    def hang(self, name: str, seconds: float = float("inf")) -> None:
        """Let a worker stand still: calls arrive, none is answered. After `seconds` it goes on."""
        worker = self.workers.get(name)
        if worker is None:
            return
        worker.hung = True

        def go_on() -> None:
            worker.hung = False
            for step in self.standing.pop(worker, []):
                step()

        if seconds < float("inf"):
            self.clock.after(seconds, go_on)

    def _forget(self, worker: VirtualWorker) -> None:
        if self.workers.get(worker.name) is worker:
            del self.workers[worker.name]


def _failed(worker: str, purpose: str, error: Exception) -> WorkerFailed:
    """Return what a caller gets of an error in a worker."""
    if isinstance(error, WorkerFailed) and error.worker == worker:
        return error
    failed = WorkerFailed(worker, purpose, f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
