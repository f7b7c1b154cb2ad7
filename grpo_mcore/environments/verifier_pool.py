"""Worker processes for verifiers that may hang, crash or exhaust memory: such a job costs its own sample and no other.

    run, several threads -- jobs (pickle) --> host program -- Pebble's ProcessPool --> workers, forked from it
                        <-- results (JSON) --

Pebble ends a job that exceeds its time limit, notices a worker that has died, and starts another one. It runs in a
program of its own, the host, for three reasons: the run's process has threads, and forking it is unsafe; starting
workers in any other way imports the run's `__main__` in each; and workers read what a model wrote, so the run's
environment variables, its secrets among them, and its pickle loader stay out of their reach.

A function may start processes, such as programs that it tests. The kernel makes those of a worker that has ended
children of the host, which ends them.

When the run closes the pool, or dies, the host sees its connection close and stops its workers. When the host dies, the
kernel kills the workers with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import pebble

from grpo_mcore.base import processes
from grpo_mcore.base.processes import HUB_VARIABLES
from grpo_mcore.base.text import shorten
from grpo_mcore.environments.errors import EnvironmentConfigError
from grpo_mcore.environments.registry import import_by_path

# The environment variables that workers see. The rest stays out, secrets (HF_TOKEN, WANDB_API_KEY) above all.
_INHERITED = (*("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TMPDIR"), "CUDA_VISIBLE_DEVICES", *HUB_VARIABLES)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_STOP_S = 10.0  # seconds that a host has to stop its workers
_POLL_S = 0.5  # how often the host checks that its parent and its pool are there
_OUT_OF_MEMORY = 86  # exit code of a worker whose job ran out of memory


class WorkerStartError(RuntimeError):
    """Worker processes do not start: the machine is overloaded, or out of memory or processes."""


@dataclass(frozen=True)
class WorkerSpec:
    """The function that the workers run, and their limits."""

    what: str
    """The function's name in messages."""
    loader: str
    """Import path of a function that returns it."""
    arguments: tuple[Any, ...]
    """The loader's arguments."""
    num_workers: int
    timeout_s: float
    """Limit of one job, from the moment that a worker, which has loaded the function, takes it."""
    memory_gb: float = 0.0
    """Limit of a worker's data (RLIMIT_DATA), in GiB. 0: none."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before workers are forked: a new worker then starts in milliseconds."""
    start_s: float = 120.0
    """Limit of loading the function in a worker, in seconds."""
    threads: int = 1
    """Threads of the numerical libraries in a worker."""


@dataclass(frozen=True)
class Result:
    """The result of one job. `value`: what the function returned, or None with the reason in `failure`. `seconds`: how
    long the function ran; 0 if its process died."""

    value: Any
    failure: str | None
    seconds: float
    timed_out: bool = False
    """Whether the job itself ran out of time. False if its worker was lost."""


