"""The Ray actor around a worker's object: sets up its process, then passes calls on.

Runs in the worker's process and imports nothing heavy: the environment is set before the worker's own modules are
imported.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from grpo_mcore.base.imports import no_exit
from grpo_mcore.base.processes import free_port
from grpo_mcore.cluster.environment import is_allowed
from grpo_mcore.cluster.inspection import Answering, report_here, worker_key
from grpo_mcore.observe.console.console_stream import UnfailingStream
from grpo_mcore.rollout.workers import Parcel, Place, Rendezvous

in_stream = threading.local()
"""`in_stream.now` is True while this thread runs a worker's generator."""

Asked = tuple[str, list[Any], Mapping[int, tuple[int, int | None]]]
"""A call: the method's name, its arguments, and which of them are objects of the store: place -> (object among those
that were sent with it, entry of the list that it is; None for all of it)."""


INLINE_BYTES = 64 * 1024
"""Contents of parcels of at most this size together travel with their labels; Ray keeps objects of up to 100 KiB with
their owner anyway, and each object of a stream costs the driver time."""

BEHIND = b"behind"
"""Announces an item whose contents are the next object of the stream and whose labels are the one after it."""


@dataclass(frozen=True)
class Sent:
    """An item of a stream as it is sent, pickled. `labels`: labels of its parcels, pickled, since a receiver of one of
    the contents need not read them; without parcels, the item itself. `inline`: the contents, pickled one by one; None
    if there are none, or they came before. `together`: whether it is a list."""

    labels: bytes
    inline: list[bytes] | None
    parcels: bool
    together: bool


def sent(item: Any) -> Iterator[Any]:
    """Yield the objects as which an item of a stream is sent: what it holds, with small contents; or `BEHIND`, large
    contents and then what else it holds. Contents come before labels, so that labels that arrive prove that the
    contents were sent."""
    import ray

    together = isinstance(item, list)
    parcels = item if together else [item] if isinstance(item, Parcel) else []
    if not (parcels or together):
        yield pickle.dumps(Sent(ray.cloudpickle.dumps([item]), None, parcels=False, together=False))
        return
    inline = _inline([parcel.content for parcel in parcels])
    if inline is None:
        yield BEHIND
        yield [parcel.content for parcel in parcels]
    labels = ray.cloudpickle.dumps([parcel.label for parcel in parcels])
    yield pickle.dumps(Sent(labels, inline, parcels=True, together=together))


def _inline(contents: list[Any]) -> list[bytes] | None:
    """Return the contents, pickled one by one; None if they are too large."""
    import ray

    pickled, size = [], 0
    for content in contents:
        pickled.append(ray.cloudpickle.dumps(content))
        size += len(pickled[-1])
        if size > INLINE_BYTES:
            return None
    return pickled


def entry(whole: Any, index: int) -> Any:
    """Return the content of one of the parcels that came together: `whole` is what was sent, or their contents."""
    return pickle.loads(pickle.loads(whole).inline[index]) if isinstance(whole, bytes) else whole[index]


class RemoteFailure(Exception):
    """Carries a worker's exception to the driver: as text, and pickled if it can be."""

    def __init__(self, cause: str, trace: str, pickled: bytes | None) -> None:
        super().__init__(cause, trace, pickled)
        self.cause, self.trace, self.pickled = cause, trace, pickled

    @classmethod
    def of(cls, error: Exception) -> RemoteFailure:
        """Describe `error`, without its first frame, which is this file's."""
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        trace = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        pickled: bytes | None
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # many exceptions fail only here
        except Exception:
            pickled = None
        return cls(f"{type(error).__name__}: {error}", trace, pickled)

    def original(self) -> Exception | None:
        if self.pickled is None:
            return None
        try:
            return pickle.loads(self.pickled)
        except Exception:  # its class is not importable here; the text says all
            return None


def search_last(folder: str) -> None:
    """Let this process look for modules in `folder` last, as the driver does (imports.py), unless PYTHONPATH names it.
    Ray searches the driver's working directory first: a datasets.py of the user's would be imported by transformers."""
    if folder in sys.path and folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        sys.path[:] = [*(path for path in sys.path if path != folder), folder]


