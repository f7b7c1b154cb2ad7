"""The board of a node: how far each process there is in a refit, so that they go through the buckets by themselves.

A seat's `progress` is the number of the first bucket that its process has not finished; it jumps over buckets in which
there is nothing to do. A writer fills bucket i when every reader has finished bucket i - 2, whose half of the buffer it
takes; a reader reads it when every writer has finished it. Whoever fails writes why, and all others leave with that
error; whoever dies is noticed by its process id. So the driver calls nobody between open and commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from grpo_mcore.refit.plan.parts import Seat
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.transport.buffer import RefitBuffer, attach_buffer, create_buffer
from grpo_mcore.refit.transport.shared_memory import SharedMemoryBuffer

SEATS = 1024
"""Maximum number of processes that take part in a refit on one node."""
_SEAT = np.dtype([
    ("session", "i8"), ("progress", "i8"), ("pid", "i8"), ("started", "f8"), ("name", "S96"), ("error", "S896"),
])  # fmt: skip
FAILED = -1
ALIVE_S = 0.5
"""Seconds between looks at whether those that are waited for are alive."""
SHORTEST_S, LONGEST_S = 5e-5, 2e-3


class Board:
    """One process's view of the board of its node, kept over refits."""

    def __init__(self, memory: SharedMemoryBuffer) -> None:
        self._memory = memory
        self.description: dict[str, Any] = memory.description
        self._seats: Any = memory.flat.numpy().view(_SEAT)

    @classmethod
    def create(cls, run_id: str) -> Board:
        return cls(SharedMemoryBuffer.create(SEATS * _SEAT.itemsize, run_id))

    @classmethod
    def attach(cls, description: dict[str, Any]) -> Board:
        return cls(SharedMemoryBuffer.attach(description))

    def sit(self, seat: Seat, name: str) -> None:
        """Take part in a refit, as `name` in the others' errors."""
        if seat.writers + seat.readers > SEATS:
            raise RefitError(
                f"{seat.writers + seat.readers} processes take part in a refit on one node, at most {SEATS} can"
            )
        self._session, self._seat, self._timeout_s = seat.session, seat.seat, seat.timeout_s
        self.writers, self.readers = range(seat.writers), range(seat.writers, seat.writers + seat.readers)
        row = self._seats[seat.seat : seat.seat + 1]
        row["session"] = 0
        row["progress"], row["pid"], row["started"] = 0, os.getpid(), psutil.Process().create_time()
        row["name"], row["error"] = name.encode()[:96], b""
        row["session"] = seat.session

    def finished(self, bucket: int) -> None:
        """Announce that this process has nothing more to do in buckets below `bucket`."""
        self._seats["progress"][self._seat] = bucket

    def fail(self, reason: str) -> None:
        """Announce that this process leaves the refit: its own waiting and that of all others ends."""
        self._seats["error"][self._seat] = reason.encode()[:896]
        self._seats["progress"][self._seat] = FAILED

    def wait(self, seats: Iterable[int], bucket: int, what: str) -> None:
        """Wait until all `seats` have finished the buckets below `bucket`. Raises RefitError with what was waited for,
        if it takes too long, or if anybody on the node has failed or died."""
        if bucket <= 0:
            return
        waited = np.fromiter(seats, dtype=np.int64)
        everyone = slice(0, self.readers.stop)
        deadline = time.monotonic() + self._timeout_s
        look, pause = time.monotonic() + ALIVE_S, SHORTEST_S
        while True:
            arrived = self._seats["session"][everyone] == self._session
            progress = self._seats["progress"][everyone]
            if (failed := np.flatnonzero(arrived & (progress == FAILED))).size:
                who = self._seats[int(failed[0])]
                raise RefitError(f"{who['name'].decode()} left the refit: {who['error'].decode(errors='replace')}")
            late = waited[~(arrived[waited] & (progress[waited] >= bucket))]
            if not late.size:
                return
            if (now := time.monotonic()) > look:
                look = now + ALIVE_S
                if dead := [seat for seat in late if arrived[seat] and not self._alive(int(seat))]:
                    raise RefitError(f"{self._name(dead[0])} has died; it was to {what}")
            if now > deadline:
                names = ", ".join(self._name(seat) if arrived[seat] else f"seat {seat} (not taken)" for seat in late)
                raise RefitError(f"waited {self._timeout_s:g} s for {names} to {what}")
            time.sleep(pause)
            pause = min(LONGEST_S, pause * 1.5)

    def _alive(self, seat: int) -> bool:
        try:
            process = psutil.Process(int(self._seats["pid"][seat]))
            same = abs(process.create_time() - self._seats["started"][seat]) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.AccessDenied:  # it is there; no more can be seen
            return True
        except psutil.NoSuchProcess:
            return False

    def _name(self, seat: int) -> str:
        return str(self._seats["name"][seat].decode())

    def close(self) -> None:
        self._seats = None
        self._memory.close()


class Mapped(NamedTuple):
    """The shared memory of one node's processes: the buffer and the board."""

    buffer: RefitBuffer
    board: Board

    @classmethod
    def create(cls, nbytes: int, device: torch.device, run_id: str, *, through_host: bool) -> Mapped:
        return cls(create_buffer(nbytes, device, run_id, through_host=through_host), Board.create(run_id))

    @classmethod
    def attach(cls, transport: dict[str, Any], device: torch.device) -> Mapped:
        return cls(attach_buffer(transport["buffer"], device), Board.attach(transport["board"]))

    @property
    def transport(self) -> dict[str, Any]:
        """Return the descriptions with which another process attaches both."""
        return {"buffer": self.buffer.description, "board": self.board.description}

    def close(self) -> None:
        self.buffer.close()
        self.board.close()


def next_bucket(busy: Iterable[bool]) -> list[int]:
    """Return, for each bucket and for the time before the first, the next one in which there is something to do; the
    number of buckets if there is none."""
    flags = list(busy)
    after, following = [], len(flags)
    for index in range(len(flags) - 1, -1, -1):
        after.append(following)
        following = index if flags[index] else following
    return [following, *reversed(after)]
