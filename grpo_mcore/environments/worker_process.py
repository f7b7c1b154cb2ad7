"""Our end of the worker processes: how they are started, limited, ended and collected.

They are programs of their own, not multiprocessing children: those would import the caller's main module again, which
is Ray's worker or a user's script.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from grpo_mcore.environments.pool_worker import ANSWER, COLLECT, FORK, LEARN, REQUEST
from grpo_mcore.environments.registry import EnvironmentConfigError

# What Python needs of the environment. A model wrote what workers read: no secrets near it.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ANSWER_S = 30.0  # a template answers within milliseconds
_TRANSFER_S = 5.0  # a worker that is told something is waiting for it
_ATTEMPTS = 3
_LESSONS, _LONGEST_LESSON = 100, 16 * 2**10  # jobs that a template does again, and bytes of one
_LARGEST = 64 * 2**20  # bytes of a result


class WorkerStartError(RuntimeError):
    """Worker processes cannot be started or do not come up: the machine is overloaded or out of memory or processes."""


@dataclass(frozen=True)
class Work:
    """What workers do: `maker`(*`arguments`) is the function, where `maker` is an import path. `what`: for messages.
    `hard_s`: seconds after which a job ends even without us. `memory_gb`: of a worker, in GiB; 0: no limit."""

    what: str
    maker: str
    arguments: tuple[Any, ...]
    hard_s: float
    memory_gb: float = 0.0
    start_s: float = 120.0  # it imports its libraries before it is ready; on a busy machine that takes a while
    threads: int = 1  # of the numerical libraries


class Times(NamedTuple):
    """Seconds that a process ran, and that it was ready to run and had no processor."""

    ran_s: float
    waited_s: float


class WorkerProcess(ABC):
    """One process and our end of the socket to it."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self.connection = pid, connection
        self.orphaned = False
        """After `collect`: it ended because the process that had forked it did."""
        self._schedstat, self._stat = _open(f"/proc/{pid}/schedstat"), _open(f"/proc/{pid}/stat")

    def tell(self, job: Sequence[Any]) -> None:
        """Raises OSError where the process is gone."""
        self.connection.send(job)

    def hear(self) -> dict[str, Any] | None:
        """Its next message; None: there is none any more."""
        try:
            return json.loads(self.connection.recv_bytes(_LARGEST))
        except (OSError, EOFError, ValueError):
            return None

    def pause(self) -> None:
        """It does not run until `resume`; whoever may end it may do this."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def wants_processor(self) -> bool:
        """It runs, or would if it had a processor."""
        return self._state() == "R"

    def times(self) -> Times:
        """Of its whole life; zeros where the kernel does not count them."""
        if self._schedstat < 0:
            return Times(0.0, 0.0)
        try:
            ran, waited, _ = os.pread(self._schedstat, 100, 0).split()
        except (OSError, ValueError):  # it is dead
            return Times(0.0, 0.0)
        return Times(int(ran) / 1e9, int(waited) / 1e9)

    def own_s(self, wall_s: float, before: Times) -> float:
        """Seconds of the last `wall_s` in which it ran or slept, not those in which it waited for a processor."""
        state, now = self._state(), self.times()  # in this order: the waits of one that sleeps are complete
        if now == Times(0.0, 0.0):
            return wall_s
        if state == "R":  # the kernel adds a wait when it is over; all but what it ran may be one
            return now.ran_s - before.ran_s
        return wall_s - (now.waited_s - before.waited_s)

    def _state(self) -> str:
        if self._stat < 0:
            return "?"
        try:
            return os.pread(self._stat, 1000, 0).rpartition(b")")[2].split()[0].decode()
        except (OSError, IndexError):
            return "?"

    def kill(self) -> None:
        """Its process id is its own until `collect`."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @abstractmethod
    def exit_code(self) -> int:
        """Collects the process, which is dead or dying: its exit code, or the signal that ended it below 0."""

    def collect(self) -> str:
        """How it ended, in words. To be called once, and last."""
        self.connection.close()
        for file in (self._schedstat, self._stat):
            if file >= 0:
                os.close(file)
        code = self.exit_code()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _open(path: str) -> int:
    """A descriptor; -1 where there is no such file, as on another kernel."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


class Launcher(ABC):
    """Starts workers. `launch` and `close` are called from one thread."""

    def __init__(self, work: Work) -> None:
        self.work = work

    @abstractmethod
    def launch(self) -> WorkerProcess:
        """A worker, whose first message is {"ready": True}, or {"ready": False, "why"}. Raises WorkerStartError."""

    def teach(self, job: Sequence[Any]) -> None:  # noqa: B027 - only a template learns
        """A job that was done well: workers that are started later need not find out what it takes."""

    def close(self) -> None:  # noqa: B027 - only a template is to be ended
        """Ends what is no worker."""

    def _program(self, entry: str, descriptor: int) -> subprocess.Popen[bytes]:
        work = self.work
        command = (
            f"import sys; sys.path[:] = {sys.path!r}; from grpo_mcore.environments import pool_worker; "
            f"pool_worker.{entry}({descriptor}, {work.maker!r}, {work.arguments!r}, {work.hard_s!r}, "
            f"{work.memory_gb!r})"
        )
        return subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            env=dict.fromkeys(_THREADS, str(work.threads))
            | {name: os.environ[name] for name in _INHERITED if name in os.environ},
            start_new_session=True,  # Ctrl-C at the terminal is for the driver
        )


class Programs(Launcher):
    """Every worker a program that loads the function itself."""

    def launch(self) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            program = self._program("run_worker", theirs.fileno())
        return _Program(program, _connection(ours))


class Forks(Launcher):
    """Workers forked from a template, which loads the function once. A template that is lost is replaced.

    The constructor waits for it. Raises EnvironmentConfigError where the function cannot be loaded.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._template = self._start_template()

    def launch(self) -> WorkerProcess:
        problem: object = None
        for attempt in range(_ATTEMPTS):
            try:
                ours, theirs = socket.socketpair()
                with theirs:
                    pid = self._template.fork(theirs.fileno())
                return _Fork(pid, _connection(ours), self._template)
            except OSError as error:
                problem = error
                time.sleep(0.1 * 4**attempt)
                if self._template.lost():
                    self._replace_template()
        raise WorkerStartError(f"{self.work.what}: no worker process in {_ATTEMPTS} attempts: {problem}")

    def teach(self, job: Sequence[Any]) -> None:
        self._template.teach(job)

    def close(self) -> None:
        self._template.close()

    def _replace_template(self) -> None:
        self.close()
        try:
            self._template = self._start_template()
        except EnvironmentConfigError as error:  # it loaded before: nothing is wrong with the recipe
            raise WorkerStartError(str(error)) from error

    def _start_template(self) -> _Template:
        problem = ""
        for _ in range(_ATTEMPTS):
            ours, theirs = socket.socketpair()
            with theirs:
                template = _Template(self._program("run_template", theirs.fileno()), ours)
            try:
                problem = template.wait_until_ready(self.work)
            except BaseException:
                template.close()
                raise
            if not problem:
                return template
            template.close()
        raise WorkerStartError(
            f"{self.work.what}: {problem}, {_ATTEMPTS} times in a row; the machine may be out of memory or overloaded"
        )