class WorkerActor:
    """Is created in a fresh process; `build` then constructs the worker's object."""

    def __init__(
        self,
        name: str,
        log: str,
        extra_allowed: Sequence[str],
        env: Mapping[str, str],
        gpus: float,
        umask: int,
    ) -> None:
        """`umask`: the driver's, in place of Ray's: what a worker writes for the user has the user's permissions."""
        os.umask(umask)
        self._name, self._log = name, log
        self._target: Any = None
        self._failure: str | None = None
        self._built = threading.Event()
        _set_environment(extra_allowed, env, gpus)
        search_last(os.getcwd())
        # For inspections, where no thread can answer. Before it prints to its log, by which it is known as a worker.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        _print_to(log)
        package = logging.getLogger("grpo_mcore")  # information too: the driver shows the last line of a late worker
        package.addHandler(logging.StreamHandler())
        package.setLevel(logging.INFO)
        package.propagate = False
        faulthandler.enable()
        self._answering = Answering(worker_key(log, os.getpid()), report_here)
        gc.disable()  # until the object is built: garbage collection takes a fifth of the time of imports

    def __repr__(self) -> str:
        return self._name

    def place(self) -> Place:
        import ray

        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Place(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            gpus=tuple(visible.split(",")) if visible else (),
            log=self._log,
        )

    def meeting_point(self) -> tuple[str, int]:
        """Return this node's address and a free port on it."""
        import ray

        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def build(self, rank: tuple[int, int, int] | None, cls: Callable[..., Any], *args: Any) -> None:
        """Construct the worker's object. A failure is raised here, and again by every call.

        `rank`: (rank, world size, local rank) in a group, whose first argument is then the `meeting_point`.
        """
        if rank is not None:
            args = (Rendezvous(*rank, *args[0]), *args[1:])
        try:
            with no_exit("it"):
                self._target = cls(*args)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise RemoteFailure.of(error) from None
        finally:
            gc.collect()
            gc.freeze()  # modules and weights stay, so later collections skip them
            gc.enable()
            self._built.set()

    def call(self, request: Asked, *wholes: Any) -> Any:
        """Call a method. `wholes`: the objects that it needs. The request is one argument, since each argument costs
        the caller time."""
        target = self._wait_for_target()
        method, args, references = request
        for position, (number, index) in references.items():
            args[position] = wholes[number] if index is None else entry(wholes[number], index)
        try:
            with no_exit("it"):
                return getattr(target, method)(*args)
        except Exception as error:
            raise RemoteFailure.of(error) from None

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """Send each item as `sent` says."""
        target = self._wait_for_target()
        try:
            in_stream.now = True
            for item in getattr(target, method)(*args):
                yield from sent(item)
        except Exception as error:
            raise RemoteFailure.of(error) from None
        finally:
            in_stream.now = False

    def close(self) -> None:
        """Call the object's `shutdown`, if it has one."""
        if self._target is not None and hasattr(self._target, "shutdown"):
            self._target.shutdown()

    def _wait_for_target(self) -> Any:
        self._built.wait()  # a concurrent call may overtake `build`, which the driver's deadline guards
        if self._failure is not None:
            cause = f"its constructor failed before: {self._failure}"
            raise RemoteFailure(cause, "", None)
        return self._target


def _set_environment(extra_allowed: Sequence[str], env: Mapping[str, str], gpus: float) -> None:
    import ray

    for key in list(os.environ):
        if key not in env and not is_allowed(key, extra_allowed):
            del os.environ[key]
    # Ray itself sets them, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is there: all ranks would take the first.
    gpu_ids = ray.get_runtime_context().get_accelerator_ids()["GPU"] if gpus else []
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    os.environ.update(env)


def _print_to(log: str) -> None:
    """Redirect everything that this process and its children print to the file `log`. A full disk there fails no call
    in which something is printed."""
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", (UnfailingStream(sys.stdout), UnfailingStream(sys.stderr)))
