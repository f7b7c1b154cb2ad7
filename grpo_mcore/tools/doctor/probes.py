"""Look at this machine for the checks. Each probe is short and has a timeout."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from grpo_mcore import processes
from grpo_mcore.tools.doctor.checks import FileTimes, Gpu


def pins(extra: str) -> list[str]:
    """Return this package's requirements, including those of `extra`."""
    found = []
    for line in importlib.metadata.requires("grpo-mcore") or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


def installed(path: list[str] | None = None) -> dict[str, str]:
    """Return the versions of the distributions on `path` (None: sys.path) by normalised name. The first of a name
    counts."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=sys.path if path is None else path):
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def gpus(timeout_s: float = 15.0) -> list[Gpu] | None:
    """Return what nvidia-smi lists, or None if it is not installed. Raises OSError with its message if it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    if done.returncode:
        raise OSError(f"nvidia-smi: {(done.stderr or done.stdout).strip()}")
    found = []
    for line in done.stdout.splitlines():
        index, name, driver, total, used, errors = (part.strip() for part in line.split(","))
        mib = 2**20
        count = int(errors) if errors.isdigit() else None
        found.append(Gpu(int(index), name, driver, int(total) * mib, int(used) * mib, count))
    return found


def pair(backend: str, devices: tuple[int, int], timeout_s: float = 40.0) -> tuple[float | None, str | None]:
    """All-reduce a tensor over two processes on this machine. Return (seconds, None), or (None, the error)."""
    return all_reduce(backend, f"127.0.0.1:{processes.free_port()}", dict(enumerate(devices)), timeout_s)


def all_reduce(
    backend: str, address: str, devices: dict[int, int], timeout_s: float
) -> tuple[float | None, str | None]:
    """Run the local ranks of an all-reduce over two processes. `devices`: by rank. `address`: HOST:PORT of rank 0."""
    began = time.monotonic()
    program = [sys.executable, "-m", "grpo_mcore.tools.doctor.allreduce_probe"]
    command = [*program, backend, address, str(timeout_s), str(os.getpid())]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(device)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for rank, device in devices.items()
    ]
    try:
        for rank in ranks:
            _, error = rank.communicate(timeout=max(0.1, timeout_s - (time.monotonic() - began)))
            if rank.returncode:
                return None, (error.strip().splitlines() or [f"exit code {rank.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        return None, f"no answer in {timeout_s:.0f} s"
    finally:
        processes.end(ranks, grace_s=0)
    return time.monotonic() - began, None


def space(path: str) -> tuple[int, int]:
    """Return (total, free) bytes of the file system of `path`, which need not exist yet."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    return usage.total, usage.free


def file_times(folder: str, now: Callable[[], float] = time.time, nbytes: int = 1 << 20) -> FileTimes:
    """Write, rename, read and delete a file. Folders that do not exist are created, and removed again if empty."""
    place = Path(folder).expanduser().absolute()
    missing = [parent for parent in (place, *place.parents) if not parent.exists()]
    name = f".doctor-{uuid.uuid4().hex[:8]}"
    first, second = place / name, place / f"{name}.renamed"
    try:
        place.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with first.open("wb") as file:
            file.write(os.urandom(nbytes))
            file.flush()
            os.fsync(file.fileno())
        clock = first.stat().st_mtime - now()
        written = time.perf_counter()
        first.rename(second)
        renamed = time.perf_counter()
        if second.stat().st_size != nbytes or len(second.read_bytes()) != nbytes:
            return FileTimes(str(folder), error=f"a file of {nbytes:,} bytes came back shorter")
        return FileTimes(str(folder), written - start, renamed - written, time.perf_counter() - renamed, clock)
    except OSError as error:
        return FileTimes(str(folder), error=error.strerror or str(error))
    finally:
        _remove((first, second), missing)


def _remove(files: Iterable[Path], folders: Iterable[Path]) -> None:
    """Remove what a probe has created, if it could."""
    for file in files:
        if file.parent.is_dir():
            file.unlink(missing_ok=True)
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def taken_ports(wanted: Sequence[int]) -> dict[int, str]:
    """Return the ports that cannot be listened on, with their holder."""
    taken = {}
    for port in wanted:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
            except OSError:
                taken[port] = _holder(port)
    return taken


def sandbox(timeout_s: float = 20.0) -> str | None:
    """Return why bubblewrap cannot make a sandbox with its own namespaces here, or None if it can."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap (bwrap) is not installed"
    command = [program, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if not done.returncode:
        return None
    return (done.stderr.strip().splitlines() or [f"bwrap: exit code {done.returncode}"])[-1]


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} ({connection.pid})"
    except (psutil.Error, OSError):
        return "a process of another user"
    return "another process"


def hub_cache() -> str:
    """Return the folder of the Hugging Face cache, found as its own libraries do."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")


def has_model(name: str) -> bool:
    """Return whether `name` is a folder or has a snapshot in the cache."""
    return Path(name).is_dir() or any(Path(hub_cache(), f"models--{name.replace('/', '--')}", "snapshots").glob("*"))


def has_token() -> bool:
    """Return whether there are credentials for the hub. They are not read."""
    stored = os.environ.get("HF_TOKEN_PATH") or os.path.join(os.path.dirname(hub_cache()), "token")
    return bool(os.environ.get("HF_TOKEN")) or os.path.isfile(stored)


def why_no_answer(address: str, timeout_s: float = 5.0) -> str | None:
    """Return why nothing answers at host:port; None if something does, or if the address is a name that Ray
    resolves."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return None
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError as error:
        return f"nobody answers ({error})"
    return None
