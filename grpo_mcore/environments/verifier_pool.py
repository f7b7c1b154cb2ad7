"""Worker processes for verifiers that may hang, crash or exhaust memory: such a job costs its own sample and no other.

    run, several threads -- jobs (pickle) --> host program -- Pebble's ProcessPool --> workers, forked from a server
                        <-- results (JSON) --                                          that has the verifier imported

Pebble ends a job that exceeds its time limit, notices a worker that has died, and starts another one. It runs in a
program of its own, the host, because workers must not be forked from a process with threads, as the run's are;
because multiprocessing would import the run's `__main__` in each worker; and because workers read what a model wrote,
so the run's environment variables, its secrets among them, and its pickle loader stay out of their reach.

A function may start processes, such as programs that it tests. Those of a worker that has ended become children of the
host, which ends them.

When the run closes the pool, or dies, the host sees its connection close and stops its workers. When the host dies, the
fork server sees that and ends, and the kernel kills the workers with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
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
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import pebble

from grpo_mcore.base import processes
from grpo_mcore.base.hub_variables import HUB_VARIABLES
from grpo_mcore.environments.math.verifiers import shorten
from grpo_mcore.environments.registry import EnvironmentConfigError, import_by_path

# The environment variables that workers see. The rest stays out, secrets (HF_TOKEN, WANDB_API_KEY) above all.
_INHERITED = (
    *("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TMPDIR"),
    "CUDA_VISIBLE_DEVICES",
    *HUB_VARIABLES,
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_STOP_S = 10.0  # seconds that a host has to stop its workers
_POLL_S = 0.5  # how often the host checks that its parent and its pool are there
_TERMINATE_S = 0.3  # from SIGTERM to SIGKILL; Pebble's 3 s would hold up all workers where one is stopped
_OUT_OF_MEMORY = 86  # exit code of a worker whose job ran out of memory
_IMPORTED_IN = os.getpid()  # in a worker: the fork server, which imports this module before it forks


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
    """Limit of one job, from the moment that a worker, which has loaded the function, takes it. Time in which it waits
    for a processor does not count."""
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
    """`value`: what the function returned, or None with the reason in `failure`. `seconds`: of the function; 0 where
    its process died."""

    value: Any
    failure: str | None
    seconds: float
    timed_out: bool = False
    """The job itself ran out of its time; False where its worker was lost."""


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
        self._closed = False
        self._host = _Host(spec, self.program)

    def run(self, jobs: Sequence[Sequence[Any]]) -> list[Result]:
        """Apply the function to each job's arguments. Return the results in order, when the last is there. If the host
        dies, a new one does all these jobs again, once."""
        payloads = [pickle.dumps(tuple(arguments)) for arguments in jobs]
        for _ in range(2):
            results = self._running_host().submit(payloads).result()
            if results is not None:
                return results
            if self._closed:
                return [Result(None, "not done: the verifier pool was closed", 0.0)] * len(payloads)
        return [Result(None, "crashed: its processes were ended", 0.0)] * len(payloads)

    def close(self) -> None:
        """End the workers, whatever they are doing. Jobs that are not done fail."""
        with self._lock:
            self._closed = True
            self._host.stop()

    def _running_host(self) -> _Host:
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
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
        self._futures: dict[int, Future[list[Result] | None]] = {}
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

    def submit(self, payloads: list[bytes]) -> Future[list[Result] | None]:
        """Send jobs. The future's result is None when the host ends before the last job does."""
        future: Future[list[Result] | None] = Future()
        with self._lock:
            if self.ended:
                future.set_result(None)
                return future
            number = next(self._numbers)
            self._futures[number] = future
            with contextlib.suppress(OSError):  # the host has ended: the reader notices
                self._connection.send((number, payloads))
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
                number, results = json.loads(self._connection.recv_bytes())
                self._futures.pop(number).set_result([Result(**result) for result in results])
        with self._lock:
            self.ended = True
            for future in self._futures.values():
                future.set_result(None)