class VerifierPool:
    """`spec.num_workers` processes that apply the function to jobs. Several threads may use a pool at a time.

    The constructor waits until a worker is ready. Raises EnvironmentConfigError when the function does not load, and
    WorkerStartError when no worker starts; `run` raises the latter too.
    """

    program: ClassVar[str] = __name__
    """Module of the host program: its function `serve`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._alone = threading.Lock()
        self._closed = False
        self._host = _Host(spec, self.program)

    def run(self, jobs: Sequence[Sequence[Any]]) -> list[Result]:
        """Apply the function to each job's arguments. Return the results in order, when the last is there.

        If the host dies, the next one does the jobs that are left. If it dies as well, they are done one at a time."""
        payloads = [pickle.dumps(tuple(arguments)) for arguments in jobs]
        results = self._ask(payloads)
        if None in results:
            again = iter(self._ask([payload for payload, result in zip(payloads, results, strict=True) if not result]))
            results = [result or next(again) for result in results]
        return [result or self._ask_alone(payload) for payload, result in zip(payloads, results, strict=True)]

    def _ask(self, payloads: Sequence[bytes]) -> list[Result | None]:
        """Return the results; None for a job that its host did not finish."""
        host = self._running_host()
        if host is None:
            return [Result(None, "not done: the verifier pool was closed", 0.0)] * len(payloads)
        return [future.result() for future in [host.submit(payload) for payload in payloads]]

    def _ask_alone(self, payload: bytes) -> Result:
        with self._alone:
            for _ in range(2):  # a new call of another thread may end the host, too
                (result,) = self._ask([payload])
                if result is not None:
                    return result
        return Result(None, "crashed: it ended its process", 0.0)

    def close(self) -> None:
        """End the workers, whatever they are doing. Jobs that are not done fail."""
        with self._lock:
            self._closed = True
            self._host.stop()

    def _running_host(self) -> _Host | None:
        with self._lock:
            if self._closed:
                return None
            if self._host.ended:
                self._host.stop()
                try:
                    self._host = _Host(self.spec, self.program)
                except EnvironmentConfigError as error:  # it loaded before: nothing is wrong with the recipe
                    raise WorkerStartError(str(error)) from error
            return self._host


class _Host:
    """The host program, and our end of the connection to it."""

    def __init__(self, spec: WorkerSpec, program: str) -> None:
        self.ended = False
        self._futures: dict[int, Future[Result | None]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._connection, theirs = multiprocessing.Pipe()
        self._reader = threading.Thread(target=self._read, name="verifier results", daemon=True)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {program} import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={name: os.environ[name] for name in _INHERITED if name in os.environ}
                | dict.fromkeys(_THREAD_VARIABLES, str(spec.threads))
                | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C at the terminal is for the run
            )
        try:
            self._wait_until_ready(spec)
            self._reader.start()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, spec: WorkerSpec) -> None:
        state, problem = "not started", f"their host did not answer within {spec.start_s:g} s"
        try:
            self._connection.send((spec, os.getpid()))
            if self._connection.poll(spec.start_s + _STOP_S):
                state, problem = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            problem = f"their host ended: {processes.describe_exit(self._process.wait())}"
        if state == "not loaded":
            raise EnvironmentConfigError(f"{spec.what} does not load: {problem}")
        if state == "not started":
            raise WorkerStartError(
                f"{spec.what}: the worker processes do not start: {problem}; the machine may be out of memory or "
                "overloaded, or num_workers too large for it"
            )

    def submit(self, payload: bytes) -> Future[Result | None]:
        """Send a job. The future's result is None when the host ends before the job does."""
        future: Future[Result | None] = Future()
        with self._lock:
            if self.ended:
                future.set_result(None)
                return future
            number = next(self._numbers)
            self._futures[number] = future
            with contextlib.suppress(OSError):  # the host has ended: the reader notices
                self._connection.send((number, payload))
        return future

    def stop(self) -> None:
        """End the host and its workers. May be called again."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._reader.is_alive():
            self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        """Set the futures' results until the host ends. A malformed answer ends the host too."""
        with contextlib.suppress(EOFError, OSError, ValueError, TypeError, KeyError):
            while True:
                number, result = json.loads(self._connection.recv_bytes())
                self._futures.pop(number).set_result(Result(**result))
        with self._lock:
            self.ended = True
            for future in self._futures.values():
                future.set_result(None)


