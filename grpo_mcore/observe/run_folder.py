"""Read the files of a run's log folder, whatever has become of them.

Every tool that looks at a run reads its files through these functions. What is damaged is left out, and said once with
the file and the reason. Values are checked here, so that no tool need check them again.
"""

import errno
import json
import logging
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec

from grpo_mcore.observe.spans import EVENTS_FILE

log = logging.getLogger(__name__)

TOKENS_FILE = "tokens.jsonl"
DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""Errors that a damaged file may cause in whoever reads it."""
LARGEST = 1e100
"""Numbers beyond it are taken for damage: sums and squares of them would not be finite."""
LAST_STEP, LAST_TIME = 2**53, 1e12
Step = Annotated[int, msgspec.Meta(ge=0, le=LAST_STEP)]
Time = Annotated[float, msgspec.Meta(ge=-LAST_TIME, le=LAST_TIME)]
Algorithm = Literal["grpo", "sft", "dpo", "rm"]
_FIELDS: dict[str, list[Any]] = {
    "metrics": [("step", Step), ("prefix", str, ""), ("unix_time", Time, 0.0)],
    "event": [("what", str), ("time", Time, 0.0)],
    "span": [("process", str), ("start", Time), ("seconds", Time), ("step", Step), ("parts", list[Time], [])],
    "begin": [("time", Time), ("devices", dict[str, list[str]]), ("algorithm", Algorithm, "grpo")],
    "restart": [("time", Time), ("process", str), ("why", str)],
    "tail": [("step", Step), ("samples", list[Any])],
}
FORMS = {name: msgspec.defstruct(name, fields) for name, fields in _FIELDS.items()}
"""Fields that readers rely on, of a line of metrics and of an event (`SpanFile`)."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for what is no regular file: to open a pipe would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


@lru_cache(maxsize=256)
def say_left_out(name: str, reason: str) -> None:
    """Say what is left out, and why: once, though `watch` reads the files every few seconds."""
    log.warning("%s is left out: %s", name, reason)


def reason_of(error: BaseException) -> str:
    """Return an error in words for a message that names the file already."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def damage_raised_as(kind: type[Exception], path: Path) -> Iterator[None]:
    """Raise the errors that a damaged file causes in the block as `kind`, with the file's name."""
    try:
        yield
    except kind:
        raise
    except DAMAGE as error:
        raise kind(f"{path} is damaged: {reason_of(error)}") from error


@contextmanager
def left_out_if_damaged(path: Path) -> Iterator[None]:
    """Say that a file is left out where it is damaged. The rest of the block is skipped."""
    try:
        yield
    except DAMAGE as error:
        say_left_out(str(path), reason_of(error))


def read_lines(path: Path, problem_of: Callable[[Any], str | None]) -> Iterator[Any]:
    """Yield the values of a file with JSON on every line. Lines of which `problem_of` returns a problem are left out,
    and so is a file that cannot be read. A file that does not exist has no lines."""
    bad, first, reason = 0, 0, ""
    try:
        with open_file(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                try:
                    value = json.loads(line, object_pairs_hook=_with_shared_names, parse_constant=_refuse)
                    problem = problem_of(value)
                except (ValueError, RecursionError) as error:
                    problem = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it is not JSON"
                if problem is None:
                    yield value
                else:
                    bad, first, reason = bad + 1, first or number, reason or problem
    except FileNotFoundError:
        return
    except OSError as error:
        say_left_out(str(path), reason_of(error))
    if bad:
        others = f"; so are {bad - 1} others of its lines" if bad > 1 else ""
        say_left_out(f"{path}, line {first}", f"{reason}{others}")


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is no such file, or it is damaged."""
    try:
        with open_file(path) as file:
            value = json.loads(file.read())
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        reason = reason_of(error) if isinstance(error, OSError) or type(error) is ValueError else "it is not JSON"
        say_left_out(str(path), reason)
        return None
    return value


def is_number(value: Any, largest: float = LARGEST) -> bool:
    """Return whether a value of JSON is a number with which one can calculate."""
    return type(value) in (int, float) and abs(value) <= largest


def read_metrics(path: Path, prefix: str) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl` with this prefix, by step. Of several lines of a step the last counts.
    Where a run went back to an earlier step and trained on, the steps and validations that it went back from are left
    out. Numbers that are not finite are None."""
    by_step: dict[int, dict[str, Any]] = {}
    trained = -math.inf  # the last step
    for row in read_lines(path, _problem_of_metrics):
        if row.get("prefix") == "train":
            if row["step"] < trained:
                by_step = {step: kept for step, kept in by_step.items() if step < row["step"]}
            trained = row["step"]
        if row.get("prefix") == prefix:
            finite = {name: value if name == "prefix" or is_number(value) else None for name, value in row.items()}
            by_step[row["step"]] = by_step.get(row["step"], {}) | finite
    return [by_step[step] for step in sorted(by_step)]


def _problem_of_metrics(row: Any) -> str | None:
    if (problem := _mismatch(row, FORMS["metrics"])) is not None:
        return problem
    return _mismatch({name: value for name, value in row.items() if name != "prefix"}, dict[str, float | None])


def _mismatch(value: Any, form: Any) -> str | None:
    """Return what tells a value of JSON from a form of msgspec, None if it has the form."""
    try:
        msgspec.convert(value, form)
    except (msgspec.ValidationError, OverflowError) as error:
        return str(error)
    return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _with_shared_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Every line has the same names: they are held once."""
    return {sys.intern(name): value for name, value in pairs}


class EventFile:
    """The events of a run's log folder. A long run has millions: each iteration reads the file again, and holds one."""

    def __init__(self, run: Path) -> None:
        self._path = run / EVENTS_FILE

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return read_lines(self._path, _problem_of_event)


def _problem_of_event(event: Any) -> str | None:
    if (problem := _mismatch(event, FORMS["event"])) is not None:
        return problem
    return _mismatch(event, FORMS["span"] if "seconds" in event else FORMS.get(event["what"], FORMS["event"]))


def read_token_texts(folder: Path) -> dict[int, str]:
    """Return the text of each token id that a run has seen. `folder`: the one of its samples."""
    return dict(read_lines(folder / TOKENS_FILE, lambda pair: _mismatch(pair, tuple[Step, str])))