def serve(descriptor: int) -> None:
    """Run the host program: take jobs from the connection, and answer them with [number, results]."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    connection = Connection(descriptor)
    spec, parent = connection.recv()
    pebble.CONSTS.term_timeout = _TERMINATE_S
    processes.shorten_socket_paths()
    processes.adopt_orphans()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *spec.preload])
    pool = pebble.ProcessPool(spec.num_workers, initializer=_start_worker, initargs=(spec,), context=context)
    read_last_messages_first(pool)
    count_no_waits(pool)
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
        while _end_orphans():
            time.sleep(processes.POLL_S)


def read_last_messages_first(pool: pebble.ProcessPool) -> None:
    """Read what workers have sent, then say which job ended one or ran out of time. Pebble 5.2 reads messages in
    another thread: on a loaded machine that still took a worker's last job, whose result had been sent, for the one
    that it died of, and waited for that one until its time was over."""
    manager: Any = pool._pool_manager
    process, expire, time_out = manager.process_next_message, manager.handle_worker_expiration, manager.update_tasks
    reading = threading.Lock()

    def process_next_message(timeout: float) -> None:
        with contextlib.suppress(OSError):  # it is closed, which Pebble notices below
            if not manager.worker_manager.pool_channel.poll(timeout):
                return
        with reading:
            process(0.0)

    def read_all() -> None:
        with reading:
            while manager.worker_manager.pool_channel.poll(0):
                process(0.0)

    def handle_worker_expiration(expiration: tuple[int, int]) -> None:
        read_all()
        expire(expiration)

    def update_tasks() -> None:
        read_all()
        time_out()

    manager.process_next_message, manager.update_tasks = process_next_message, update_tasks
    manager.handle_worker_expiration = handle_worker_expiration


def count_no_waits(pool: pebble.ProcessPool) -> None:
    """Do not count the time for which a job's worker waits for a processor. Where more processes compute than there are
    cores, an innocent job would run out of time, and its reward would depend on what else the machine does. Nor does a
    worker that has died run out of time, before Pebble sees its end."""
    tasks: Any = pool._pool_manager.task_manager
    timeout_tasks = tasks.timeout_tasks
    waited: dict[int, float] = {}  # by task, until now

    def after_its_own_time() -> tuple[Any, ...]:
        nonlocal waited
        before, waited = waited, {}
        for task in tasks.tasks.copy().values():
            if task.started:
                now = processes.seconds_waited_for_processor(task.worker_id)  # 0 once it has ended
                waited[task.id] = max(now, before.get(task.id, now))
                task.timestamp += waited[task.id] - before.get(task.id, now)
        return tuple(task for task in timeout_tasks() if not processes.is_zombie(task.worker_id))

    tasks.timeout_tasks = after_its_own_time


def _wait_until_ready(pool: pebble.ProcessPool, spec: WorkerSpec) -> tuple[str, str]:
    """Return "ready", "not loaded" or "not started", and the problem."""
    deadline = time.monotonic() + spec.start_s
    try:
        answer = pool.schedule(_load_problem)
        while not answer.done() and time.monotonic() < deadline:
            wait([answer], _POLL_S)
            if not pool.active and not answer.done():  # Pebble may give up before it has seen the task
                raise BrokenProcessPool("all workers ended")
        if not answer.done():
            return "not started", f"none is ready after {spec.start_s:g} s"
        problem = answer.result()
        return "not loaded" if problem else "ready", problem
    except (BrokenProcessPool, RuntimeError, OSError) as error:
        for module in spec.preload:  # a fork server that cannot import one ends without a word
            try:
                importlib.import_module(module)
            except Exception as cause:
                return "not loaded", described(cause)
        return "not started", f"one ended before it was ready ({described(error)})"


def _answer_jobs(connection: Connection, pool: pebble.ProcessPool, spec: WorkerSpec, parent: int) -> None:
    """Answer jobs until the run has ended, or Pebble gives up, as it does when all idle workers were killed; the run
    then starts a new host. Raises EOFError or OSError when the connection closes."""
    sending = threading.Lock()

    def answer(number: int, futures: list[Future[str]]) -> None:
        with contextlib.suppress(BrokenProcessPool, OSError):
            results = ", ".join(_result_of(future, spec) for future in futures)
            with sending:
                connection.send_bytes(f"[{number}, [{results}]]".encode())

    next_look = 0.0
    while pool.active and os.getppid() == parent:  # a fork of the run may keep the connection open
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _POLL_S
            _end_orphans()
        if connection.poll(_POLL_S):
            number, payloads = connection.recv()
            try:
                futures = [pool.schedule(_work, args=(payload,), timeout=spec.timeout_s) for payload in payloads]
            except RuntimeError:
                return  # Pebble has given up
            threading.Thread(target=answer, args=(number, futures), daemon=True).start()


def _end_orphans() -> bool:
    """Kill what jobs have started and their ended workers have left. Return whether there was anything."""
    own = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as children:
            orphans = {int(pid) for pid in children.read().split()} - own
    except OSError:  # not on this system
        return False
    for pid in orphans:  # they stay children of this process, and keep their numbers, until it has waited for them
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


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
    """Return a `Result` as JSON."""
    return json.dumps({"value": value, "failure": failure, "seconds": seconds, "timed_out": timed_out})


# From here on: in a worker.

_function: Callable[..., Any] | None = None
_problem = ""  # why it did not load


def _start_worker(spec: WorkerSpec) -> None:
    """Load the function. A problem is kept for `_load_problem`: Pebble would only report that the worker died."""
    global _function, _problem
    processes.die_with_parent(_IMPORTED_IN)
    # The fork server lives until the last copy of this pipe is closed: without ours it ends with the host, and we too.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
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
