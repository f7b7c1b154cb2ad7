"""The events of a run by process: what each did, from when, for how long. A file that only grows.

`report` makes the timeline and the ledger of device-seconds of it, `watch` the line of what goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.observe.append_file import AppendFile

EVENTS_FILE = "events.jsonl"
DRIVER = "driver"
MERGE_S = 0.05
"""Longest gap between two equal phases of the driver that are written as one: it takes a group at a time."""


class SpanFile:
    """Writes events.jsonl. Each line is an object with `what`, and:

    begin      time, devices (name -> processes on it), colocated, algorithm ("grpo", "rm", ...): written when a run
               starts, and when it resumes
    restart    time, process, why
    tail       step, samples: the last ones to end, see `step_groups.tail`
    all others process, start (unix seconds), seconds, step (the one that is being trained; 0 in the start)

    "train" of a policy rank also has `parts`: the seconds of each micro-batch and, last, of the update.
    """

    def __init__(self, folder: Path, *, step: Callable[[], int], clock: Clock = REAL) -> None:
        """`step`: returns the number of the step that is being trained."""
        self._file = AppendFile(folder / EVENTS_FILE)
        self._clock, self._to_unix = clock, clock.unix() - clock.now()
        self._step = step
        self._open: tuple[str, float, float] | None = None  # the driver's last phase: name, start, end

    def begin(self, devices: Mapping[str, Sequence[str]], colocated: bool, algorithm: str) -> None:
        """Record which processes run on which device."""
        now = round(self._clock.unix(), 3)
        self._write(what="begin", time=now, devices=dict(devices), colocated=colocated, algorithm=algorithm)

    def span(self, process: str, name: str, start: float, end: float) -> None:
        """Record that `process` did `name` from `start` to `end`, of the clock."""
        start_unix, seconds = round(start + self._to_unix, 4), round(end - start, 4)
        self._write(what=name, process=process, start=start_unix, seconds=seconds, step=self._step())

    def optimizer_step(self, process: str, times: Sequence[float]) -> None:
        """Record an optimizer step of a policy rank. `times`: see `TrainReport`."""
        parts = [round(end - start, 4) for start, end in pairwise(times)]
        start, seconds = round(times[0], 4), round(times[-1] - times[0], 4)
        self._write(what="train", process=process, start=start, seconds=seconds, step=self._step(), parts=parts)

    def phase(self, name: str, start: float, end: float) -> None:
        """Record a phase of the driver. Equal ones that follow each other become one."""
        if self._open is not None and self._open[0] == name and start - self._open[2] < MERGE_S:
            self._open = (name, self._open[1], end)
            return
        self.flush()
        self._open = (name, start, end)

    def flush(self) -> None:
        """Write the driver's last phase, at the end of a step. A file that was removed is made anew."""
        self._file.restore()
        if self._open is not None:
            self.span(DRIVER, *self._open)
            self._open = None

    def tail(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record the samples that held the step that is being trained."""
        self._write(what="tail", step=self._step(), samples=list(samples))

    def restarted(self, process: str, reason: str) -> None:
        self._write(what="restart", process=process, why=reason, time=round(self._clock.unix(), 3))

    def close(self) -> None:
        """May be called again."""
        self.flush()
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write_json(fields)


def parts_of(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the spans of the parts of an event, none if it has none."""
    start = event["start"]
    for number, seconds in enumerate(parts := event.get("parts", ()), start=1):
        span = "train/update" if number == len(parts) else "train/micro-batch"
        yield {name: event[name] for name in ("process", "step")} | {"what": span, "start": start, "seconds": seconds}
        start += seconds
