"""One run at a time in a checkpoint folder: a file says who holds it, and beats while that run lives.

Ranks of two runs in one folder would mix their parts of one checkpoint. The kernel's file locks do not work on every
shared file system; creating a link fails on all of them if the name is taken. No clock is compared with another's: a
holder on another machine is watched for STALE_S seconds, and is dead if its beat stands still.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from grpo_mcore.base.clock import REAL, Clock

logger = logging.getLogger(__name__)

LEASE_FILE = "in_use.json"

BEAT_S = 5.0
"""Seconds between two beats."""

STALE_S = 30.0
"""Seconds without a beat after which a holder on another machine is dead."""


SETTLE_S = 0.1
"""Seconds after which a start looks whether it still holds the folder: another one that saw a dead run may have removed
its file too."""


WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""Errors of os.link on file systems that have no hard links."""


class FolderInUse(RuntimeError):
    """Another run holds the checkpoint folder."""


class LeaseLost(RuntimeError):
    """Another run has taken the checkpoint folder over while this one stood still."""


@dataclass(frozen=True)
class Holder:
    """The run that holds a folder. `machine`: identifies the kernel and its process ids: two containers of one node
    differ in it. `start_tick`: when its process started, in ticks since the machine's boot. `since`: when it took the
    folder, for the reader. `token`: differs for each run."""

    host: str
    machine: str
    pid: int
    start_tick: int
    since: str
    token: str

    @staticmethod
    def this_process() -> Holder:
        return Holder(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            start_tick=_start_tick(os.getpid()) or 0,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            token=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """Holds `folder` for this process until `release`, or until the process ends. Raises FolderInUse."""

    def __init__(
        self,
        folder: Path,
        *,
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
        clock: Clock = REAL,
        key: str = "checkpointing.checkpoint_dir",
    ) -> None:
        """`key`: of the recipe, for the message."""
        self.file, self._me, self._key = folder / LEASE_FILE, Holder.this_process(), key
        self._beat_s, self._stale_s, self._clock = beat_s, stale_s, clock
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._take()
        except OSError:  # a disk that fails: this process lives, so it would keep the folder from the next attempt
            with contextlib.suppress(OSError):
                self._remove()
            raise
        self._end_beat = clock.beat(beat_s, self._beat, "lease")

    def check(self) -> None:
        """Raise LeaseLost if another run holds the folder by now. A file that cannot be read says nothing."""
        holder = None
        with contextlib.suppress(OSError):
            holder = _read(self.file)
        if holder is not None and holder.token != self._me.token:
            raise LeaseLost(
                f"{self.file.parent} is held by another run by now ({holder}): this one stood still for more than "
                f"{self._stale_s:g} s and was taken for dead; nothing more is saved"
            )

    def release(self) -> None:
        """May be called again. A file that cannot be removed is said: the next run sees that its holder is dead."""
        self._end_beat()
        try:
            self._remove()
        except OSError as error:
            logger.warning("%s cannot be removed: %s; the run has ended as it should", self.file, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _take(self) -> None:
        mine = self.file.with_name(f".{LEASE_FILE}.{self._me.token}")
        try:
            with mine.open("w", encoding="utf-8") as file:
                json.dump(asdict(self._me), file)
                file.flush()
                os.fsync(file.fileno())
            while True:
                while not _link(mine, self.file):
                    self._take_over()
                self._clock.sleep(SETTLE_S)
                if (holder := _read(self.file)) is not None and holder.token == self._me.token:
                    return
        finally:
            try:
                mine.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be removed: %s; it is not needed any more", mine, error)

    def _take_over(self) -> None:
        """Remove the file of a run that is dead. Raises FolderInUse if it lives."""
        seen = dead_holder(
            self.file.parent, beat_s=self._beat_s, stale_s=self._stale_s, clock=self._clock, key=self._key
        )
        aside = self.file.with_name(f".{LEASE_FILE}.{self._me.token}.dead")
        with contextlib.suppress(FileNotFoundError):  # its holder has just released it
            os.rename(self.file, aside)
        removed = _read(aside)
        if removed is not None and (seen is None or removed.token != seen.token):  # another start was quicker
            _link(aside, self.file)
        elif seen is not None:
            logger.info("%s was held by %s, which is dead; this run takes it over", self.file.parent, seen)
        aside.unlink(missing_ok=True)

    def _remove(self) -> None:
        holder = _read(self.file)
        if holder is not None and holder.token == self._me.token:
            self.file.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Change the file's time. A disk that is full or away for a moment costs only that beat."""
        with contextlib.suppress(OSError):
            holder = _read(self.file)
            if holder is not None and holder.token == self._me.token:
                os.utime(self.file)


def dead_holder(
    folder: Path,
    *,
    beat_s: float = BEAT_S,
    stale_s: float = STALE_S,
    clock: Clock = REAL,
    key: str = "checkpointing.checkpoint_dir",
) -> Holder | None:
    """Return the run that holds the folder and is dead, None if no run holds it. Raises FolderInUse if it lives: a
    process of this machine can be asked, one of another is watched."""
    file = folder / LEASE_FILE
    holder, beat = _read(file), _beat_of(file)
    if holder is None:
        return None
    if (lives := lives_here(holder)) is None:
        logger.info("%s is held by %s; watching it for %g s", folder, holder, stale_s)
        lives, deadline = False, clock.now() + stale_s
        while not lives and clock.now() < deadline:
            clock.sleep(min(beat_s / 5, stale_s / 10))
            lives = _beat_of(file) not in (beat, None)
    if lives:
        raise FolderInUse(f"{key} {folder} is in use by {holder}; wait for its end, end it, or choose another folder")
    return holder


def lives_here(holder: Holder) -> bool | None:
    """Return whether a run lives, as the kernel says; None for one on another machine."""
    return _start_tick(holder.pid) == holder.start_tick if holder.machine == _machine() else None


def _machine() -> str:
    """Return what is equal for two processes only if both see the same process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _start_tick(pid: int) -> int | None:
    """Return when a process started, None if it has ended. Of the kernel's text, not of psutil: its times move with the
    clock."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name. Return False if the name is taken.

    A file system without hard links (object stores as folders, FAT, some FUSE mounts) gets a copy instead, whose
    exclusive creation fails alike if the name is taken. It may be seen half written for a moment, which reads as no
    holder; whoever takes the folder then looks again after SETTLE_S."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        try:
            file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(file, "wb") as copy:
            copy.write(source.read_bytes())
    return True


def _read(file: Path) -> Holder | None:
    """Return the holder that a lease file names; None for no file or folder, or a file that was damaged."""
    try:
        return Holder(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def _beat_of(file: Path) -> int | None:
    """Return the time of the last beat. Opened first: NFS asks its server for the attributes only then."""
    try:
        with file.open(encoding="utf-8") as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
