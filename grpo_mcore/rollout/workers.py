"""What a cluster offers, and the errors it raises. Two implementations: LocalCluster, RayCluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

Ref = Any
"""An object in the cluster's store. Under Ray an ObjectRef; in process the object itself."""


class DeadlineExceeded(TimeoutError):
    """Something did not happen in time. `what` was waited for, from `whom`, for `seconds`."""

    def __init__(self, what: str, whom: str, seconds: float, detail: str = "") -> None:
        super().__init__(what, whom, seconds, detail)  # as `args`, so that it can be pickled
        self.what, self.whom, self.seconds, self.detail = what, whom, seconds, detail

    def __str__(self) -> str:
        text = f"{self.what}: no answer from {self.whom} within {self.seconds:.6g} s"
        return f"{text}\n{self.detail}" if self.detail else text


class WorkerFailed(RuntimeError):
    """A worker raised or died. `what`: the method, or the name that the caller gave the call; `cause`: the
    exception's type and message; `detail`: its traceback and the end of the worker's log.

    Where the exception itself could travel, it is `__cause__`.
    """

    def __init__(self, worker: str, what: str, cause: str, detail: str = "") -> None:
        super().__init__(worker, what, cause, detail)
        self.worker, self.what, self.cause, self.detail = worker, what, cause, detail

    def __str__(self) -> str:
        text = f"{self.worker}: {self.what} failed: {self.cause}"
        return f"{text}\n{self.detail}" if self.detail else text


class WorkerDied(WorkerFailed):
    """The worker's process has ended; no call will reach it again."""


class ObjectLost(WorkerFailed):
    """The store no longer has an object, because a process or a machine that held it has gone."""


class NotEnoughResources(RuntimeError):
    """More processors or accelerators were asked for than there are."""


@dataclass(frozen=True)
class Place:
    """Where a worker runs. `gpus`: ids of its accelerators on that node; `log`: file of all it prints."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one group meet: the first constructor argument of every worker of a group.

    `local_rank` is the index of the rank's accelerator among those its process sees: 0 under Ray, which shows
    each rank only its own. Without accelerators it counts the group's ranks on one node.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class Parcel:
    """An item of a stream that stays in the store: a worker yields `Parcel(label, content)`, its caller
    receives `Parcel(label, reference to the content)`, and only the label is copied. Keep labels small."""

    label: Any
    content: Any


class Future(Protocol):
    """The answer of one call."""

    whom: str
    what: str

    def result(self) -> Any:
        """Waits for the answer.

        Raises DeadlineExceeded when it is not there `timeout_s` after the call, WorkerFailed when the worker
        raised or died.
        """


class Stream(Protocol):
    """The items of one remote generator, as they come; see Parcel for large ones. Each item has the call's
    `timeout_s` to arrive.

    Raises as `Future.result` does.
    """

    whom: str
    what: str

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...


class Worker(Protocol):
    """A handle on one object somewhere. Calls run in the order in which they were made, one at a time, unless it was
    spawned with more `concurrency` or with `streams`."""

    name: str

    def ready(self) -> Future:
        """None, once the constructor has returned. Calls made before that wait for it."""

    def place(self) -> Place:
        """Where it runs. Waits until its process is up."""

    def call(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> Future:
        """Starts `method(*args)`. A reference given as an argument arrives as the object; inside another
        argument it stays a reference, for `ObjectStore.fetch`. `what` names the call in errors."""

    def stream(self, method: str, *args: Any, timeout_s: float | None = None, what: str | None = None) -> Stream:
        """Starts the generator `method(*args)`."""


class ObjectStore(Protocol):
    """The cluster's store, for workers: small and picklable, so it goes in as a constructor argument.

    An object that a worker puts is lost with that worker; what is returned, or yielded as Parcel, is not.
    """

    def put(self, obj: Any) -> Ref:
        """Not inside a stream: yield a Parcel there."""

    def fetch(self, ref: Ref) -> Any: ...

    def fetch_many(self, refs: Sequence[Ref]) -> list[Any]: ...


T = TypeVar("T", bound=Future | Stream)


class Cluster(Protocol):
    """Spawns workers and moves objects between them. `with cluster:` shuts it down at the end."""

    store: ObjectStore
    call_timeout_s: float
    """Deadline of calls that give none, in seconds."""
    address: str
    """Of this process, on the interface through which the cluster's nodes reach each other."""

    def spawn(
        self,
        name: str,
        cls: type,
        *args: Any,
        cpus: float = 1.0,
        gpus: float = 0.0,
        env: Mapping[str, str] | None = None,
        concurrency: int = 1,
        streams: int = 0,
        beside: Sequence[Worker] = (),
    ) -> Worker:
        """Starts a worker built by `cls(*args)` and returns at once: `ready()` waits for it.

        `env`: variables of its process, set before anything is imported there. `concurrency`: calls that may
        run at a time, in threads. `streams`: so many streams run beside the calls, in threads of their own, and more
        wait for one of these to end; 0: streams count as calls. `beside`: on the node of these workers, seeing their
        accelerators. Raises NotEnoughResources when the whole cluster is too small.
        """

    def spawn_group(
        self,
        name: str,
        cls: Callable[..., Any],
        args_per_rank: Sequence[Sequence[Any]],
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        env: Mapping[str, str] | None = None,
        nodes: int = 1,
        concurrency: int = 1,
        streams: int = 0,
        beside: Sequence[Sequence[Worker]] = (),
    ) -> Sequence[Worker]:
        """Starts `name-0`, `name-1`, ... built by `cls(Rendezvous, *args_per_rank[rank])`, and returns them
        by rank as soon as each has its place: on as few nodes as possible, or as many on each of `nodes` nodes,
        the ranks of a node in a row. `cpus` and `gpus` are for each rank. `concurrency`, `streams`: as in `spawn`.
        `beside`: for each rank, the workers on whose node it runs, whatever `nodes` says. `cls` may be a function."""

    def put(self, obj: Any) -> Ref: ...

    def fetch(self, ref: Ref) -> Any: ...

    def next_ready(self, things: Sequence[T], timeout_s: float, what: str) -> T:
        """The first of `things` that has something: an answer, an item, an end or an error."""

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ends these workers. Each gets a moment for its method `shutdown`, where it has one."""

    def shutdown(self) -> None:
        """Ends all workers and what this cluster started. May be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
