"""Runs programs that nobody has read in bubblewrap, with limits; one sandbox for the tests of one program."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, Self

from grpo_mcore.environments.code.sandbox.command import Start, sandboxed, unprotected
from grpo_mcore.environments.code.sandbox.seccomp import filter_program
from grpo_mcore.environments.code.sandbox.worker import STRETCH, program

SandboxKind = Literal["bubblewrap", "none_i_trust_the_code"]
BUBBLEWRAP: Final = "bubblewrap"
TRUST: Final = "none_i_trust_the_code"
_ATTEMPTS = 3
_MARGIN_S = 30.0  # for a busy machine, beyond a program's time limit
_SHOWN = 200  # characters of an error in a reason
_HINTS = (
    "- in a container: its seccomp profile must allow unshare and mount, or give it CAP_SYS_ADMIN (docker: "
    "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined)\n"
    "- as an ordinary user: user namespaces must be allowed: sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu)"
)


class SandboxError(RuntimeError):
    """There is no sandbox, or it broke. This says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program's run, for all its processes together: seconds of processor time and of wall time, GiB of
    memory, processes and threads, MiB of output and of files."""

    cpu_s: float = 5.0
    wall_s: float = 20.0
    memory_gb: float = 0.5
    processes: int = 16
    output_mb: float = 1.0
    scratch_mb: float = 64.0


@dataclass(frozen=True)
class Ended:
    """How a program ended. `how`: "exit", or the limit that ended it: cpu, wall, memory, output. `code`: its exit code,
    or minus the signal's number. `result`: {"value"} of a call, {"passed": True} after an assertion, {"values"} of
    expressions."""

    how: str
    code: int | None
    stdout: str
    stderr: str
    result: dict[str, Any] | None
    cpu_s: float
    wall_s: float

    def trouble(self, limits: Limits) -> str | None:
        """Say what went wrong; None if the program ended by itself with exit code 0."""
        match self.how:
            case "cpu":
                return f"processor time limit of {limits.cpu_s:g} s"
            case "wall":
                return f"time limit of {limits.wall_s:g} s"
            case "memory":
                return f"memory limit of {limits.memory_gb:g} GiB"
            case "output":
                return f"output limit of {limits.output_mb:g} MiB"
        if self.code is not None and self.code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"was ended by {names.get(-self.code, f'signal {-self.code}')}"
        if self.code:
            last = self.stderr.rstrip().rpartition("\n")[2].strip()
            last = last if len(last) <= _SHOWN else last[:_SHOWN] + " ..."
            return f"crashed: {last}" if last else f"exit code {self.code}"
        return None


class Sandboxes:
    """Makes sandboxes. The constructor tries one, and raises SandboxError if it does not start or isolate.

    `kind`: `bubblewrap`, or `none_i_trust_the_code`: limits without isolation.
    """

    def __init__(self, kind: SandboxKind, limits: Limits) -> None:
        self.kind, self.limits = kind, limits
        self.proc = True
        self.running: set[subprocess.Popen[bytes]] = set()
        """The processes of open sandboxes."""
        self._closed = False
        if kind == BUBBLEWRAP:
            if shutil.which("bwrap") is None:
                raise SandboxError(
                    "bubblewrap (bwrap) is not installed, and programs are run in nothing less; Debian, Ubuntu: "
                    "apt-get install bubblewrap; Fedora, RHEL: dnf install bubblewrap"
                )
            try:
                self._filter = filter_program()
            except KeyError as error:
                raise SandboxError(f"there is no system call filter for {platform.machine()}") from error
            problem = self._problem()
            if problem:
                self.proc = False  # containers often forbid a new /proc
                if self._problem():
                    raise SandboxError(problem)

    def open(self) -> Sandbox:
        """Return a new sandbox, not yet started."""
        return Sandbox(self)

    def close(self) -> None:
        """End all sandboxes, with the programs in them."""
        self._closed = True
        for process in list(self.running):
            process.kill()

    def start(self) -> tuple[subprocess.Popen[bytes], Connection, Start]:
        """Start a worker. Return it and our end of the connection to it."""
        if self._closed:
            raise SandboxError("the sandboxes are closed")
        ours, theirs = multiprocessing.Pipe()
        with theirs, tempfile.TemporaryFile() as filter_file:
            passed: tuple[int, ...] = ()
            if self.kind == BUBBLEWRAP:
                filter_file.write(self._filter)
                filter_file.seek(0)
                passed = (filter_file.fileno(),)
                start = sandboxed(int(self.limits.scratch_mb * 2**20), filter_file.fileno(), proc=self.proc)
            else:
                start = unprotected(tempfile.mkdtemp(prefix="program-"))
            process = subprocess.Popen(
                start.command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=start.environment,
                cwd=start.folder or "/",
                pass_fds=passed,
            )
        self.running.add(process)
        return process, ours, start

    def limits_for_worker(self, start: Start) -> dict[str, Any]:
        """Return the limits, where `processes` also counts the worker if it is of the programs' user."""
        if self.kind == TRUST:
            return asdict(self.limits) | {"processes": -1}  # the kernel would count all processes of this user
        return asdict(self.limits) | {"processes": self.limits.processes + (0 if start.uid else 1)}

    def _problem(self) -> str:
        """Try a sandbox. Return what is wrong with it; "" if it isolates."""
        try:
            with self.open() as sandbox:
                ended = sandbox.run(_PROBE, check={"call": "probe", "args": []})
        except SandboxError as error:
            return f"{error}\nWhat bubblewrap needs:\n{_HINTS}"
        if ended.result is None:
            trouble = ended.trouble(self.limits) or "no result"
            return f"the sandbox does not run a program with a thread: {trouble}; is env.code.max_processes too low?"
        leaks = ended.result["value"]
        return f"the sandbox leaks: {', '.join(leaks)}" if leaks else ""


