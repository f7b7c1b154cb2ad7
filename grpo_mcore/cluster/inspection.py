"""Asks the processes of a run for their stacks, and finds the one that the others wait for.

Each worker answers over a socket of its machine, on a thread of its own that its calls do not block. One that does not
answer, because C code holds the interpreter, writes its stacks on SIGUSR1. `odd_ones` compares the answers: a pure
function, for any number of ranks.
"""

import faulthandler
import hashlib
import json
import logging
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_mcore.rollout.workers import Place

ANSWER_S = 2.0
"""Seconds that a worker gets to say what it is doing."""

MACHINERY = r"/ray/|/threading\.py|/concurrent/futures/|/socket\.py|/cluster/inspection\.py"
"""Files of threads that do nothing for the run."""

IN_COLLECTIVE = re.compile(r'File "[^"]*/torch/distributed/[^"]*", line \d+ in (\w+)')

ENDED = "has ended: there is no such process any more"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank has entered in one process group. `group`: description of the group; `name`:
    torch's name of it, equal on all its ranks; `number`: how many the rank has entered there; `kind`: its operation,
    such as all_reduce; `waits`: whether the rank is still in it."""

    group: str
    name: str
    ranks: tuple[int, ...]
    number: int
    kind: str
    waits: bool


@dataclass(frozen=True)
class ProcessReport:
    """The state of one process. `frames`: its stacks, innermost first, as `own_frames` returns them; `sends`: a send or
    receive between two ranks is under way; `state`: why it does not run, such as "has ended"; empty if it runs."""

    frames: str = ""
    collectives: tuple[Collective, ...] = ()
    sends: bool = False
    state: str = ""

    @property
    def waiting(self) -> str | None:
        """Return the collectives that it waits in, in words; None if it waits in none."""
        waits = [f"{c.kind}, number {c.number} of {c.group}" for c in self.collectives if c.waits]
        if waits:
            return " and ".join(waits)
        if self.sends:
            return "a send or receive"
        functions = IN_COLLECTIVE.findall(self.frames)
        return functions[-1] if functions else None


def odd_ones(reports: Mapping[str, ProcessReport]) -> list[str]:
    """Return the processes that others wait for and that wait for nobody; empty where the reports do not tell.

    Processes that do not run come first. Otherwise the numbers of collectives decide: a rank that waits in a group
    waits for the ranks of the group that have entered fewer. Without numbers the stacks decide: of each kind of worker,
    those that are in no collective while others of the kind are. Processes without a report are neither accused nor
    excused.
    """
    if idle := [name for name, report in reports.items() if report.state]:
        return idle
    groups: dict[tuple[str, str, tuple[int, ...]], dict[str, Collective]] = {}
    for name, report in reports.items():
        for last in report.collectives:
            groups.setdefault((_kind(name), last.name, last.ranks), {})[name] = last
    awaited: set[str] = set()
    waiting: set[str] = set()
    all_known = True
    for (kind, _, ranks), entered in groups.items():
        numbers = {name: entered[name].number if name in entered else 0 for name in members(kind, ranks, reports)}
        all_known &= len(numbers) == len(ranks)
        waits = {name for name, last in entered.items() if last.waits}
        furthest = max((numbers[name] for name in waits), default=0)
        awaited |= {name for name, number in numbers.items() if number < furthest}
        waiting |= {name for name in waits if numbers[name] > min(numbers.values())}
    in_code = [name for name, report in reports.items() if report.waiting is None]
    if behind := awaited - waiting:
        # One that waits, though all of its group are there, waits for a message of somebody else, who may be unknown.
        alone = [name for name in in_code if name in behind]
        return alone or [name for name in reports if name in behind and all_known]
    kinds = {_kind(name) for name in reports if name not in in_code}
    return [] if awaited else [name for name in in_code if _kind(name) in kinds]


def members(kind: str, ranks: Iterable[int], reports: Mapping[str, ProcessReport]) -> list[str]:
    """Return the names of the ranks of a group of workers, as `spawn_group` names them, that have a report."""
    return [name for name in (f"{kind}-{rank}" for rank in ranks) if name in reports]


def _kind(worker: str) -> str:
    return worker.rpartition("-")[0]


class Answering:
    """A thread that tells each process of the same user which connects what `answer` returns. `key`: a text that the
    asking process knows too. It does nothing where another process of this machine answers for `key`."""

    def __init__(self, key: str, answer: Callable[[], str]) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(target=self._serve, name="inspection", daemon=True)
        try:
            self._socket.bind(_address(key))
            self._socket.listen()
        except OSError as error:  # not Linux, too
            logger.debug("no inspection of this process: %s", error)
            return
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread.is_alive():  # as long as it waits for a connection, the key is taken
            self._thread.join(ANSWER_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    if _user(connection) == os.getuid():
                        connection.settimeout(ANSWER_S)
                        connection.sendall(self._answer().encode())
                except OSError:  # the asking process has gone
                    pass
                except Exception:
                    logger.exception("an inspection of this process failed")


def ask(key: str, timeout_s: float = ANSWER_S) -> str | None:
    """Return what the process that answers for `key` on this machine says; None if there is none, or it is silent."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        parts = []
        try:
            connection.connect(_address(key))
            while part := connection.recv(65536):
                parts.append(part)
        except OSError:
            return None
    return b"".join(parts).decode() or None


