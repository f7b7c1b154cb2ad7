"""A rollouts file in parts of two megabytes: handled one after the other here, or at once by processes; given back in
the order of the file either way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from grpo_mcore import processes
from grpo_mcore.data.gym.lines import LineReader
from grpo_mcore.data.gym.rollout import BadRow, Filtered, RolloutParser, reward_of
from grpo_mcore.data.interfaces import DataError

PART_BYTES = 2 << 20
PARALLEL_BYTES = 128 << 20
"""A smaller file is read before processes would have saved any time."""
MOST_PROCESSES = 4
"""Each takes some 50 MB."""


@dataclass
class Part:
    """What became of the lines of one part. Picklable."""

    lines: int = 0
    blank: int = 0
    results: list[Any] = field(default_factory=list)
    """Of the rows that are kept."""
    rejected: list[tuple[int, str]] = field(default_factory=list)
    """(number within the part from 1, reason)"""
    filtered: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    ground_truth_from: Counter[str] = field(default_factory=Counter)
    without_ground_truth: int = 0
    rewards: dict[float, int] = field(default_factory=dict)
    """How often each occurred."""
    position: int = 0
    """Bytes of the file up to its end."""


Handle = Callable[[Any, float | None, Part], Any]
"""(rollout, its reward, its part, in which notes are counted) -> its result. Raises Filtered or BadRow where it
is not used. A handle has no other state: parts may be handled by different processes."""

Lines = Iterator[tuple[int, bytes | None]]


@dataclass(frozen=True)
class Work:
    """What is done with a line. `strict`: a part ends at its first malformed line."""

    parse: RolloutParser
    handle: Handle
    strict: bool = False

    def part(self, lines: Lines, longest: int, size: float = PART_BYTES) -> Part:
        """Of the next lines, up to so many bytes; with no `lines` in it where there are none."""
        part, parse, handle = Part(), self.parse, self.handle
        rewards, keep = part.rewards, part.results.append
        count = used = 0
        for _, line in lines:
            count += 1
            try:
                if line is None:
                    raise BadRow(f"longer than {longest >> 20} MB")
                used += len(line)
                if not line or line.isspace():
                    part.blank += 1
                else:
                    rollout = parse(line)
                    reward = reward_of(rollout)
                    try:
                        keep(handle(rollout, reward, part))
                    except Filtered as why:
                        part.filtered[str(why)] += 1
                    if reward is not None:
                        rewards[reward] = rewards.get(reward, 0) + 1
            except BadRow as why:
                part.rejected.append((count, str(why)))
                if self.strict:
                    break
            if used >= size:
                break
        part.lines = count
        return part


def parts(reader: LineReader, work: Work) -> Iterator[Part]:
    """All parts of the file, in order."""
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if hasattr(os, "sched_getaffinity") else 1
    if count > 1 and reader.seekable and reader.size >= PARALLEL_BYTES and _may_fork():
        return _at_once(reader, work, count)
    return _in_turn(reader, work)


def _may_fork() -> bool:
    """A fork takes one thread along, and a lock that another one holds for good; a daemon may have no children."""
    return threading.active_count() == 1 and not multiprocessing.current_process().daemon


def _in_turn(reader: LineReader, work: Work) -> Iterator[Part]:
    lines = iter(reader)
    while (part := work.part(lines, reader.longest)).lines:
        part.position = reader.position
        yield part


def _at_once(reader: LineReader, work: Work, count: int) -> Iterator[Part]:
    """Block n of the file by process n modulo their number. One that is ahead waits until its last part is taken."""
    fork = multiprocessing.get_context("fork")  # the handle comes along as it is
    blocks = range(0, reader.size, PART_BYTES)
    ends: list[Connection] = []
    workers = []
    try:
        for number in range(count):
            ours, theirs = fork.Pipe(duplex=False)
            ends.append(ours)
            arguments = (os.getpid(), reader, work, blocks[number::count], theirs)
            workers.append(fork.Process(target=_worker, args=arguments, daemon=True))
            workers[-1].start()
            theirs.close()  # so that the end of the process is the end of the pipe
        for number in range(len(blocks)):
            try:
                part = ends[number % count].recv()
            except EOFError as error:
                raise DataError(
                    f"{reader.path}: a process that read it was killed (by lack of memory?) at "
                    f"{blocks[number] >> 20} MB of {reader.size >> 20} MB"
                ) from error
            if isinstance(part, Exception):
                raise part
            yield part
    finally:
        processes.end(workers)
        for end in ends:
            end.close()


def _worker(parent: int, reader: LineReader, work: Work, blocks: Sequence[int], out: Connection) -> None:
    processes.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too and ends this process
    try:
        with LineReader(reader.path, reader.longest) as own:
            for start in blocks:
                end_of_block = min(start + PART_BYTES, reader.size)
                part = work.part(own.block(start, end_of_block), own.longest, size=float("inf"))
                part.position = end_of_block
                out.send(part)
    except Exception as error:
        out.send(error)
