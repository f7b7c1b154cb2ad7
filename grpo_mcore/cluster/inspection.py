"""Asks the processes of a run for their stacks, and finds the one that the others wait for.

Each worker answers over a socket of its machine, on a thread of its own that its calls do not block. One that does not
answer, because C code holds the interpreter, writes its stacks on SIGUSR1. py-spy, where it is installed and allowed,
tells what a worker's children do. `odd_ones` compares the answers: a pure function, for any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from grpo_mcore.rollout.workers import Place

ANSWER_S = 2.0
"""Seconds that a worker gets to say what it is doing."""

CHILDREN, SPY_S = 16, 5.0
"""Maximum children of a worker that py-spy looks at, and its seconds for each."""

MACHINERY = r"/ray/|/threading\.py|/concurrent/futures/|/socket\.py|/cluster/inspection\.py"
"""Files of threads that do nothing for the run."""

IN_COLLECTIVE = re.compile(r'File "[^"]*/torch/distributed/[^"]*", line \d+ in (\w+)')

logger = logging.getLogger(__name__)

REBIND_S = 1.0
"""Seconds between two attempts to listen where the worker before this one, of the same name, is still ending."""


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank has entered in one process group. `group`: what the group is for; `name`: torch's
    name of it, equal on all its ranks; `number`: how many it has entered there; `waits`: it has not come back."""

    group: str
    name: str
    ranks: tuple[int, ...]
    number: int
    what: str
    waits: bool


@dataclass(frozen=True)
class ProcessReport:
    """The state of one process. `frames`: its stacks, innermost first, as `own_frames` returns them; `sends`: a send or
    receive between two ranks is under way; `state`: empty if it runs, else why it does not, such as "has ended"."""

    frames: str = ""
    collectives: tuple[Collective, ...] = ()
    sends: bool = False
    children: str = ""
    state: str = ""

    @property
    def waiting(self) -> str | None:
        """Return the collectives that it waits in, in words; None if it waits in none."""
        told = [f"{c.what}, number {c.number} of {c.group}" for c in self.collectives if c.waits]
        if told:
            return " and ".join(told)
        if self.sends:
            return "a send or receive"
        functions = IN_COLLECTIVE.findall(self.frames)
        return functions[-1] if functions else None


