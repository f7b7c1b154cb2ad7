"""One run at a time in a checkpoint folder: a file says which run holds it, and its time changes while that run lives.

Ranks of two runs in one folder would mix their parts of one checkpoint. The kernel's file locks do not work on every
shared file system; creating a file exclusively does. A process of this machine can be asked whether it lives. A holder
on another machine, or one that is hidden from this process (/proc with hidepid), is watched for STALE_S seconds, and is
dead if its beat stands still: no two clocks are compared.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from grpo_mcore.base.clock import REAL, Clock

logger = logging.getLogger(__name__)

LEASE_FILE = "in_use.json"

BEAT_S = 5.0
"""Seconds between two beats."""

STALE_S = 30.0
"""Seconds without a beat after which a holder that cannot be asked is dead."""

KEY = "checkpointing.checkpoint_dir"

SETTLE_S = 0.1
"""Seconds after which a start looks whether it still holds the folder: another one that saw a dead run may have removed
its file too."""


class FolderInUse(RuntimeError):
    """Another run holds the checkpoint folder."""


class LeaseLost(RuntimeError):
    """Another run has taken the checkpoint folder over while this one stood still."""


@dataclass(frozen=True)
class Holder:
    """The run that holds a folder. `machine` identifies the kernel and its process ids; two containers of one node
    differ in it. `start_tick` is the start of the process in ticks since the machine's boot, so that another process
    with the same pid is not taken for it. `since` is for the reader. `token` differs for each run."""

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
            start_tick=_state_and_start(os.getpid())[1],
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            token=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """Holds `folder` for this process until `release`, or until the process ends. Raises FolderInUse."""

    def __init__(
        self, folder: Path, *, beat_s: float = BEAT_S, stale_s: float = STALE_S, clock: Clock = REAL, key: str = KEY
    ) -> None:
        """`key`: the recipe's key of the folder, for the message."""
        self.file, self._holder = folder / LEASE_FILE, Holder.this_process()
        self._beat_s, self._stale_s, self._clock, self._key = beat_s, stale_s, clock, key
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._take()
        except OSError:  # a disk that fails: this process lives, so it would keep the folder from the next attempt
            with suppress(OSError):
                self._remove()
            raise
        self._end_beat = clock.beat(beat_s, self._beat, "lease")

    def check(self) -> None:
        """Raise LeaseLost if another run holds the folder by now. A file that cannot be read is ignored."""
        holder = None
        with suppress(OSError):
            holder = _read(self.file)
        if holder is not None and holder.token != self._holder.token:
            raise LeaseLost(
                f"{self.file.parent} is held by another run by now ({holder}): this one stood still for more than "
                f"{self._stale_s:g} s and was taken for dead; nothing more is saved"
            )

    def release(self) -> None:
        """Let the next run have the folder. May be called again. A file that cannot be removed is named: the next run
        sees that its holder is dead."""
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
        while not self._is_held():
            try:
                with self.file.open("x", encoding="utf-8") as file:
                    json.dump(asdict(self._holder), file)
            except FileExistsError:
                self._remove_dead()
            else:
                self._clock.sleep(SETTLE_S)

    def _remove_dead(self) -> None:
        """Remove the file of a run that is dead. Raises FolderInUse if it lives."""
        folder, times = self.file.parent, {"beat_s": self._beat_s, "stale_s": self._stale_s}
        dead = dead_holder(folder, clock=self._clock, key=self._key, **times)
        aside = self.file.with_name(f".{LEASE_FILE}.{self._holder.token}.dead")
        with suppress(FileNotFoundError):  # it has just been released
            os.rename(self.file, aside)
            removed = _read(aside)
            if removed is not None and removed != dead:  # another start was quicker
                os.rename(aside, self.file)
                return
            aside.unlink()
            if removed is not None:
                logger.info("%s was held by %s, which is dead; this run takes it over", folder, dead)

    def _is_held(self) -> bool:
        """Return whether the file is this run's."""
        holder = _read(self.file)
        return holder is not None and holder.token == self._holder.token

    def _remove(self) -> None:
        if self._is_held():
            self.file.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Change the file's time. A disk that is full or away for a moment costs only that beat."""
        with suppress(OSError):
            if self._is_held():
                os.utime(self.file)


def dead_holder(
    folder: Path, *, beat_s: float = BEAT_S, stale_s: float = STALE_S, clock: Clock = REAL, key: str = KEY
) -> Holder | None:
    """Return the run that holds the folder and is dead, None if no run holds it. Raises FolderInUse if it lives."""
    file = folder / LEASE_FILE
    try:
        holder, beat = _read(file), _beat_of(file)
    except PermissionError as error:
        raise FolderInUse(
            f"{key} {folder} is in use by a run of another user, whose {file.name} this one may not read ({error}); "
            "choose another folder, or have its owner end the run and remove that file"
        ) from None
    if holder is None:
        return None
    lives = _lives(holder) if holder.machine == _machine() else None
    if lives is None:
        logger.info("%s is held by %s; watching it for %g s", folder, holder, stale_s)
        lives, deadline = False, clock.now() + stale_s
        while not lives and clock.now() < deadline:
            clock.sleep(min(beat_s / 5, stale_s / 10))
            lives = _beat_of(file) not in (beat, None)
    if lives:
        raise FolderInUse(f"{key} {folder} is in use by {holder}; wait for its end, end it, or choose another folder")
    return holder


def _machine() -> str:
    """Return what is equal for two processes only if both see the same process ids; unlike any other where /proc does
    not show it (subset=pid)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {secrets.token_hex(8)}"


def _lives(holder: Holder) -> bool | None:
    """Return whether the process of a holder on this machine lives; None where this process may not see it."""
    try:
        state, tick = _state_and_start(holder.pid)
    except OSError:  # it has ended, or is hidden: signal 0 tells which, and reaches nobody
        try:
            os.kill(holder.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            return None
        return None  # this user's
    return state not in "ZX" and tick == holder.start_tick


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the state of a process, and when it started in ticks since the boot. Read from the kernel's text, not by
    psutil: its times move with the clock."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


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
