"""Processes and ports: start a child that dies with its parent, end processes with a grace period, say how one ended,
find a free port, count the cores, look for garbage rarely, and the names of variables that every process needs. For
every room; standard library and psutil only."""

import ctypes
import gc
import math
import multiprocessing.process
import multiprocessing.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from grpo_mcore.base.addresses import family_of
from grpo_mcore.base.clock import REAL

PORTS = range(20000, 30000)
"""Below the ports that Linux gives to outgoing connections, so that nobody takes one between its choice and its use."""

GRACE_S = 5.0
"""Seconds a process gets between SIGTERM and SIGKILL, and as many to end after SIGKILL."""

POLL_S = 0.02

LONGEST_TEMPORARY = 70
"""Maximum bytes of the temporary folder's path: Python's multiprocessing puts Unix sockets 32 characters below it,
and their paths may have 107 in all."""

COLLECT_AFTER, COLLECT_AFTER_WITHOUT_TENSORS = 10_000, 1_000_000
"""Number of new objects after which Python looks for garbage once a process has called `collect_rarely`, and within
`rare_collections`; its default is 700."""

COLLECT_EVERY_S = 300.0
"""Seconds between two collections within `rare_collections`. Samples end up in reference cycles only through tracebacks
of failures."""

CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE"),
    *("TRANSFORMERS_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET", "HF_HUB_ENABLE_HF_TRANSFER"),
)
"""Variables of the Hugging Face libraries, without HF_TOKEN, which is a secret."""

PROXIES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables that say how the network is reached from here."""

HUB_VARIABLES = (*CACHES, *PROXIES)
"""Variables that say where models and data come from: every process that loads some needs them."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h

Process = subprocess.Popen[Any] | multiprocessing.process.BaseProcess | psutil.Process
"""A child of this process. A psutil.Process may also be another's child; it must not be a child that a Popen or a
multiprocessing.Process stands for, since only one of the two would learn its exit code."""


def collect_rarely() -> None:
    """Let this process look for garbage less often: torch and transformers bring 400,000 objects that live as long as
    it does, and looking through them again and again makes their import slow."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for garbage rarely, and not among what exists already. For a process that keeps books of very
    many objects; not for one that holds tensors, which would stay longer where they are part of a cycle. Inside
    another, it does nothing."""
    before = gc.get_threshold()
    if before[0] == COLLECT_AFTER_WITHOUT_TENSORS:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_WITHOUT_TENSORS, *before[1:])
    end = REAL.beat(COLLECT_EVERY_S, gc.collect, "garbage")
    try:
        yield
    finally:
        end()
        gc.set_threshold(*before)
        gc.unfreeze()


def shorten_socket_paths() -> None:
    """Let the multiprocessing of this process put its sockets below /tmp where the path of the temporary folder is too
    long for them."""
    if len(os.fsencode(folder := tempfile.gettempdir())) > LONGEST_TEMPORARY:
        tempfile.tempdir = "/tmp"
        try:
            multiprocessing.util.get_temp_dir()  # it is made once, and removed at the end
        finally:
            tempfile.tempdir = folder


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port on which nobody listens at `address` ("": all addresses). Raises OSError if none is free."""
    family = family_of(address)
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket(family) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop - 1} at {address}")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent ends. To be called first in the child.

    `parent`: the pid of the process that started this one; if it has ended already, the signal is sent at once. The
    signal also comes when the thread that started the child ends. Does nothing outside Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make processes whose parents have ended children of this process, if they descend from it. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return all processes that descend from `pid` (None: this process), without itself. Those of other users may be
    hidden from this one (/proc with hidepid), which psutil's own `children` does not survive."""
    children: dict[int, list[psutil.Process]] = {}
    for number in psutil.pids():
        with suppress(psutil.Error):  # it has ended, or is hidden
            process = psutil.Process(number)
            children.setdefault(process.ppid(), []).append(process)
    below = [*children.get(os.getpid() if pid is None else pid, [])]
    for process in below:  # grows meanwhile
        below += children.get(process.pid, [])
    return below


def wait(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait until all have ended, at most `timeout_s`. Return those that still run; children that ended are reaped."""
    deadline = time.monotonic() + timeout_s
    running = [process for process in processes if _is_running(process)]
    while running and time.monotonic() < deadline:
        time.sleep(POLL_S)
        running = [process for process in running if _is_running(process)]
    return running


def end(processes: Sequence[Process], grace_s: float = GRACE_S) -> list[Process]:
    """Send SIGTERM to all, and SIGKILL to those that still run `grace_s` later (0: SIGKILL at once).

    Return those that survive SIGKILL by more than GRACE_S.
    """
    running = wait(processes, 0)
    if grace_s > 0:
        for process in running:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                process.terminate()
        running = wait(running, grace_s)
    for process in running:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            process.kill()
    return wait(running, GRACE_S)


def describe_exit(code: int | None) -> str:
    """Say how a process ended. `code` has the form of Popen.returncode: below 0 it is a signal's number, and None means
    that the process still runs."""
    if code is None:
        return "is still running"
    if code >= 0:
        return f"exit code {code}"
    known = {number.value for number in signal.Signals}
    return f"killed by {signal.Signals(-code).name if -code in known else f'signal {-code}'}"


def available_cores(root: Path = Path("/")) -> float:
    """Return the number of cores that this process may use: the number in its affinity, or the quota of processor time
    (cpu.max) of its control group or of one above, if that is less. Containers and batch jobs set such quotas. `root`:
    top of the file system."""
    return min(float(len(os.sched_getaffinity(0))), _least_quota(root))


def bind_near_gpu(gpu: Any, root: Path = Path("/")) -> None:
    """Let this thread, and those that it starts, run only on the cores of its GPU's NUMA node, so that their host
    memory lies there too. `gpu`: torch's properties of it. Nothing changes where the system does not say which cores
    these are, or this process may use none of them. `root`: top of the file system."""
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        text = (root / "sys/bus/pci/devices" / address / "local_cpulist").read_text(encoding="utf-8")
    except OSError:
        return
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    near = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    if allowed := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


@cache
def _least_quota(root: Path) -> float:
    """Return the cores that the control groups of this process leave it, read once; infinity without a quota."""
    limits = [math.inf]
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").split("\n")
    except OSError:
        groups = []
    for line in groups:
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controllers == "":  # version 2
            top, files = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        folder = top / name.lstrip("/")
        for group in (folder, *folder.parents):
            if top in (group, *group.parents):
                limits += _quota([group / file for file in files])
    return min(limits)


def _quota(files: Sequence[Path]) -> list[float]:
    """Return the cores of one control group's quota; nothing without one. `files` hold quota and period."""
    try:
        quota, period = " ".join(file.read_text(encoding="utf-8") for file in files).split()
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError, ZeroDivisionError):  # no such file; "max 100000"
        return []


def _is_running(process: Process) -> bool:
    if isinstance(process, subprocess.Popen):
        return process.poll() is None
    if isinstance(process, multiprocessing.process.BaseProcess):
        return process.is_alive()
    try:
        process.wait(0)  # reaps it if it is a child of this process
    except psutil.TimeoutExpired:
        return True
    except psutil.NoSuchProcess:
        return False
    return False
