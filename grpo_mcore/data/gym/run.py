"""One pass over a rollouts file: every line is handled, counted, and where it is unusable reported with its number."""

from __future__ import annotations

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

_SAID = 20  # malformed lines that are printed; all of them are listed in a file
_EXAMPLE = 2000  # bytes of the first line that are kept to be shown
_WIDTH = 70  # of the moving line


class Transformation:
    """The frame of one run: `with Transformation(...) as run: run.each(parser, handle)`.

    The output appears when the block ends, if a line was written and nothing was raised. Lines that are malformed are
    listed in `<output>.rejected.txt`; with `strict` the first one ends the run with a DataError.
    """

    def __init__(self, source: Path, target: Path, *, what: str = "rows", strict: bool = False) -> None:
        self.source, self.target, self.strict = source, target, strict
        self.summary = Summary(str(source), str(target), what)
        self._began = time.monotonic()
        if target.suffix == ".gz":
            raise DataError(f"{target}: the output is not compressed; name it .jsonl")
        if target.exists() and source.exists() and target.samefile(source):
            raise DataError(f"{target}: the output would take the place of the input; give it another name")
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
                self._rejects.target.unlink(missing_ok=True)  # of an earlier run
        try:
            self._stack.__exit__(kind, error, tb)
        except OSError as failure:
            error = failure
        if isinstance(error, OSError):
            raise DataError(f"reading {self.source} or writing {self.target} failed: {error}") from error
        self.summary.seconds = time.monotonic() - self._began

    def each(self, parse: RolloutParser, handle: Handle, take: Callable[[Any], None] | None = None) -> None:
        """Handles every rollout. `take` (default: `write`) gets the results in the order of the file; `summary.kept`
        counts them."""
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
        """A line of the output, without its end."""
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
        if summary.malformed <= _SAID:
            print(place, file=sys.stderr)
        if summary.malformed == _SAID:
            print("  more are not shown; all are listed in a file at the end", file=sys.stderr)
        summary.rejected = str(self.target.with_name(self._rejects.target.name))
        self._rejects.write((place + "\n").encode(errors="replace"))


class Progress:
    """How far a pass over a file has come: a moving line on a terminal, else a line every half minute."""

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
        print(start + text.ljust(_WIDTH), end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._moves and time.monotonic() >= self._began + self._every:
            print("\r" + " " * _WIDTH + "\r", end="", file=sys.stderr, flush=True)
