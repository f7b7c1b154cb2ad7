"""The protocols of workers and clusters, and their errors. Clusters: LocalCluster, RayCluster, VirtualCluster."""

import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from grpo_mcore.base.clock import Clock

Ref = Any
"""A reference to an object in the cluster's store. Under Ray an ObjectRef; in process the object itself."""


class DeadlineExceeded(TimeoutError):
    """A wait was too long. `purpose` was waited for, from `whom`, for `seconds`."""

    def __init__(self, purpose: str, whom: str, seconds: float, detail: str = "") -> None:
        super().__init__(purpose, whom, seconds, detail)  # as `args`, so that it can be pickled
        self.purpose, self.whom, self.seconds, self.detail = purpose, whom, seconds, detail

    def __str__(self) -> str:
        text = f"{self.purpose}: no answer from {self.whom} within {self.seconds:.6g} s"
        return f"{text}\n{self.detail}" if self.detail else text


class WorkerFailed(RuntimeError):
    """A worker raised or died. `purpose`: the method, or the name that the caller gave the call; `cause`: type and
    message of the exception; `detail`: its traceback and the end of the worker's log. `__cause__` is the exception
    itself if it could be pickled.
    """

    def __init__(self, worker: str, purpose: str, cause: str, detail: str = "") -> None:
        super().__init__(worker, purpose, cause, detail)
        self.worker, self.purpose, self.cause, self.detail = worker, purpose, cause, detail

    def __str__(self) -> str:
        text = f"{self.worker}: {self.purpose} failed: {self.cause}"
        return f"{text}\n{self.detail}" if self.detail else text


class WorkerDied(WorkerFailed):
    """The worker's process has ended; no call will reach it again."""


class ObjectLost(WorkerFailed):
    """The store no longer has an object, because a process or a machine that held it is gone."""


class NotEnoughResources(RuntimeError):
    """More processors or accelerators are requested than the cluster has."""


class NodeLost(RuntimeError):
    """The cluster has too few resources since a node of it is gone, or the nodes of an engine did not meet."""


LOST_FILES = {errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENOTCONN, errno.ETIMEDOUT, errno.EREMOTEIO}
"""Errors of files whose disk or server is gone, unlike those of a full disk, a missing file or permissions."""

LOST_DEVICE = re.compile(
    r"gloo/(transport|rendezvous)|ncclRemoteError|ncclSystemError|ncclInternalError|NCCL watchdog|uncorrectable|"
    r"NVLink|GPU is lost|fallen off the bus|unspecified launch failure"
)
"""Text of torch's RuntimeErrors after a peer's connection broke or a device failed. A living rank may raise one long
before its peer's death is noticed."""


def is_fault(error: BaseException) -> bool:
    """Return whether the cause is a lost process, machine, device, disk, network or Ray, or a missed deadline, so that
    a retry may succeed. False for a mistake in the recipe, the data, the model or a program. What fails while a loss is
    handled or cleaned up is a loss too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WorkerDied | ObjectLost | NodeLost | DeadlineExceeded | ConnectionError):
            return True
        if isinstance(cause, OSError) and cause.errno in LOST_FILES:
            return True
        kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(cause).__mro__}
        if any(kind.startswith("ray.") for kind in kinds) or "torch.DistError" in kinds:
            return True
        if isinstance(cause, RuntimeError) and LOST_DEVICE.search(str(cause)):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


@dataclass(frozen=True)
class Place:
    """Where a worker runs. `gpus`: ids of its accelerators on that node; `log`: the file of everything it prints."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one group meet: the first constructor argument of every worker of a group.

    `local_rank` is the index of the rank's accelerator among those its process sees: 0 under Ray, which shows each rank
    only its own. Without accelerators it is the rank's index among the group's ranks on its node.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class Parcel:
    """An item of a stream whose content stays in the store: a worker yields `Parcel(label, content)`, its caller
    receives `Parcel(label, reference to the content)`, and only the label is copied. Keep labels small. An item may
    also be a list of parcels: it costs as much as one. The caller may receive several such lists as one."""

    label: Any
    content: Any


