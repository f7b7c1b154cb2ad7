"""The refit buffer in POSIX shared memory: the transport on CPU, and between several GPUs through the host.

A segment is freed by its creator, else by the creator's resource tracker, else by the next run that creates a
segment: the creator holds a lock on its segment as long as it lives. It is found by its creator's descriptor where its
name is gone: systemd-logind removes the names of a user who has logged out (RemoveIPC).
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import re
import socket
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.base.host_memory import pin, unpin
from grpo_mcore.refit.plan.plan import RefitError

SEGMENTS = Path("/dev/shm")
PREFIX = "grpo_mcore-refit"
_NUMBER = itertools.count()


class SegmentLost(ConnectionError, RefitError):
    """A segment cannot be found any more, neither by its name nor by its creator's descriptor. A new start of the run
    makes others."""


class SharedMemoryBuffer:
    """A `RefitBuffer` in host memory. Every process of the node that knows its name may attach, read and write."""

    def __init__(self, name: str, nbytes: int, fd: int, owner: bool) -> None:
        self._fd: int | None = fd
        self._pinned = False
        self._owner_pid = os.getpid() if owner else None
        self.flat: Tensor = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        self.description: dict[str, Any] = {
            "kind": "shared_memory", "name": name, "nbytes": nbytes, "host": socket.gethostname(),
            "pid": os.getpid(), "fd": fd, "inode": os.fstat(fd).st_ino,
        }  # fmt: skip

    @classmethod
    def create(cls, nbytes: int, run_id: str) -> SharedMemoryBuffer:
        """Create a segment of `nbytes`, all reserved now so that a later write cannot run out of memory.

        `run_id`: letters, digits, "_", "." and "-"; it tells whose segment this is.
        """
        if not re.fullmatch(r"[\w.-]+", run_id):
            raise RefitError(f"refit run id {run_id!r} may hold only letters, digits, '_', '.' and '-'")
        remove_stale_segments()
        name = f"{PREFIX}-{run_id}-{os.getpid()}-{next(_NUMBER)}"
        fd = os.open(SEGMENTS / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)  # clean-ups skip segments that are still empty
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            os.close(fd)
            os.unlink(SEGMENTS / name)
            free = os.statvfs(SEGMENTS).f_bavail * os.statvfs(SEGMENTS).f_frsize
            raise RefitError(
                f"cannot reserve {nbytes:,} bytes of shared memory for the refit buffer ({error.strerror}; "
                f"{SEGMENTS} has {free:,} bytes free): give the machine more (docker run --shm-size) or "
                "lower policy.refit_buffer_size_gb"
            ) from error
        # The tracker is a process of its own: it frees the segment even if this one is killed.
        resource_tracker.register(f"/{name}", "shared_memory")
        return cls(name, nbytes, fd, owner=True)

    @classmethod
    def attach(cls, description: dict[str, Any]) -> SharedMemoryBuffer:
        # multiprocessing.shared_memory would register every attachment with the tracker, which then frees the
        # segment when the first attached process ends. Hence plain open and mmap.
        name, nbytes = description["name"], description["nbytes"]
        fd = _open(SEGMENTS / name, description)
        if fd is None:
            fd = _open(Path(f"/proc/{description['pid']}/fd/{description['fd']}"), description)
        if fd is None:
            raise SegmentLost(
                f"refit segment {name} of {description['host']} is not on {socket.gethostname()}: its owner has "
                "exited, or policy ranks and engines of a colocated refit are on different machines, or its name was "
                f"removed from {SEGMENTS} and /proc does not show its owner's descriptor. systemd-logind removes the "
                "names of a user who logs out: set RemoveIPC=no in logind.conf, or loginctl enable-linger"
            )
        if os.fstat(fd).st_size != nbytes:
            size = os.fstat(fd).st_size
            os.close(fd)
            raise RefitError(f"refit segment {name} has {size:,} bytes, expected {nbytes:,}")
        return cls(name, nbytes, fd, owner=False)

    def pin(self) -> None:
        """Lock the segment for this process's GPU, which then copies at the full speed of its link. Idempotent."""
        if not self._pinned:
            pin(self.flat)
            self._pinned = True

    def synchronize(self) -> None:
        """Wait for this process's GPU. Without one, return at once: a store is visible when it is done."""
        if self._pinned:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        if self._fd is None:
            return
        if self._pinned:
            self._pinned = False
            unpin(self.flat)
        # The mapping ends with the last tensor that views it; unmapping here would break the others.
        self.flat = torch.empty(0, dtype=torch.uint8)
        os.close(self._fd)
        self._fd = None
        if self._owner_pid == os.getpid():  # not in a forked child of the owner
            (SEGMENTS / self.description["name"]).unlink(missing_ok=True)
            resource_tracker.unregister(f"/{self.description['name']}", "shared_memory")

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()


def _open(path: Path, description: dict[str, Any]) -> int | None:
    """Return a descriptor of the segment that lies at `path`; None if there is another file or none, or if this process
    may not look."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return None
    if os.fstat(fd).st_ino == description["inode"]:
        return fd
    os.close(fd)
    return None


def remove_stale_segments() -> list[str]:
    """Free the segments whose creator is dead (a killed run). Returns their names."""
    stale = []
    for path in SEGMENTS.glob(f"{PREFIX}-*"):
        try:
            fd = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):  # freed meanwhile, or another user's
            continue
        try:
            if os.fstat(fd).st_size:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                stale.append(path.name)
        except BlockingIOError:  # its creator lives
            pass
        finally:
            os.close(fd)
    return stale
