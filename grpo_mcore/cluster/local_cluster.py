"""A cluster without other processes, so that a debugger steps from the loop into the kernel.

No threads and no deadlines: a call runs when it is made, a stream when its items are asked for.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.base.imports import no_exit
from grpo_mcore.base.processes import free_port
from grpo_mcore.cluster.inspection import Answering, current_frames, driver_key, own_frames
from grpo_mcore.rollout.workers import (
    Cluster,
    ObjectStore,
    Place,
    Ref,
    Rendezvous,
    SpawnOptions,
    SpawnOrder,
    T,
    Worker,
    WorkerFailed,
)


class LocalFuture:
    """A call that has already run."""

    def __init__(self, whom: str, purpose: str, run: Callable[[], Any]) -> None:
        self.whom, self.purpose = whom, purpose
        self._value: Any = None
        self._error: Exception | None = None
        try:
            with no_exit("it"):
                self._value = run()
        except Exception as error:  # raised by result(), as from a remote worker
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise _failed(self.whom, self.purpose, self._error) from self._error
        return self._value


class LocalStream:
    """A generator that runs when its items are asked for."""

    def __init__(self, whom: str, purpose: str, start: Callable[[], Iterator[Any]]) -> None:
        self.whom, self.purpose = whom, purpose
        self._start = start
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            if self._items is None:
                self._items = iter(self._start())
            return next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            raise _failed(self.whom, self.purpose, error) from error


class LocalWorker:
    """An object of this process behind the Worker interface."""

    def __init__(self, name: str, target: Any, spawn_seconds: float = 0.0) -> None:
        self.name = name
        self.target = target
        self.spawn_seconds = spawn_seconds

    def ready(self) -> LocalFuture:
        return LocalFuture(self.name, "its constructor", lambda: None)

    def place(self) -> Place:
        return Place("local", "127.0.0.1", os.getpid(), (), "")

    def call(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> LocalFuture:
        return LocalFuture(self.name, purpose or method, lambda: getattr(self.target, method)(*args))

    def stream(
        self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None
    ) -> LocalStream:
        return LocalStream(self.name, purpose or method, lambda: getattr(self.target, method)(*args))


class LocalStore:
    """References are the objects themselves."""

    def put(self, obj: Any) -> Ref:
        return obj

    def fetch(self, ref: Ref) -> Any:
        return ref

    def fetch_many(self, refs: Sequence[Ref]) -> list[Any]:
        return list(refs)


class LocalCluster(Cluster):
    """The Cluster interface without other processes. A failing constructor raises from spawn. `log_dir`: folder of the
    run's logs, by which `grpo-mcore inspect` finds this process."""

    def __init__(self, call_timeout_s: float = 3600.0, log_dir: Path | None = None) -> None:
        self.store: ObjectStore = LocalStore()
        self.call_timeout_s = call_timeout_s
        self.clock: Clock = REAL
        self.address = "127.0.0.1"
        self._workers: list[LocalWorker] = []
        self._environment_before: dict[str, str | None] = {}
        self._answering = None if log_dir is None else Answering(driver_key(log_dir), self.inspect)

    def inspect(self) -> str:
        """Return what this process, which is all of the run, is doing."""
        return f"process {os.getpid()}, all of the run, is at, innermost first:\n{own_frames(current_frames())}\n"

    def start(
        self, name: str, cls: Callable[..., Any], args: Sequence[Any], options: SpawnOptions, beside: Sequence[Worker]
    ) -> LocalWorker:
        """Construct a worker. `env` is set in this process until shutdown; values read at import time do not change."""
        for key, value in options.env.items():
            self._environment_before.setdefault(key, os.environ.get(key))
            os.environ[key] = value
        started_at = self.clock.now()
        built = LocalFuture(name, "its constructor", lambda: cls(*args)).result()
        worker = LocalWorker(name, built, self.clock.now() - started_at)
        self._workers.append(worker)
        return worker

    def start_group(self, order: SpawnOrder) -> Sequence[LocalWorker]:
        if len(order.args_per_rank) != 1:
            raise ValueError(
                f"{order.name}: cluster.backend=local runs one rank in this process, not {len(order.args_per_rank)}; "
                "lower the parallel sizes to 1 or set cluster.backend=ray"
            )
        rendezvous = Rendezvous(0, 1, 0, "127.0.0.1", free_port())
        return [self.start(f"{order.name}-0", order.cls, (rendezvous, *order.args_per_rank[0]), order.options, ())]

    def wait(
        self, things: Sequence[T], timeout_s: float, purpose: str, watch: Callable[[], None], patient: bool
    ) -> Sequence[T]:
        watch()
        self.watch()
        return things[:1]  # a call has run already; a stream runs when it is asked, so only one is

    def stop(self, workers: Sequence[Worker]) -> None:
        for worker in reversed(workers):  # a later worker may depend on an earlier one
            assert isinstance(worker, LocalWorker)
            self._workers.remove(worker)
            getattr(worker.target, "shutdown", lambda: None)()

    def shutdown(self) -> None:
        if self._answering is not None:
            self._answering.close()
        self.stop(list(self._workers))
        for key, value in self._environment_before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        self._environment_before.clear()


def _failed(worker: str, purpose: str, error: Exception) -> WorkerFailed:
    """Return the error as a WorkerFailed, without its traceback: the caller raises it from `error`."""
    return WorkerFailed(worker, purpose, f"{type(error).__name__}: {error}")