def _address(key: str) -> str:
    """Return the name of the socket: one without a file, which ends with its process, and is of this user."""
    return "\0grpo-mcore-" + hashlib.sha256(f"{os.getuid()} {key}".encode()).hexdigest()[:32]


def _user(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]


def worker_key(log: str, pid: int) -> str:
    """Return the key for which a worker answers: a later worker of its name prints to the same log."""
    return f"{log} {pid}"


def driver_key(log_dir: Path) -> str:
    """Return the key for which the driver of the workers that print to `log_dir` answers."""
    return os.path.realpath(log_dir)


def report_here() -> str:
    """Return the ProcessReport of this process, as JSON."""
    import msgspec  # not among the packages of the environment that submits jobs

    collectives, sends = _collectives()
    return msgspec.json.encode(ProcessReport(own_frames(current_frames()), collectives, sends)).decode()


def current_frames() -> str:
    """Return the stacks of all threads but this one, the oldest thread's first, in faulthandler's form."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    return "\n\n".join(thread for thread in reversed(threads) if not thread.startswith("Current thread"))


def own_frames(dump: str) -> str:
    """Return the part of faulthandler's dump that matters: the threads that are in a call of the worker come first,
    without the frames that called it; those of Python's and Ray's own machinery are left out."""
    called_threads: list[str] = []
    threads: list[str] = []
    for thread in re.split(r"\n\n(?=(?:Current t|T)hread 0x)", dump.strip()):
        frames = [line for line in thread.splitlines() if line.startswith("  File ")]
        called = [index for index, frame in enumerate(frames) if "/grpo_mcore/cluster/ray_actor.py" in frame]
        frames = frames[: called[0]] if called else frames
        if not all(re.search(MACHINERY, frame) for frame in frames):
            (called_threads if called else threads).append("\n".join(frames))
    return "\n  another thread:\n".join([*called_threads, *threads])


def workers_here(log_dir: Path) -> dict[str, Place]:
    """Return the workers of a run that are on this machine, by name: the processes that print to the logs of `log_dir`.
    Used when the driver does not answer."""
    places: dict[str, Place] = {}
    for process in psutil.process_iter():
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
            leads = not os.path.samefile(f"/proc/{process.ppid()}/fd/2", log)  # else a child of a worker
        except (OSError, psutil.Error):  # another user's, or it has ended
            continue
        if leads and log.suffix == ".log" and log.parent == log_dir.resolve():
            places[log.stem] = Place("", "127.0.0.1", process.pid, (), str(log))
    return places


class Collector:
    """An actor on each node that is not the driver's: asks the workers of its node."""

    def reports(self, places: Mapping[str, Place]) -> dict[str, ProcessReport]:
        return reports_here(places)