def serve(descriptor: int) -> None:
    """Run the host program: take jobs from the connection, and answer them with [number, result]."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    connection = Connection(descriptor)
    spec, parent = connection.recv()
    processes.adopt_orphans()
    context, initial = multiprocessing.get_context("fork"), (spec, os.getpid())
    pool = pebble.ProcessPool(spec.num_workers, initializer=_start_worker, initargs=initial, context=context)
    try:
        state = _wait_until_ready(pool, spec)
        connection.send_bytes(json.dumps(state).encode())
        if state[0] == "ready":
            _answer_jobs(connection, pool, spec, parent)
    except (EOFError, OSError):
        pass  # the run has ended
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.alarm(int(_STOP_S))  # the workers die with this process
        connection.close()  # first: the run need not wait for what follows
        pool.stop()
        pool.join()
        while orphans := _orphans():
            _end(orphans)
            time.sleep(processes.POLL_S)


def _wait_until_ready(pool: pebble.ProcessPool, spec: WorkerSpec) -> tuple[str, str]:
    """Return "ready", "not loaded" or "not started", and the problem."""
    for module in spec.preload:
        with contextlib.suppress(Exception, SystemExit):  # if the function needs it, its loader says what is wrong
            importlib.import_module(module)
    deadline = time.monotonic() + spec.start_s
    try:
        job = pool.schedule(_load_problem)
        while pool.active and not job.done() and time.monotonic() < deadline:
            wait([job], _POLL_S)
        if pool.active and not job.done():
            return "not started", f"none is ready after {spec.start_s:g} s"
        problem = job.result(_POLL_S)  # where the pool broke before it saw the job, none comes
        return "not loaded" if problem else "ready", problem
    except (BrokenProcessPool, RuntimeError, OSError) as error:
        return "not started", f"one ended before it was ready ({described(error)})"


def _answer_jobs(connection: Connection, pool: pebble.ProcessPool, spec: WorkerSpec, parent: int) -> None:
    """Answer jobs until the run has ended, or Pebble gives up, as it does when all idle workers were killed; the run
    then starts a new host. Raises EOFError or OSError when the connection closes.

    A job whose worker ended is done again, once: on a loaded machine, Pebble takes the job before for the one that a
    worker died of."""
    sending = threading.Lock()

    def start(number: int, payload: bytes, is_last: bool = False) -> None:
        job = pool.schedule(_work, args=(payload,), timeout=spec.timeout_s)
        job.add_done_callback(functools.partial(answer, number, payload, is_last))

    def answer(number: int, payload: bytes, is_last: bool, job: Future[str]) -> None:
        with contextlib.suppress(BrokenProcessPool, RuntimeError, OSError):  # the host ends, and the run notices
            if isinstance(job.exception(), pebble.ProcessExpired) and not is_last:
                start(number, payload, is_last=True)
                return
            with sending:
                connection.send_bytes(f"[{number}, {_result_of(job, spec)}]".encode())

    next_look, seen_before = 0.0, set[int]()
    while pool.active and os.getppid() == parent:  # a fork of the run may keep the connection open
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _POLL_S
            orphans = _orphans()
            _end(orphans & seen_before)  # only those seen twice: a new worker is a child before it is known as a worker
            seen_before = orphans
        if connection.poll(_POLL_S):
            try:
                start(*connection.recv())
            except RuntimeError:
                return  # Pebble has given up


def _orphans() -> set[int]:
    """Return the processes that jobs have started and their ended workers have left."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as children:
            started = {int(pid) for pid in children.read().split()}
    except OSError:  # not on this system
        return set()
    return started - {worker.pid for worker in multiprocessing.active_children()}


def _end(orphans: set[int]) -> None:
    for pid in orphans:  # they stay children of this process, and keep their numbers, until it has waited for them
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)


def _result_of(future: Future[str], spec: WorkerSpec) -> str:
    """Wait for a job. Return its result as JSON. Raises BrokenProcessPool."""
    try:
        return future.result()
    except BrokenProcessPool:
        raise
    except TimeoutError:
        return result_text(failure=f"timed out after {spec.timeout_s:g} s", seconds=spec.timeout_s, timed_out=True)
    except BaseException as error:
        code = getattr(error, "exitcode", None)
        if code == _OUT_OF_MEMORY:
            return result_text(failure=f"out of memory: more than {spec.memory_gb:g} GiB")
        ended = described(error) if code is None else f"the worker process ended: {processes.describe_exit(code)}"
        return result_text(failure=f"crashed: {ended}")


def result_text(value: Any = None, failure: str | None = None, seconds: float = 0.0, timed_out: bool = False) -> str:
    return json.dumps({"value": value, "failure": failure, "seconds": seconds, "timed_out": timed_out})


# From here on: in a worker.

_function: Callable[..., Any] | None = None
_problem = ""  # why it did not load


def _start_worker(spec: WorkerSpec, host: int) -> None:
    """Load the function. A problem is kept for `_load_problem`: Pebble would only report that the worker died."""
    global _function, _problem
    processes.die_with_parent(host)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Pebble's handler would wait until C code returns to Python
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # math-verify logs each answer that it cannot read
    signal.setitimer(signal.ITIMER_REAL, spec.start_s)  # SIGALRM ends the process
    try:
        _function = import_by_path(spec.loader, what="function")(*spec.arguments)
    except Exception as error:
        _problem = described(error)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    limit_memory(spec.memory_gb)


def limit_memory(memory_gb: float) -> None:
    """Limit this process's data to so many GiB. 0: no limit."""
    if memory_gb:
        limit = int(memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _load_problem() -> str:
    return _problem


def _work(payload: bytes) -> str:
    """Apply the function to a job's pickled arguments. Return the result as JSON."""
    start = time.perf_counter()
    try:
        if _function is None:
            raise RuntimeError(f"the verifier did not load: {_problem}")
        return result_text(_function(*pickle.loads(payload)), seconds=time.perf_counter() - start)
    except BaseException as error:
        if isinstance(error, MemoryError) and resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
            os._exit(_OUT_OF_MEMORY)  # the next job would lack what this process still holds
        return result_text(failure=f"crashed: {described(error)}", seconds=time.perf_counter() - start)


def described(error: BaseException) -> str:
    """Return the type and the beginning of the message of an exception."""
    return shorten(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
