"""The console of a run: banner, table of steps, validation, samples, and the paths of its files."""

import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from grpo_mcore.base.clock import REAL
from grpo_mcore.base.text import escaped
from grpo_mcore.observe.append_file import AppendFile
from grpo_mcore.observe.console.colors import painted
from grpo_mcore.observe.console.console_stream import UnfailingStream
from grpo_mcore.observe.console.step_table import HEADER_EVERY, StepRow, header_lines, row_line

WIDTH = 100
LONGEST_TEXT = 2000
"""Maximum number of characters shown of a prompt or response."""
PROGRESS_S = 0.2
BAR = 20
"""Characters of a progress bar."""


@dataclass(frozen=True)
class ShownSample:
    """One validation sample as text. `answer`: found in the response; `reward`: None if scoring failed."""

    uid: str
    prompt: str
    response: str
    truth: str
    answer: str | None
    reward: float | None
    reason: str


class RunConsole:
    """Prints plain lines to `stream` (standard output), and a progress line if that is a terminal. `kept`: a file that
    gets the lines too."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = REAL.now, kept: AppendFile | None = None
    ) -> None:
        self._kept = kept
        self._stream = cast(TextIO, UnfailingStream(sys.stdout if stream is None else stream))
        self._clock = clock
        self._moves = self._stream.isatty()
        self._moving = 0  # characters of the moving line that is on the screen
        self._moved_at = float("-inf")
        self._rows = 0
        self._progress_from = (sys.maxsize, 0.0)  # (done, time) when the phase began to show

    def banner(self, title: str, facts: Mapping[str, object]) -> None:
        """Print what runs: `facts` by name, such as the batch equation, the layout, the engines, the model size."""
        self._print("", f"== {title} ".ljust(WIDTH, "="), *_listed(facts), "=" * WIDTH, "")

    def note(self, text: str) -> None:
        """Print a line, or a few."""
        self._print(text)
        self._rows = 0  # the table has been interrupted

    def step(self, row: StepRow) -> None:
        """Print a line of the table; the header is repeated every 20 lines and after anything else."""
        if self._rows % HEADER_EVERY == 0:
            self._print(*header_lines(row.computed_tokens))
        self._rows += 1
        self._print(row_line(row), *row.notes)

    def validation(self, step: int, metrics: Mapping[str, float | None], seconds: float) -> None:
        """Print the metrics of a validation as one line of the table: what no graded reward has, and no failed samples,
        are left out."""
        graded = metrics.get("accuracy") is None and metrics.get("reward") is not None
        text = "  ".join(
            f"{name} {'-' if value is None else f'{value:.4g}'}"
            for name, value in metrics.items()
            if (value or name != "num_failed_samples") and not (graded and value is None)
        )
        self._print(*textwrap.wrap(f"validation after step {step}: {text}  ({seconds:.1f} s)", WIDTH))

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Print validation samples, each text up to LONGEST_TEXT characters."""
        for number, sample in enumerate(samples, start=1):
            reward = "not scored" if sample.reward is None else f"{sample.reward:g}"
            self._print(
                f"-- validation sample {number} of {len(samples)} after step {step} ".ljust(WIDTH, "-"),
                *_text("prompt", sample.prompt),
                *_text("response", sample.response),
                *_answer(sample),
                *_text("truth", sample.truth),
                *_text("reward", f"{reward} ({sample.reason})" if sample.reason else reward),
            )
        if samples:
            self._print("-" * WIDTH)
            self._rows = 0

    def progress(self, title: str, done: int, total: int) -> None:
        """Show the progress of a long phase, such as generation, with the time left; nothing if the output is not a
        terminal."""
        now = self._clock()
        if not self._moves or (now - self._moved_at < PROGRESS_S and done < total):
            return
        self._moved_at = now
        if done <= self._progress_from[0]:  # a phase begins
            self._progress_from = (done, now)
        before, since = self._progress_from
        filled = BAR * done // max(total, 1)
        line = f"{title}: {done} / {total} {'━' * filled}{'─' * (BAR - filled)}"
        if done > before:
            line += f" {(now - since) / (done - before) * (total - done):.0f} s left"
        line = line[: self._columns() - 1]  # a line that wraps could not be written over
        self._stream.write("\r" + line.ljust(self._moving))
        self._stream.flush()
        self._moving = len(line)

    def _columns(self) -> int:
        try:
            return min(os.get_terminal_size(self._stream.fileno()).columns or WIDTH, WIDTH)
        except (OSError, ValueError):  # it has no size
            return WIDTH

    def summary(
        self,
        title: str,
        facts: Mapping[str, object],
        paths: Mapping[str, Path | str | None],
        commands: Mapping[str, str] | None = None,
    ) -> None:
        """Print the results and the paths of a run, and `commands` that help next, by what each does. A path of None
        does not exist in this run."""
        where = {name: path for name, path in paths.items() if path is not None}
        self._print("", f"== {title} ".ljust(WIDTH, "="), *_listed(facts))
        if where:
            self._print("", "where everything lies", *_listed(where))
        if commands:
            self._print("", "what to do next", *_listed(commands))
        self._print("=" * WIDTH)

    def _print(self, *lines: str) -> None:
        if self._moving:
            self._stream.write("\r" + " " * self._moving + "\r")
            self._moving = 0
        lines = tuple(map(escaped, lines))
        shown = [painted(line, "bold", self._stream) if line.startswith("== ") else line for line in lines]
        self._stream.write("\n".join(shown) + "\n")
        self._stream.flush()
        if self._kept is not None:
            self._kept.write("\n".join(lines))


def _listed(facts: Mapping[str, object]) -> list[str]:
    width = max((len(name) for name in facts), default=0)
    lines = []
    for name, value in facts.items():
        wrapped = textwrap.wrap(str(value), WIDTH - width - 4, break_on_hyphens=False, break_long_words=False)
        for index, part in enumerate(wrapped or [""]):
            lines.append(f"  {name if index == 0 else '':<{width}}  {part}")
    return lines


def _answer(sample: ShownSample) -> list[str]:
    """Return the lines of the answer found in a response. A reward without one looks at the whole response."""
    if sample.answer is None and sample.reward:
        return []
    return _text("answer", "none found" if sample.answer is None else sample.answer)


def _text(name: str, text: str) -> list[str]:
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} ... ({len(text) - LONGEST_TEXT:,} characters more)"
    lines = []
    for line in text.split("\n") or [""]:
        lines += textwrap.wrap(line, WIDTH - 12, replace_whitespace=False, drop_whitespace=False) or [""]
    return [f"{name if index == 0 else '':>10}  {line}".rstrip() for index, line in enumerate(lines)]