def reports_here(places: Mapping[str, Place]) -> dict[str, ProcessReport]:
    """Return what workers of this machine are doing, all asked at the same time."""
    import msgspec

    reports = {name: ProcessReport(state=why_not_running(place)) for name, place in places.items()}
    running = {name: place for name, place in places.items() if not reports[name].state}
    with ThreadPoolExecutor(64) as pool:
        answers = pool.map(lambda place: ask(worker_key(place.log, place.pid)), running.values())
        answered = {name: answer for name, answer in zip(running, answers, strict=True) if answer is not None}
    reports |= {name: msgspec.json.decode(answer, type=ProcessReport) for name, answer in answered.items()}
    silent = {name: place for name, place in running.items() if reports[name] == ProcessReport()}
    return reports | {name: ProcessReport(frames) for name, frames in frames_here(silent).items()}


def frames_here(places: Mapping[str, Place]) -> dict[str, str]:
    """Return the stacks of workers of this machine, which they write to their logs on SIGUSR1, all at the same time.
    Workers that have ended or are stopped are left out: the signal would end a stopped worker that goes on and answers
    meanwhile, since its handler reads the frames of running threads."""
    sizes: dict[str, int] = {}
    for name, place in places.items():
        if not why_not_running(place):
            sizes[name] = Path(place.log).stat().st_size
            os.kill(place.pid, signal.SIGUSR1)
    deadline, dumps = time.monotonic() + ANSWER_S, dict.fromkeys(sizes, "")
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, dumps = dumps, {name: read_from(Path(places[name].log), size) for name, size in sizes.items()}
        if before == dumps and all(dumps.values()):
            break
    return {name: own_frames(dump) for name, dump in dumps.items()}


def is_worker(place: Place) -> bool:
    """Return whether the process with that pid on this machine prints to that log. No other process is signalled."""
    try:
        return os.path.samefile(f"/proc/{place.pid}/fd/2", place.log)
    except OSError:
        return False


def why_not_running(place: Place) -> str:
    """Return why a worker of this machine does not run; empty if it does."""
    if not is_worker(place):
        return ENDED
    try:
        status = psutil.Process(place.pid).status()
    except psutil.NoSuchProcess:
        return ENDED
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "is stopped (SIGSTOP, or a debugger); SIGCONT lets it go on"
    return "has ended, and its parent has not noticed" if status == psutil.STATUS_ZOMBIE else ""


def _collectives() -> tuple[tuple[Collective, ...], bool]:
    """Return the last collective of each process group of this process, and whether a send or receive is under way:
    from torch's flight recorder, which Gloo and NCCL fill. Nothing where torch is not imported or has no group."""
    torch = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_initialized():
        return (), False
    from torch._C import _distributed_c10d as bindings
    from torch.distributed.distributed_c10d import _world as world

    ranks_of = dict(world.pg_group_ranks)  # another thread may make groups meanwhile
    ranks = {name: tuple(sorted(ranks_of.get(group, ()))) for group, name in list(world.pg_names.items())}
    last: dict[str, Collective] = {}
    sends = False
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        recorded = json.loads(getattr(bindings, dump)()) if hasattr(bindings, dump) else {}
        for entry in recorded.get("entries", ()):
            name, description = entry["process_group"]
            waits = not entry["retired"] and entry["state"] != "completed"
            if entry["is_p2p"]:
                sends |= waits
            elif len(ranks.get(name, ())) > 1:
                kind, number = entry["profiling_name"].rpartition(":")[2], int(entry["collective_seq_id"])
                last[name] = Collective(description, name, ranks[name], number, kind, waits)
    return tuple(last.values()), sends


def read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
