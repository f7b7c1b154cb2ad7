"""The command line that starts a sandbox, and with it what a program sees of this machine.

That is a Python interpreter with its standard library and the system's shared libraries, all read-only, /dev/null and
similar devices, and a scratch folder. No network, no other process, no user, no capability.
"""

import glob
import os
import random
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
PROGRAM = WORKER.with_name("program.py")  # in the same folder, where the worker looks for it
SCRATCH = "/scratch"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_VARIABLES = {
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "PATH": "/usr/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set must not decide on a reward
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
}
_UIDS = range(30_000, 60_000)


@dataclass(frozen=True)
class Start:
    """A command with its environment variables and its folder (None: any). `uid`: the user as which programs run there,
    0: the worker's own."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str | None
    uid: int = 0


def sandboxed(scratch_bytes: int, filter_fd: int, *, proc: bool) -> Start:
    """Return the command of a sandbox in bubblewrap. Started by root, programs run as a user of their own who owns
    nothing; otherwise in a user namespace. `proc`: whether the sandbox has a /proc of its own processes. `filter_fd`:
    file descriptor from which bubblewrap reads the system call filter."""
    uid = random.choice(_UIDS) if os.geteuid() == 0 else 0
    command = [shutil.which("bwrap") or "bwrap", *_walls(uid)]
    for name, value in _VARIABLES.items():
        command += ["--setenv", name, value]
    for folder in sorted({str(parent) for source in _system() for parent in Path(source).parents if parent.name}):
        command += ["--perms", "0755", "--dir", folder]  # else with this machine's permissions
    for source in _system():
        command += (
            ["--symlink", os.readlink(source), source] if os.path.islink(source) else ["--ro-bind", source, source]
        )
    for folder in sorted(set(_packages())):
        command += ["--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    command += ["--ro-bind", str(WORKER), "/worker.py", "--ro-bind", str(PROGRAM), "/program.py", "--dir", "/dev"]
    for device in _DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        command += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    command += ["--symlink", SCRATCH, "/dev/shm", "--symlink", SCRATCH, "/tmp"]
    command += ["--proc", "/proc"] if proc else []
    command += ["--size", str(scratch_bytes), "--perms", "0777", "--tmpfs", SCRATCH]
    command += ["--remount-ro", "/", "--chdir", SCRATCH, "--seccomp", str(filter_fd)]
    return Start((*command, _interpreter(), "-s", "-P", "/worker.py", "isolated", str(uid)), {}, None, uid)


def unprotected(folder: str) -> Start:
    """Return the command of a worker without a sandbox, in a folder of its own."""
    variables = _VARIABLES | {"HOME": folder, "TMPDIR": folder}
    return Start((_interpreter(), "-s", "-P", str(WORKER), "trusted", "0"), variables, folder)


def _walls(uid: int) -> list[str]:
    namespaces = ["ipc", "pid", "net", "uts", "cgroup-try"]
    walls = [f"--unshare-{name}" for name in (namespaces if uid else ["user", *namespaces])]
    walls += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    walls += ["--cap-drop", "ALL"]
    if uid:  # the first process starts programs as another user, and ends them
        return walls + [part for cap in ("SETUID", "SETGID", "KILL") for part in ("--cap-add", f"CAP_{cap}")]
    return [*walls, "--uid", "65534", "--gid", "65534"]


def _interpreter() -> str:
    """Return the interpreter's path, in a virtual environment that of the interpreter below it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _system() -> Iterator[str]:
    """Yield files and folders of the interpreter and of shared libraries; links become links in the sandbox."""
    prefix = sys.base_prefix
    yield _interpreter()
    if prefix == "/usr":
        yield sysconfig.get_path("stdlib")
    else:
        yield from (folder for name in ("lib", "lib64") if os.path.isdir(folder := f"{prefix}/{name}"))
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    by_architecture = [f"/usr/lib/{multiarch}", f"/lib/{multiarch}"]
    folders = [folder for folder in by_architecture if multiarch and os.path.isdir(folder)] or ["/usr/lib"]
    for folder in (*folders, "/usr/lib64", "/lib64", "/lib"):
        if os.path.islink(folder) or (os.path.isdir(folder) and folder != "/lib") or folder == "/usr/lib":
            if not os.path.islink(os.path.dirname(folder)):  # else that link brings it
                yield folder


def _packages() -> Iterator[str]:
    """Yield the folders of installed packages below `_system()`, which programs must not see."""
    for folder in _system():
        if os.path.isdir(folder) and not os.path.islink(folder):
            for name in ("site-packages", "dist-packages"):
                yield from glob.glob(f"{glob.escape(folder)}/{name}")
                yield from glob.glob(f"{glob.escape(folder)}/python3*/{name}")