class _Program(WorkerProcess):
    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        super().__init__(process.pid, connection)
        self._process = process

    def exit_code(self) -> int:
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class _Fork(WorkerProcess):
    def __init__(self, pid: int, connection: Connection, template: _Template) -> None:
        super().__init__(pid, connection)
        self._template = template

    def exit_code(self) -> int:
        self.kill()  # does nothing to one that is dead, and ends one that has only closed its connection
        try:
            return self._template.collect(self.pid)
        except OSError:  # its template is gone, and it with it
            self.orphaned = True
            return -signal.SIGKILL


class _Template:
    """A process with the function loaded, and the socket over which it is asked for workers."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process, self._control = process, control
        self._lessons = 0  # that it may still get

    def wait_until_ready(self, work: Work) -> str:
        """What went wrong that may go right another time; nothing where it is ready."""
        with Connection(os.dup(self._control.fileno())) as words:
            try:
                if not words.poll(work.start_s):
                    return f"its process was not ready after {work.start_s:g} s"
                told = json.loads(words.recv_bytes(_LARGEST))
            except (OSError, EOFError, ValueError):
                return f"its process ended with exit code {self._process.wait()} before it was ready"
        if not told["ready"]:
            raise EnvironmentConfigError(f"{work.what} does not load: {told['why']}")
        self._control.settimeout(_ANSWER_S)
        self._lessons = _LESSONS if told["learns"] else 0
        return ""

    def teach(self, job: Sequence[Any]) -> None:
        """Where it does not listen it is ended, which the next who asks it for something finds out."""
        if self._lessons and len(lesson := pickle.dumps(job)) <= _LONGEST_LESSON:
            self._lessons -= 1
            try:
                self._control.sendall(REQUEST.pack(LEARN, len(lesson)) + lesson)
            except OSError:
                self._process.kill()

    def fork(self, descriptor: int) -> int:
        """The process id of a worker that serves at `descriptor`. Raises OSError."""
        self._control.sendall(REQUEST.pack(FORK, 0))
        socket.send_fds(self._control, [b"."], [descriptor])
        pid = self._answer()
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def collect(self, pid: int) -> int:
        self._control.sendall(REQUEST.pack(COLLECT, pid))
        return self._answer()

    def lost(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Its workers end with it."""
        self._process.kill()
        self._process.wait()
        self._control.close()

    def _answer(self) -> int:
        try:
            answer = self._control.recv(ANSWER.size, socket.MSG_WAITALL)
        except TimeoutError:
            self._process.kill()
            self._process.wait()
            raise
        if len(answer) < ANSWER.size:
            self._process.wait()
            raise OSError(errno.EPIPE, "the template process ended")
        return ANSWER.unpack(answer)[0]


def _connection(ours: socket.socket) -> Connection:
    """With deadlines for single transfers: a process that was stopped must not stop us."""
    seconds = struct.pack("ll", int(_TRANSFER_S), 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    return Connection(ours.detach())
