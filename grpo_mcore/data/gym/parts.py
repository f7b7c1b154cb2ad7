"""A rollouts file processed in parts of two megabytes, in this process or by several at once. The results come in the
order of the file either way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from grpo_mcore import processes
from grpo_mcore.data.gym.lines import LineReader
from grpo_mcore.data.gym.rollout import BadRow, Filtered, RolloutParser, reward_of
from grpo_mcore.data.interfaces import DataError

PART_BYTES = 2 << 20
PARALLEL_BYTES = 128 << 20
"""Smaller files are read by one process: starting more would save no time."""
MOST_PROCESSES = 4
"""Each takes about 50 MB."""


@dataclass
class Part:
    """The results and counts of one part's lines. Picklable."""

    lines: int = 0
    blank: int = 0
    results: list[Any] = field(default_factory=list)
    """The results of the rows that are kept."""
    rejected: list[tuple[int, str]] = field(default_factory=list)
    """(number within the part from 1, reason)"""
    filtered: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    ground_truth_from: Counter[str] = field(default_factory=Counter)
    without_ground_truth: int = 0
    rewards: dict[float, int] = field(default_factory=dict)
    """Counts of the rewards."""
    position: int = 0
    """Offset of its end in the file."""


Handle = Callable[[Any, float | None, Part], Any]
"""(rollout, its reward, its part, which counts notes) -> its result. Raises Filtered or BadRow for a rollout that is
not used. A handle has no other state: parts may be handled by different processes."""

Lines = Iterator[tuple[int, bytes | None]]


@dataclass(frozen=True)
class Work:
    """The parser and handler of lines. With `strict`, a part ends at its first malformed line."""

    parse: RolloutParser
    handle: Handle
    strict: bool = False

    def part(self, lines: Lines, longest: int, size: float = PART_BYTES) -> Part:
        """Handle the next lines up to `size` bytes. The part has `lines == 0` at the end of the file."""
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


def parts(reader: LineReader, work: Work) -> Generator[Part, None, None]:
    """Yield all parts of the file, in order."""
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if hasattr(os, "sched_getaffinity") else 1
    if count > 1 and reader.seekable and reader.size >= PARALLEL_BYTES and _can_fork():
        return _parallel(reader, work, count)
    return _serial(reader, work)


def _can_fork() -> bool:
    """Return whether forking is safe: a fork keeps one thread and leaves locks of the others locked for ever; a daemon
    process may have no children."""
    return threading.active_count() == 1 and not multiprocessing.current_process().daemon


def _serial(reader: LineReader, work: Work) -> Generator[Part, None, None]:
    lines = iter(reader)
    while (part := work.part(lines, reader.longest)).lines:
        part.position = reader.position
        yield part


def _parallel(reader: LineReader, work: Work, count: int) -> Generator[Part, None, None]:
    """Let process n modulo `count` handle block n. A process that is ahead waits until its last part is received."""
    fork = multiprocessing.get_context("fork")  # the handle need not be picklable
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
            theirs.close()  # so that the pipe ends when the process ends
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too and ends this process
    try:
        with LineReader(reader.path, reader.longest) as own:
            for start in blocks:
                end_of_block = min(start + PART_BYTES, reader.size)
                part = work.part(own.block(start, end_of_block), own.longest, size=float("inf"))
                part.position = end_of_block
                out.send(part)
    except Exception as error:
        out.send(error)
