"""Runs programs one after the other inside a sandbox, each in a process of its own, with limits. This is a script that
uses nothing of this package, only Python's standard library.

It is the sandbox's first process, so that all others end with it; programs can neither stop nor read it.

    python worker.py isolated UID   in a sandbox; programs run as this user, 0: as the worker's own
    python worker.py trusted 0      without one: the limits hold, but nothing is hidden

Requests come over the socket at standard input as pairs of frames, as multiprocessing's Connection sends bytes (4 bytes
of length, then JSON): a program with its input and limits, and the test that runs after it. One frame goes back for
each pair. program.py, in the same folder, is what a program's process does.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import selectors
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("program.py")
_found = importlib.util.spec_from_file_location("program", PROGRAM)  # there is no package where this runs
assert _found is not None and _found.loader is not None
program = importlib.util.module_from_spec(_found)
_found.loader.exec_module(program)

RESULT, CHECK, ALL_DESCRIPTORS, prctl = program.RESULT, program.CHECK, program.ALL_DESCRIPTORS, program.prctl
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
FIRST = 10  # the worker's own file descriptors start here
TICK_S = 0.02
STDERR_KEPT = 4096
STRETCH = 5.0  # wall time limits after which a program ends even if it only waited for a processor
MANY_FILES = 1000  # a new sandbox is quicker than removing more
CLOCK = os.sysconf("SC_CLK_TCK")


class Worker:
    """Serves requests that come over the socket at standard input."""

    def __init__(self, isolated: bool, uid: int) -> None:
        self.isolated, self.uid = isolated, uid
        self.socket = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, FIRST)
        nothing = os.open("/dev/null", os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.closerange(3, FIRST)
        os.closerange(self.socket + 1, ALL_DESCRIPTORS)
        self.woken, wake = move_up(os.pipe2(os.O_NONBLOCK))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if not isolated:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def serve(self) -> None:
        """Run programs until the other end closes, or one has left more behind than can be removed."""
        while (job := self.read_frame()) is not None:
            answer = json.dumps(self.run(json.loads(job))).encode()
            answer = struct.pack("!i", len(answer)) + answer
            while answer:
                answer = answer[os.write(self.socket, answer) :]
            clean()

    def read_frame(self) -> bytes | None:
        head = self.read_exactly(4)
        return None if head is None else self.read_exactly(*struct.unpack("!i", head))

    def read_exactly(self, size: int) -> bytes | None:
        parts = []
        while size:
            part = os.read(self.socket, min(size, 2**20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        ours: dict[int, int] = {}
        theirs: dict[int, int] = {}
        stdin = job["stdin"].encode("utf-8", "replace")
        for fd in (0, 1, 2, RESULT, CHECK):
            if fd == 0 and (file := input_file(stdin)) is not None:
                theirs[fd] = file
                continue
            reading, writing = move_up(os.pipe2(0))
            theirs[fd], ours[fd] = (reading, writing) if fd in (0, CHECK) else (writing, reading)
            os.fchmod(theirs[fd], 0o666)  # the program's user may open /dev/stdin anew
        pid = os.fork()
        if pid == 0:
            try:
                program.be_program(job, theirs, self.isolated, self.uid)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        for end in theirs.values():
            os.close(end)
        check = self.read_frame()
        if check is None:
            self.end_all()
            sys.exit()
        return Watch(self, job["limits"], pid, ours).until_end({0: stdin, CHECK: check})

    def processes(self) -> list[int]:
        """Return the programs' processes: all in the sandbox but this one; without a sandbox this one's descendants."""
        if self.isolated:
            try:
                return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
            except OSError:  # a sandbox without /proc
                return []
        pids, new = [], [os.getpid()]
        while new:
            new = [child for parent in new for child in children(parent)]
            pids += new
        return pids

    def end_all(self) -> None:
        """Kill and reap every process of a program."""
        while True:
            if self.isolated and os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # all but the first process of the sandbox
            else:
                for process in self.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            try:
                os.wait()
            except ChildProcessError:
                return


class Watch:
    """Watches a running program: its streams, its use of memory and processors, its end."""

    def __init__(self, worker: Worker, limits: Mapping[str, Any], pid: int, ends: dict[int, int]) -> None:
        self.worker, self.limits, self.pid, self.ends = worker, limits, pid, ends
        self.room = int(limits["output_mb"] * 2**20)
        self.text = {1: bytearray(), 2: bytearray(), RESULT: bytearray()}
        self.used_s = 0.0  # processor time of processes that have ended
        self.status: int | None = None
        self.started = time.monotonic()
        self.selector = selectors.DefaultSelector()

    def until_end(self, inputs: dict[int, bytes]) -> dict[str, Any]:
        self.selector.register(self.worker.woken, selectors.EVENT_READ, None)
        for fd, end in self.ends.items():
            os.set_blocking(end, False)
            left = memoryview(inputs[fd]) if fd in inputs else None
            self.selector.register(end, selectors.EVENT_READ if left is None else selectors.EVENT_WRITE, (fd, left))
        how = self.follow()
        self.worker.end_all()
        if how == "exit" and not self.drain():
            how = "output"
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self.selector.close()
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        # The kernel's limit may have ended the program before this process noticed. SIGKILL: it ignored SIGXCPU.
        over = code == -signal.SIGXCPU or (code == -signal.SIGKILL and self.used_s >= self.limits["cpu_s"])
        how = "cpu" if how == "exit" and over else how
        return {
            "how": how,
            "code": code,
            "stdout": self.text[1].decode("utf-8", "replace"),
            "stderr": self.text[2].decode("utf-8", "replace"),
            "result": self.text[RESULT].decode("utf-8", "replace"),
            "cpu_s": round(self.used_s, 3),
            "wall_s": round(time.monotonic() - self.started, 3),
        }

    def follow(self) -> str:
        """Wait until the program exits or exceeds a limit. Return which of the two happened."""
        next_look = 0.0
        while True:
            for key, _ in self.selector.select(TICK_S):
                if key.data is None:
                    os.read(key.fd, 4096)
                elif not self.transfer(key):
                    return "output"
            self.collect()
            if self.status is not None:
                return "exit"
            now = time.monotonic()
            if self.is_late(now - self.started):
                return "wall"
            if now >= next_look:
                next_look = now + TICK_S
                memory, running_s = self.usage()
                if memory > self.limits["memory_gb"] * 2**30:
                    return "memory"
                if self.used_s + running_s > self.limits["cpu_s"]:
                    return "cpu"

    def is_late(self, wall_s: float) -> bool:
        """Return whether the wall time limit is exceeded. Time spent waiting for a processor does not count, up to five
        times the limit, because a busy machine is not the program's fault."""
        limit = self.limits["wall_s"]
        if wall_s <= limit or wall_s > STRETCH * limit:
            return wall_s > limit
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
            with open(f"/proc/{self.pid}/schedstat", encoding="utf-8") as times:
                ran, waited, _ = (int(number) / 1e9 for number in times.read().split())
        except (OSError, ValueError, IndexError):
            return True
        return (ran if state == "R" else wall_s - waited) > limit  # the kernel counts a wait when it is over

    def transfer(self, key: selectors.SelectorKey) -> bool:
        """Read or write what is possible now. Return False if the program has written too much."""
        fd, left = key.data
        try:
            if left is None:
                part = os.read(key.fd, 2**16)
                over = not part
                self.room -= len(part)
                self.text[fd] += part
                if fd == 2:
                    del self.text[2][:-STDERR_KEPT]
            else:
                if left:
                    left = left[os.write(key.fd, left[: 2**16]) :]
                over = not left
                self.selector.modify(key.fd, selectors.EVENT_WRITE, (fd, left))
        except BlockingIOError:
            return True
        except OSError:  # the program has closed its end
            over = True
        if over:
            self.selector.unregister(key.fd)
            os.close(key.fd)
        return self.room >= 0

    def drain(self) -> bool:
        """Read what was written before the end. Return False if it is too much."""
        deadline = time.monotonic() + 1.0
        while any(key.data is not None and key.data[1] is None for key in self.selector.get_map().values()):
            for key, event in self.selector.select(0):
                if key.data is not None and event & selectors.EVENT_READ and not self.transfer(key):
                    return False
            if time.monotonic() > deadline:  # without a sandbox a process may be left that holds the pipe
                return True
        return True

    def collect(self) -> None:
        """Reap processes that have ended."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.used_s += used.ru_utime + used.ru_stime
            if pid == self.pid:
                self.status = status

    def usage(self) -> tuple[int, float]:
        """Return the bytes of memory and seconds of processor time of the program's processes, as of now."""
        memory = ticks = 0
        for process in self.worker.processes():
            try:
                with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as status:
                    memory += sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon", "RssShmem")))
                with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stat:
                    fields = stat.read().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
            except (OSError, IndexError, ValueError):  # it has just ended
                continue
        return 1024 * memory, ticks / CLOCK