class Sandbox:
    """A sandbox in which programs run one after the other. It starts with the first program, and again after one that
    left too much behind."""

    def __init__(self, maker: Sandboxes) -> None:
        self._maker = maker
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._start: Start | None = None

    def run(self, program: str, stdin: str = "", check: Mapping[str, Any] | None = None) -> Ended:
        """Run `program` as a script that reads `stdin`; with `check` as a module. Then {"assert": code} runs in its
        namespace, {"call": name, "args": [...]} calls a function of it (or of its class Solution), or {"steps"} (see
        code/asserts.py) evaluate expressions.

        Raises SandboxError.
        """
        problem = ""
        for _ in range(_ATTEMPTS):
            try:
                return self._once(program, stdin, check)
            except (OSError, EOFError) as error:
                problem = self._last_log_line() or f"{type(error).__name__}: {error}"
                self.close()
        raise SandboxError(f"the sandbox broke {_ATTEMPTS} times in a row: {problem}")

    def close(self) -> None:
        """End the sandbox and all that runs in it."""
        if self._process is not None and self._connection is not None and self._start is not None:
            self._process.kill()
            self._process.wait()
            self._maker.running.discard(self._process)
            with suppress(EOFError, OSError):  # the worker, the only holder of the other end, is gone
                while self._connection.poll(_MARGIN_S):
                    self._connection.recv_bytes()
            self._connection.close()
            if self._process.stderr:
                self._process.stderr.close()
            if self._start.folder:
                shutil.rmtree(self._start.folder, ignore_errors=True)
        self._process = self._connection = self._start = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _once(self, program: str, stdin: str, check: Mapping[str, Any] | None) -> Ended:
        if self._process is None:
            self._process, self._connection, self._start = self._maker.start()
        assert self._connection is not None and self._start is not None
        secret = secrets.token_hex(8)
        limits = self._maker.limits_for_worker(self._start)
        job = {"program": program, "stdin": stdin, "limits": limits, "checked": check is not None}
        self._connection.send_bytes(json.dumps(job).encode())
        self._connection.send_bytes(json.dumps({**(check or {}), "secret": secret}).encode())
        if not self._connection.poll(STRETCH * self._maker.limits.wall_s + _MARGIN_S):
            raise TimeoutError("the sandbox does not answer")
        report = json.loads(self._connection.recv_bytes())
        report["result"] = _result(report["result"], secret)
        return Ended(**report)

    def _last_log_line(self) -> str:
        """Return the last output of a worker that has ended, or of bubblewrap."""
        if self._process is None or self._process.stderr is None:
            return ""
        os.set_blocking(self._process.stderr.fileno(), False)
        return (self._process.stderr.read() or b"").decode(errors="replace").strip()[-1000:]


if 0 < sys.get_int_max_str_digits() < program.MAX_DIGITS:  # results have integers as large as a program may print
    sys.set_int_max_str_digits(program.MAX_DIGITS)


def _result(text: str, secret: str) -> dict[str, Any] | None:
    """Validate what a program's process has reported, which may be anything."""
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(result, dict):
        return None
    if "value" in result:
        return {"value": result["value"]}
    if result.get("passed") != secret:
        return None
    return {"values": result["values"]} if "values" in result else {"passed": True}


_PROBE = """
import os, threading

def works(attempt, *arguments):
    try:
        attempt(*arguments)
    except (OSError, ImportError):
        return False
    return True

def probe():
    import socket
    thread = threading.Thread(target=len, args=("",))
    thread.start()
    thread.join()
    attempts = {
        "it reads /etc/passwd": (open, "/etc/passwd"),
        "it opens sockets": (socket.socket,),
        "it writes to /": (open, "/written", "w"),
        "it sees installed packages": (__import__, "pydantic"),
    }
    return [leak for leak, (attempt, *arguments) in attempts.items() if works(attempt, *arguments)]
"""