class Future(Protocol):
    """The answer of one call. `whom`: the worker's name; `purpose`: the call's name in errors."""

    whom: str
    purpose: str

    def result(self) -> Any:
        """Wait for the answer. Raises DeadlineExceeded if it is not there `timeout_s` after the call, and WorkerFailed
        if the worker raised or died."""


class Stream(Protocol):
    """The items of one remote generator, as they come; see Parcel for large ones. Each item has the call's `timeout_s`
    to arrive. Raises as `Future.result` does."""

    whom: str
    purpose: str

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...


class Worker(Protocol):
    """A handle on an object in another process, or in this one. Calls run one at a time, in the order in which they
    were made, unless it was spawned with more `concurrency` or with `streams`."""

    name: str

    @property
    def spawn_seconds(self) -> float:
        """How long `spawn` waited for the constructor: 0 where that runs in another process."""

    def ready(self) -> Future:
        """Return a future that is None once the constructor has returned. Calls made before that wait for it."""

    def place(self) -> Place:
        """Return where it runs, once its process is up."""

    def call(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> Future:
        """Start `method(*args)`; loops use `remote_call`, so that mypy checks the arguments. A reference given as an
        argument arrives as the object; inside another argument it stays a reference, for `ObjectStore.fetch`. `purpose`
        names the call in errors."""

    def stream(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> Stream:
        """Start the generator `method(*args)`; callers use `remote_stream`."""


P = ParamSpec("P")


def remote_call(worker: Any, method: Callable[Concatenate[Any, P], Any], **how: Any) -> Callable[P, Future]:
    """Return a function that starts `method`, of the worker's class, there: `remote_call(worker, Engine.prepare)(3)`.

    It takes the method's arguments, by position. `worker`: a Worker, or what stands in front of one. `how`: timeout_s
    and `purpose`, see `Worker.call`."""
    return partial(worker.call, method.__name__, **how)


def remote_stream(worker: Any, method: Callable[Concatenate[Any, P], Any], **how: Any) -> Callable[P, Stream]:
    """Return a function that starts `method`, a generator of the worker's class, there; otherwise as `remote_call`."""
    return partial(worker.stream, method.__name__, **how)


class ObjectStore(Protocol):
    """The cluster's store, for workers: small and picklable, so it can be a constructor argument.

    An object that a worker puts is lost with that worker; one that it returns, or yields as a Parcel, is not.
    """

    def put(self, obj: Any) -> Ref:
        """Store an object. Not allowed inside a stream: yield a Parcel there."""

    def fetch(self, ref: Ref) -> Any: ...

    def fetch_many(self, refs: Sequence[Ref]) -> list[Any]: ...


T = TypeVar("T", bound=Future | Stream)


@dataclass(frozen=True)
class SpawnOptions:
    """Resources and settings of a worker. `env`: variables of its process, set before anything is imported there.
    `concurrency`: maximum number of calls that run at the same time, in threads. `streams`: maximum number of streams
    that run in addition to the calls, in threads of their own; further streams queue. 0: streams count as calls."""

    cpus: float = 1.0
    gpus: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    concurrency: int = 1
    streams: int = 0


@dataclass(frozen=True)
class SpawnOrder:
    """A group of workers to start, as `Cluster.spawn_group` takes it. `beside`: for each rank the workers on whose node
    it runs; none: on as few nodes as possible, or equally many ranks on each of `nodes` nodes."""

    name: str
    cls: Callable[..., Any]
    args_per_rank: Sequence[Sequence[Any]]
    options: SpawnOptions
    nodes: int
    beside: Sequence[Sequence[Worker]]


def _hears_nothing() -> None:
    pass


class Cluster(Protocol):
    """Spawns workers and moves objects between them. `with cluster:` shuts it down at the end."""

    store: ObjectStore
    clock: Clock
    """The time of everything on this side."""
    call_timeout_s: float
    """Deadline of calls that give none, in seconds."""
    address: str
    """Address of this process, on the interface through which the cluster's nodes reach each other."""
    watch: Callable[[], None] = staticmethod(_hears_nothing)
    """Called several times a second in every wait for a worker; what it raises ends the wait. A run sets it to hear
    requests to stop. Waits of several threads may call it at a time."""

    @contextmanager
    def uninterrupted(self, grace_s: float) -> Iterator[None]:
        """Let `watch` end a wait inside the block only `grace_s` seconds after it first asked for it: what is done
        there is better finished than left half done, unless somebody hangs."""
        watch, heard_at = self.watch, list[float]()

        def watch_later() -> None:
            try:
                watch()
            except Exception:
                heard_at.append(self.clock.now())
                if heard_at[-1] - heard_at[0] >= grace_s:
                    raise

        self.watch = watch_later
        try:
            yield
        finally:
            self.watch = watch

    def spawn(
        self, name: str, cls: Callable[..., Any], *args: Any, colocate_with: Sequence[Worker] = (), **options: Any
    ) -> Worker:
        """Start a worker constructed by `cls(*args)` and return at once: `ready()` waits for it.

        `options`: fields of SpawnOptions. `colocate_with`: workers on whose node it runs, with their accelerators
        visible. Raises NotEnoughResources if the whole cluster is too small, NodeLost if it is since a node of it is
        gone.
        """
        return self.start(name, cls, args, SpawnOptions(**options), colocate_with)

    def spawn_group(
        self,
        name: str,
        cls: Callable[..., Any],
        args_per_rank: Sequence[Sequence[Any]],
        *,
        nodes: int = 1,
        colocate_with: Sequence[Sequence[Worker]] = (),
        **options: Any,
    ) -> Sequence[Worker]:
        """Start `name-0`, `name-1`, ... constructed by `cls(Rendezvous, *args_per_rank[rank])`, and return them by rank
        as soon as each has its place: on as few nodes as possible, or equally many on each of `nodes` nodes, with
        consecutive ranks on a node. `options`: fields of SpawnOptions, for each rank. `colocate_with`: the workers on
        whose node each rank runs; overrides `nodes`. `cls` may be a function."""
        return self.start_group(SpawnOrder(name, cls, args_per_rank, SpawnOptions(**options), nodes, colocate_with))

    def start(
        self, name: str, cls: Callable[..., Any], args: Sequence[Any], options: SpawnOptions, beside: Sequence[Worker]
    ) -> Worker:
        """Do what `spawn` says. `beside`: its `colocate_with`."""

    def start_group(self, order: SpawnOrder) -> Sequence[Worker]:
        """Do what `spawn_group` says."""

    def ready(
        self,
        things: Sequence[T],
        timeout_s: float,
        purpose: str,
        watch: Callable[[], None] = lambda: None,
        *,
        patient: bool = False,
    ) -> Sequence[T]:
        """Wait until one of `things` has an answer, an item, an end or an error, and return all that have one then.
        `patient`: until all of them have one, if that takes a fraction of a second. `watch` is called several times a
        second meanwhile, in addition to the cluster's; what it raises ends the wait."""
        if not things:
            raise ValueError(f"{purpose}: nothing to wait for")
        return self.wait(things, timeout_s, purpose, watch, patient)

    def wait(
        self, things: Sequence[T], timeout_s: float, purpose: str, watch: Callable[[], None], patient: bool
    ) -> Sequence[T]:
        """Do what `ready` says, for at least one thing."""

    def last_log_line(self, worker: str) -> str:
        """Return the last line that a worker has printed; a text that says so where it cannot be read here."""
        return "its log is not here"

    def stop(self, workers: Sequence[Worker]) -> None:
        """End these workers. Each gets a moment for its method `shutdown`, if it has one."""

    def shutdown(self) -> None:
        """End all workers and everything else that this cluster has started. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
