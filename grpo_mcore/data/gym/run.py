"""One pass over a rollouts file. Every line is handled and counted; an unusable one is reported with its number."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpo_mcore.data.gym.histogram import MOST_VALUES
from grpo_mcore.data.gym.lines import LineReader
from grpo_mcore.data.gym.parts import Handle, Work, parts
from grpo_mcore.data.gym.rollout import RolloutParser
from grpo_mcore.data.gym.summary import Summary
from grpo_mcore.data.gym.whole_file import WholeFile
from grpo_mcore.data.interfaces import DataError

log = logging.getLogger(__name__)

_PRINTED = 20  # malformed lines that are logged; all of them are listed in a file
_EXAMPLE = 2000  # bytes of the first output line that the summary keeps
_WIDTH = 70  # characters of the progress line


class Transformation:
    """One run over a file: `with Transformation(...) as run: run.each(parser, handle)`.

    The output appears when the block ends, if a line was written and nothing was raised. Malformed lines are listed in
    `<output>.rejected.txt`; with `strict` the first one ends the run with a DataError.
    """

    def __init__(self, source: Path, target: Path, *, what: str = "rows", strict: bool = False) -> None:
        self.source, self.target, self.strict = source, target, strict
        self.summary = Summary(str(source), str(target), what)
        self._began = time.monotonic()
        if target.suffix == ".gz":
            raise DataError(f"{target}: the output is not compressed; name it .jsonl")
        if target.exists() and source.exists() and target.samefile(source):
            raise DataError(f"{target}: the output would replace the input; give it another name")
        with ExitStack() as stack:
            self._lines = stack.enter_context(LineReader(source))
            try:
                self.out = stack.enter_context(WholeFile(target))
                self._rejects = stack.enter_context(WholeFile(target.with_name(target.name + ".rejected.txt")))
            except OSError as error:
                raise DataError(f"{target}: cannot be written: {error.strerror}") from error
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self.summary.written:
            self.out.discard()
        if not self.summary.malformed:
            self._rejects.discard()
            if kind is None:
                self._rejects.target.unlink(missing_ok=True)  # from an earlier run
        try:
            self._stack.__exit__(kind, error, tb)
        except OSError as failure:
            error = failure
        if isinstance(error, OSError):
            raise DataError(f"reading {self.source} or writing {self.target} failed: {error}") from error
        self.summary.seconds = time.monotonic() - self._began

    def each(self, parse: RolloutParser, handle: Handle, take: Callable[[Any], None] | None = None) -> None:
        """Handle every rollout and pass the results to `take` (default: `write`) in the order of the file.
        `summary.kept` counts them."""
        summary, take = self.summary, take or self.write
        rewards: dict[float, int] = {}
        progress = Progress(self._lines.size, self.source.name)
        before = 0
        with closing(parts(self._lines, Work(parse, handle, self.strict))) as all_parts:
            for part in all_parts:
                for number, why in part.rejected:
                    self._reject(before + number, why)
                for result in part.results:
                    take(result)
                before += part.lines
                summary.add(part)
                for reward, count in part.rewards.items():
                    rewards[reward] = rewards.get(reward, 0) + count
                if len(rewards) > MOST_VALUES:
                    summary.rewards.add(rewards)
                    rewards.clear()
                progress.show(part.position, summary.rows)
        summary.rewards.add(rewards)
        progress.end()

    def write(self, line: bytes) -> None:
        """Write a line of the output, given without its line end."""
        self.out.write(line)
        self.out.write(b"\n")
        summary = self.summary
        if not summary.written:
            summary.example = line[:_EXAMPLE]
        summary.written += 1

    def _reject(self, number: int, why: str) -> None:
        place = f"{self.source}:{number}: {why}"
        if self.strict:
            raise DataError(f"{place} (--strict: nothing is written)")
        summary = self.summary
        summary.malformed += 1
        if summary.malformed <= _PRINTED:
            log.warning(place)
        if summary.malformed == _PRINTED:
            log.warning("  more are not shown; all are listed in a file at the end")
        summary.rejected = str(self.target.with_name(self._rejects.target.name))
        self._rejects.write((place + "\n").encode(errors="replace"))


class Progress:
    """The progress of a pass over a file: an updated line on a terminal, else a line every half minute, on stderr."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._moves = sys.stderr.isatty()
        self._every = 0.5 if self._moves else 30.0
        self._began = time.monotonic()
        self._next = self._began + self._every

    def show(self, position: int, rows: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        text = f"{rows:,} rows  {rows / (now - self._began):,.0f} rows/s"
        if self._size:
            share = min(position / self._size, 1.0)
            left = (now - self._began) * (1 - share) / max(share, 1e-6)
            text = f"{share:4.0%}  {text}  {left:.0f} s left"
        start, end = ("\r", "") if self._moves else (f"{self._name}: ", "\n")
        sys.stderr.write(start + text.ljust(_WIDTH) + end)
        sys.stderr.flush()

    def end(self) -> None:
        if self._moves and time.monotonic() >= self._began + self._every:
            sys.stderr.write("\r" + " " * _WIDTH + "\r")
            sys.stderr.flush()