def odd_ones(reports: Mapping[str, ProcessReport]) -> list[str]:
    """Return the processes that others wait for and that wait for nobody; empty where the reports do not tell.

    First those that do not run. Then, by the numbers of their collectives: a rank that waits in a group waits for those
    of the group who have entered fewer. At last, by their stacks: of a kind of worker, those that are in no collective
    while others of the kind are. Processes without a report are neither accused nor excused.
    """
    if idle := [name for name, report in reports.items() if report.state]:
        return idle
    groups: dict[tuple[str, str, tuple[int, ...]], dict[str, Collective]] = {}
    for name, report in reports.items():
        for one in report.collectives:
            groups.setdefault((_kind(name), one.name, one.ranks), {})[name] = one
    awaited: set[str] = set()
    waiting: set[str] = set()
    all_known = True
    for (kind, _, ranks), entered in groups.items():
        numbers = {name: entered[name].number if name in entered else 0 for name in members(kind, ranks, reports)}
        all_known &= len(numbers) == len(ranks)
        waits = {name for name, one in entered.items() if one.waits}
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
    """A thread that tells each process of the same user which connects what `answer` returns. `key`: a path that
    whoever asks knows too, such as the worker's log."""

    def __init__(self, key: str | Path, answer: Callable[[], str]) -> None:
        self._key, self._answer = key, answer
        self._ended = threading.Event()
        self._socket: socket.socket | None = None
        if sys.platform == "linux":  # elsewhere there are no sockets without a file
            threading.Thread(target=self._serve, name="inspection", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            while not self._ended.is_set():
                try:
                    listening.bind(_address(self._key))
                    break
                except OSError:
                    self._ended.wait(REBIND_S)
            else:
                return
            listening.listen()
            self._socket = listening
            while not self._ended.is_set():
                try:
                    connection, _ = listening.accept()
                except OSError:  # closed
                    return
                with connection:
                    try:
                        if _user(connection) == os.getuid():
                            connection.settimeout(ANSWER_S)
                            connection.sendall(self._answer().encode())
                    except OSError:  # whoever asked has gone
                        pass
                    except Exception:
                        logger.exception("an inspection of this process failed")


def ask(key: str | Path, timeout_s: float = ANSWER_S) -> str | None:
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


def report_here() -> str:
    """Return the Report of this process, as JSON."""
    collectives, sends = _collectives()
    return json.dumps(asdict(ProcessReport(own_frames(current_frames()), collectives, sends)))


def current_frames() -> str:
    """Return the stacks of all threads but this one, the main thread's first, in faulthandler's form."""
    blocks = []
    main = threading.main_thread().ident
    for thread, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if thread != threading.get_ident():
            lines = [f"Thread 0x{thread:016x} (most recent call first):"]
            for at, line in traceback.walk_stack(frame):
                lines.append(f'  File "{at.f_code.co_filename}", line {line} in {at.f_code.co_name}')
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def workers_here(log_dir: Path) -> dict[str, Place]:
    """Return the workers of a run that are on this machine, by name: the processes that print to the logs of `log_dir`.
    For when the driver does not answer."""
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
    """Return what workers of this machine are doing, all asked at a time."""
    reports = {name: ProcessReport(state=state) for name, place in places.items() if (state := _state(place))}
    rest = {name: place for name, place in places.items() if name not in reports}
    if not rest:
        return reports
    with ThreadPoolExecutor(min(len(rest), 64)) as pool:
        answers = dict(zip(rest, pool.map(lambda place: ask(place.log), rest.values()), strict=True))
        children = dict(zip(rest, pool.map(_children, rest.values()), strict=True))
    silent = frames_here({name: place for name, place in rest.items() if answers[name] is None})
    for name in rest:
        answer = answers[name]
        if answer is not None:
            reports[name] = _read(answer, children[name])
        else:
            frames = silent[name]
            state = _state(rest[name]) if frames is None else ""
            reports[name] = ProcessReport(frames or "", children=children[name], state=state)
    return reports


def frames_here(places: Mapping[str, Place]) -> dict[str, str | None]:
    """Return the stacks of workers of this machine, which they write to their logs on SIGUSR1, all at a time. None: its
    process has ended, or is stopped: the signal would wait, and end it where it goes on and answers at the same time
    (the handler reads the frames of threads that run)."""
    sizes: dict[str, int] = {}
    for name, place in places.items():
        if not _state(place) and _handles(place.pid, signal.SIGUSR1):
            sizes[name] = Path(place.log).stat().st_size
            os.kill(place.pid, signal.SIGUSR1)
    seen, deadline = dict(sizes), time.monotonic() + ANSWER_S
    unfinished = set(sizes)
    while unfinished and time.monotonic() < deadline:
        time.sleep(0.1)
        for name in list(unfinished):
            before, seen[name] = seen[name], Path(places[name].log).stat().st_size
            if sizes[name] < before == seen[name]:
                unfinished.remove(name)
    return {
        name: own_frames(read_from(Path(place.log), sizes[name])) if name in sizes else None
        for name, place in places.items()
    }


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


def _read(answer: str, children: str) -> ProcessReport:
    values: dict[str, Any] = json.loads(answer)
    entered = tuple(Collective(**one | {"ranks": tuple(one["ranks"])}) for one in values["collectives"])
    return ProcessReport(values["frames"], entered, values["sends"], children)


def is_worker(place: Place) -> bool:
    """Return whether the process with that pid on this machine prints to that log. No other process is signalled."""
    try:
        return os.path.samefile(f"/proc/{place.pid}/fd/2", place.log)
    except OSError:
        return False


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. One without would be ended by it."""
    try:
        caught = re.search(
            r"(?m)^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        )
    except OSError:  # it has ended
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _state(place: Place) -> str:
    """Return why a worker of this machine does not run; empty if it does."""
    if not is_worker(place):
        return "has ended: there is no such process any more"
    try:
        status = psutil.Process(place.pid).status()
    except psutil.NoSuchProcess:
        return "has ended: there is no such process any more"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "is stopped (SIGSTOP, or a debugger); SIGCONT lets it go on"
    return "has ended, and its parent has not noticed" if status == psutil.STATUS_ZOMBIE else ""


def _children(place: Place) -> str:
    """Return what a worker's child processes do, such as the ranks of an engine: from py-spy, else their names."""
    try:
        children = psutil.Process(place.pid).children(recursive=True)[:CHILDREN]
        named = {child.pid: " ".join(child.cmdline())[:60] or child.name() for child in children}
    except psutil.Error:  # it has ended meanwhile
        return ""
    return "\n".join(f"  child process {pid} ({name}):\n{_spied(pid)}" for pid, name in named.items())


def _spied(pid: int) -> str:
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return "    unknown: py-spy is not installed"
    command = [spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SPY_S, check=True)
        threads = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().rpartition("\n")[2]
        return f"    unknown: py-spy: {said or type(error).__name__}"
    return "\n".join(
        f'    File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}'
        for thread in threads[:1]  # its main thread
        for frame in thread["frames"]
    )


def _collectives() -> tuple[tuple[Collective, ...], bool]:
    """Return the last collective of each process group of this process, and whether a send or receive is under way:
    from torch's flight recorder, which Gloo and NCCL fill. Nothing where torch is not imported or has no group."""
    torch, bindings = sys.modules.get("torch.distributed"), sys.modules.get("torch._C._distributed_c10d")
    if torch is None or bindings is None or not torch.is_initialized():
        return (), False
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    members_of = dict(world.pg_group_ranks)  # another thread may make groups meanwhile
    ranks = {name: tuple(sorted(members_of.get(group, ()))) for group, name in list(world.pg_names.items())}
    last: dict[str, Collective] = {}
    sends = False
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        recorded = json.loads(getattr(bindings, dump)()) if hasattr(bindings, dump) else {}
        sends |= _newest(recorded.get("entries", ()), ranks, last)
    return tuple(last.values()), sends


def _newest(entries: Iterable[Mapping[str, Any]], ranks: Mapping[str, Any], last: dict[str, Collective]) -> bool:
    """Put the newest collective of each group into `last`; return whether a send or receive is under way."""
    sends = False
    for entry in entries:
        name, description = entry["process_group"]
        waits = not entry["retired"] and entry["state"] != "completed"
        if entry["is_p2p"]:
            sends |= waits
        elif len(ranks.get(name, ())) > 1:
            what = entry["profiling_name"].rpartition(":")[2]
            number = int(entry["collective_seq_id"])
            last[name] = Collective(description, name, ranks[name], number, what, waits)
    return sends


def _address(key: str | Path) -> str:
    """Return the name of the socket: one without a file, which ends with its process, and is of this user."""
    text = f"{os.getuid()} {os.path.realpath(key)}"
    return "\0grpo-mcore-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _user(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]


def read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