def input_file(content: bytes) -> int | None:
    """Return a file without a name that a program reads its input from, as on the sites of its contests: programs ask
    for its size, or map it into memory. None if there is no room for it."""
    try:
        with open(".input", "xb", opener=lambda name, flags: os.open(name, flags, 0o444)) as file:
            try:
                file.write(content)
                file.flush()
                reading = os.open(".input", os.O_RDONLY)
            finally:
                os.unlink(".input")
    except OSError:
        return None
    try:
        return fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, FIRST)
    finally:
        os.close(reading)


def move_up(pipe: tuple[int, int]) -> list[int]:
    """Move a pipe above the file descriptors that programs have."""
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST) for end in pipe]
    for end in pipe:
        os.close(end)
    return ends


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as text:
            return [int(child) for child in text.read().split()]
    except OSError:
        return []


def clean() -> None:
    """Empty the scratch folder, or end this worker if a new one is quicker."""
    try:
        for number, entry in enumerate(os.scandir(".")):
            if number > MANY_FILES or entry.is_dir(follow_symlinks=False) and not removed(entry.path):
                sys.exit()
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
    except (OSError, RecursionError):
        sys.exit()


def removed(folder: str) -> bool:
    """Remove a small folder. Return whether it is gone."""
    if sum(len(files) + 1 for _, _, files in os.walk(folder)) > MANY_FILES:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


if __name__ == "__main__":
    Worker(sys.argv[1] == "isolated", int(sys.argv[2])).serve()
