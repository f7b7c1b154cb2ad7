"""One pass over a rollouts file. Every line is handled and counted; an unusable one is reported with its number."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from grpo_mcore.data.gym.files import LONGEST_LINE, read_lines, whole_file
from grpo_mcore.data.gym.rollout import BadRow, Filtered, Rollout, parse_rollout, reward_of
from grpo_mcore.data.gym.summary import Summary
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.rollout.messages import MessageError, UnknownItem

log = logging.getLogger(__name__)

_PRINTED = 20  # malformed lines that are logged; all of them are listed in a file
_EXAMPLE = 2000  # bytes of the first output line that the summary keeps

Handle = Callable[[Rollout, float | None], Any]
"""(rollout, its reward) -> its result. Raises Filtered or BadRow for a rollout that is not used."""


class Transformation:
    """The pass over one file, made by `transformation`."""

    def __init__(self, source: Path, out: BinaryIO, rejects: BinaryIO, summary: Summary, strict: bool) -> None:
        self.source, self.summary = source, summary
        self._out, self._rejects, self._strict = out, rejects, strict

    def each(self, handle: Handle, take: Callable[[Any], None] | None = None) -> None:
        """Handle every rollout and pass the results to `take` (default: `write`). `summary.kept` counts them."""
        summary, take = self.summary, take or self.write
        for number, line in read_lines(self.source):
            if line is not None and not line.strip():
                summary.blank += 1
                continue
            summary.rows += 1
            try:
                if line is None:
                    raise BadRow(f"longer than {LONGEST_LINE >> 20} MB")
                rollout = parse_rollout(line)
                reward = reward_of(rollout)
                try:
                    take(handle(rollout, reward))
                    summary.kept += 1
                except (Filtered, UnknownItem) as problem:
                    summary.filtered[str(problem)] += 1
                if reward is not None:
                    summary.rewards.add(reward)
            except (BadRow, MessageError) as problem:
                self._reject(number, str(problem))

    def write(self, line: bytes) -> None:
        """Write a line of the output, given without its line end."""
        self._out.write(line)
        self._out.write(b"\n")
        if not self.summary.written:
            self.summary.example = line[:_EXAMPLE]
        self.summary.written += 1

    def _reject(self, number: int, reason: str) -> None:
        message = f"{self.source}:{number}: {reason}"
        if self._strict:
            raise DataError(f"{message} (--strict: nothing is written)")
        self.summary.malformed += 1
        if self.summary.malformed <= _PRINTED:
            log.warning(message)
        if self.summary.malformed == _PRINTED:
            log.warning("  more are not shown; all are listed in a file at the end")
        self._rejects.write((message + "\n").encode(errors="replace"))


@contextmanager
def transformation(source: Path, target: Path, *, unit: str = "rows", strict: bool = False) -> Iterator[Transformation]:
    """Open the files of a transformation: `with transformation(...) as run: run.each(handle)`.

    The output appears when the block ends, if a line was written and nothing was raised. Malformed lines are listed in
    `<output>.rejected.txt`; with `strict` the first one ends the run with a DataError.
    """
    if not source.exists():
        raise DataError(f"{source}: cannot be read: No such file or directory")
    if target.suffix == ".gz":
        raise DataError(f"{target}: the output is not compressed; name it .jsonl")
    if target.exists() and source.exists() and target.samefile(source):
        raise DataError(f"{target}: the output would replace the input; give it another name")
    started_at = time.monotonic()
    summary = Summary(str(source), str(target), unit)
    listed = target.with_name(target.name + ".rejected.txt")
    try:
        with whole_file(target) as out, whole_file(listed) as rejects:
            yield Transformation(source, out, rejects, summary, strict)
    except OSError as error:
        raise DataError(f"reading {source} or writing {target} failed: {error}") from error
    if summary.malformed:
        summary.rejected = str(listed)
    else:
        listed.unlink(missing_ok=True)  # from an earlier run
    summary.seconds = time.monotonic() - started_at
