"""The programs behind a WorkerPool. A worker takes jobs and sends results until the other end closes; a template has
the function loaded and forks such workers from itself, in about a millisecond each.

No torch here, and nothing heavy: workers stay small. Jobs come pickled, from us; results go back as JSON, because a
process that has read a model's words is not trusted with more.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any, NoReturn

from grpo_mcore.environments.registry import import_by_path

FORK, COLLECT, LEARN = b"F", b"C", b"L"
"""What a template is asked for, followed by a number: 0, the process id to collect, or the bytes of a job that follows.
It answers the first two with a number: the new process id, or how that one ended; below 0: why not (an errno)."""
REQUEST, ANSWER = struct.Struct("=cq"), struct.Struct("=q")

_PR_SET_PDEATHSIG = 1
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 2**20
_TIDY_AFTER = 5  # searches of the middle generation; Python itself searches all after ten
_SHOWN = 200  # characters of an error in a reason: enough to recognise it
Function = Callable[..., Any]


def shorten(text: str) -> str:
    """On one line, and not much more."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."


def run_template(control_fd: int, maker: str, arguments: Sequence[Any], hard_s: float, memory_gb: float) -> None:
    """Loads the function, says so, then forks a worker for every file descriptor that it is sent. Some jobs that
    workers have done it does again: what the function keeps of them (parsers, caches) is there in later workers."""
    _set_up_signals()
    with socket.socket(fileno=control_fd) as control:
        with Connection(os.dup(control_fd)) as words:
            function = _load(words, maker, arguments)
        if function is None:
            return
        if (threads := threading.active_count()) > 1:
            print(f"{maker}{tuple(arguments)} started {threads - 1} threads; its workers have none", file=sys.stderr)
        _settle()
        while request := control.recv(REQUEST.size, socket.MSG_WAITALL):
            kind, number = REQUEST.unpack(request)
            if kind == LEARN:
                _outcome(function, pickle.loads(control.recv(number, socket.MSG_WAITALL)))
                _settle()
                continue
            if kind == COLLECT:
                _, status = os.waitpid(number, 0)
                control.sendall(ANSWER.pack(os.waitstatus_to_exitcode(status)))
                continue
            _, (descriptor,), _, _ = socket.recv_fds(control, 1, 1)
            try:
                pid = os.fork()
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                control.close()
                _be_worker(descriptor, function, hard_s, memory_gb)
            os.close(descriptor)
            control.sendall(ANSWER.pack(pid))


def _settle() -> None:
    """Workers then leave the pages of what there is now shared."""
    gc.collect()
    gc.freeze()
    with open("/proc/self/maps") as maps:
        for region in [line for line in maps if " rw-p 00000000 00:00 0 " in line]:
            first, end = (int(address, 16) for address in region.split()[0].split("-"))
            hold_in_huge_pages(first, end)


def hold_in_huge_pages(first: int, end: int) -> None:
    """The bytes of this process from `first` to `end`. A fork then copies one entry of the page tables in place of 512,
    and its end drops one: a tenth of what a worker costs. A kernel that cannot do it (before Linux 6.1) refuses."""
    first, end = -(-first // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
    if first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)


def _be_worker(descriptor: int, function: Function, hard_s: float, memory_gb: float) -> NoReturn:
    """The life of a forked worker: whatever happens, it does not go on as a second template."""
    with _exiting():
        die_with_parent()
        serve(Connection(descriptor), function, hard_s, memory_gb)
    raise AssertionError("it has exited")


@contextlib.contextmanager
def _exiting() -> Iterator[None]:
    """Ends the process. Its connection closes by that and not before, so that who sees it closed finds how it ended."""
    code = 1
    try:
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_worker(connection_fd: int, maker: str, arguments: Sequence[Any], hard_s: float, memory_gb: float) -> None:
    """A worker that is a program of its own: for functions that cannot be forked."""
    _set_up_signals()
    with _exiting():
        die_with_parent()  # a paused one does not see the connection close
        connection = Connection(connection_fd)
        function = _load(connection, maker, arguments)
        if function is not None:
            serve(connection, function, hard_s, memory_gb, tell=False)


def serve(connection: Connection, function: Function, hard_s: float, memory_gb: float, tell: bool = True) -> None:
    """Until the parent closes its end, or is gone. The parent ends what takes too long; a kernel timer does after
    `hard_s`, for when there is no parent any more. `memory_gb` 0: no limit."""
    limit = int(memory_gb * 2**30)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, ConnectionError):
        if tell:
            _send(connection, {"ready": True})
        last = False
        while not last:
            job = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, hard_s)
            outcome, ran_out = _outcome(function, job)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            last = ran_out and _data_bytes() > limit / 2  # else it has given back what it took
            _send(connection, outcome | {"last": last})
            _tidy()


def _tidy() -> None:
    """Between jobs, so that Python does not in the middle of one: a search for garbage in all that a worker has come to
    keep takes 15 to 30 ms of whichever job is at hand. What is left is what the function keeps, and is not searched
    again."""
    if gc.get_count()[2] >= _TIDY_AFTER:
        gc.collect()
        gc.freeze()


def _call(function: Function, job: Sequence[Any]) -> Any:
    return function(*job)


_roomy_call = FunctionType(_call.__code__.replace(co_stacksize=40_000), globals())
"""`_call` in a frame of 320 kB. CPython (3.11) keeps frames in pieces of 16 kB: where a loop deep in a parser calls
over the end of one, it maps and unmaps the next at every turn, which was a third of the time of math-verify. A frame
that does not fit gets a piece of the next power of two, 512 kB, and those of its calls find room there."""


def _outcome(function: Function, job: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """{"value"} or {"failed": why}, and whether memory ran out."""
    try:
        value = _roomy_call(function, job)
        json.dumps(value)
        return {"value": value}, False
    except Exception as error:
        return {"failed": f"crashed: {_described(error)}"}, isinstance(error, MemoryError)


def _data_bytes() -> float:
    """What the limit of memory counts."""
    try:
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[5]) * resource.getpagesize()
    except MemoryError:
        return math.inf


def _described(error: BaseException) -> str:
    return shorten(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _load(connection: Connection, maker: str, arguments: Sequence[Any]) -> Function | None:
    """The function that `maker`, an import path, makes of `arguments`. Tells the parent."""
    try:
        function: Function = import_by_path(maker, what="function")(*arguments)
    except Exception as error:
        _send(connection, {"ready": False, "why": f"{type(error).__name__}: {error}"})
        return None
    _send(connection, {"ready": True, "learns": getattr(function, "learns", False)})
    return function


def die_with_parent() -> None:
    """This process is killed when the thread that forked it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _set_up_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # acts inside long C calls too, as no Python handler does
    logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot read
