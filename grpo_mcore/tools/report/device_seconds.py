"""Accounts for the time of each device of a run: every second of it counts for exactly one activity.

The driver's phases say what the policy's ranks do, the engines' calls what the engines do. Where several go on at a
time on one device, the first in ORDER counts.
"""

import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from grpo_mcore.observe.spans import DRIVER, parts_of

ORDER = (
    "validation", "checkpoint", "refit", "train", "log-probs", "prepare", "generate",
    "wait for rewards", "wait for samples", "wait for training", "other",
)  # fmt: skip
"""Activities of a device. Of several at a time the first one counts."""

WAITS = ("wait for rewards", "wait for samples", "wait for training", "other")
"""Those in which it computes nothing."""

OF_ALL = {"validation": "validation", "refit": "refit"}
OF_POLICY = {"checkpoint": "checkpoint", "train": "train", "logprobs": "log-probs", "prepare": "prepare"}
WAIT_OF_POLICY = {"generate": "wait for samples", "reward": "wait for rewards"}
WAIT_OF_ENGINE = {
    "generate": "wait for samples", "reward": "wait for rewards", "train": "wait for training",
    "logprobs": "wait for training", "prepare": "wait for training", "checkpoint": "checkpoint",
}  # fmt: skip
"""The driver's phase -> what a device does meanwhile."""

JOINED_ABOVE = 60
"""Number of equal spans of a process in a step up to which each is shown by itself."""

Span = tuple[float, float, str, int]
"""(start, end, what, step)."""
_Edge = tuple[float, int, int, str, int]
"""(moment, 1 where a span begins and -1 where it ends, place in ORDER, what, step)."""


@dataclass(frozen=True)
class DeviceSeconds:
    """Seconds by device and by what it did, and by step; of each device they add up to `wall`."""

    wall: float
    by_device: dict[str, dict[str, float]]
    by_step: dict[int, dict[str, float]]

    def total(self) -> dict[str, float]:
        """Return the seconds of all devices by what they did, in ORDER."""
        sums = {activity: sum(seconds.get(activity, 0.0) for seconds in self.by_device.values()) for activity in ORDER}
        return {activity: seconds for activity, seconds in sums.items() if seconds}


def device_seconds(events: Iterable[Mapping[str, Any]]) -> DeviceSeconds:
    """Account for the time from each start of the run to its last event."""
    wall, by_device, by_step = 0.0, defaultdict(lambda: defaultdict(float)), defaultdict(lambda: defaultdict(float))  # type: ignore[var-annotated]
    for begin, by_process in _starts(events):
        if not by_process:
            continue
        start, end = begin["time"], max(spans.end for spans in by_process.values())
        wall += end - start
        driver = by_process.get(DRIVER, _Spans())
        of_driver = cache(lambda trains, generates, driver=driver: edges_of(_of_driver(driver, trains, generates)))
        for device, processes in begin["devices"].items():
            trains = any(name.startswith("policy") for name in processes)
            generates = any(not name.startswith("policy") for name in processes)
            calls = edges_of(span for name in processes if name in by_process for span in by_process[name])
            for first, last, activity, step in covered(start, end, sorted([*of_driver(trains, generates), *calls])):
                by_device[device][activity] += last - first
                by_step[step][activity] += last - first
    return DeviceSeconds(wall, {name: dict(value) for name, value in by_device.items()}, _plain(by_step))


def _plain(by_step: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    return {step: dict(by_step[step]) for step in sorted(by_step)}


class _Spans:
    """The spans of one process: a long run has millions."""

    def __init__(self) -> None:
        self._starts, self._ends, self._steps = array("d"), array("d"), array("q")
        self._what: list[str] = []  # the same few texts
        self.end = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        last = event["start"] + event["seconds"]
        self._starts.append(event["start"])
        self._ends.append(last)
        self._steps.append(event["step"])
        self._what.append(sys.intern(event["what"]))
        self.end = max(self.end, last)

    def __iter__(self) -> Iterator[Span]:
        return zip(self._starts, self._ends, self._what, self._steps, strict=True)


def _starts(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], dict[str, _Spans]]]:
    """Yield each start of the run with its spans by process."""
    begin: Mapping[str, Any] | None = None
    by_process: dict[str, _Spans] = defaultdict(_Spans)
    for event in events:
        if event["what"] == "begin":
            if begin is not None:
                yield begin, by_process
            begin, by_process = event, defaultdict(_Spans)
        elif "seconds" in event:
            by_process[event["process"]].add(event)
    if begin is not None:
        yield begin, by_process


def _of_driver(spans: Iterable[Span], trains: bool, generates: bool) -> Iterator[Span]:
    """Yield what the driver's spans say about a device that trains, generates, or both."""
    for first, last, activity, step in spans:
        if activity in OF_ALL:
            yield first, last, OF_ALL[activity], step
        elif trains and activity in OF_POLICY:
            yield first, last, OF_POLICY[activity], step
        elif trains and activity in WAIT_OF_POLICY:
            yield first, last, WAIT_OF_POLICY[activity], step
        elif generates and activity in WAIT_OF_ENGINE:
            yield first, last, WAIT_OF_ENGINE[activity], step


def edges_of(spans: Iterable[Span]) -> list[_Edge]:
    """Return the sorted beginnings and ends of spans."""
    ranks = {activity: rank for rank, activity in enumerate(ORDER)}
    return sorted(
        (moment, opens, ranks[activity], activity, step)
        for first, last, activity, step in spans
        if last > first and activity in ranks  # those of a newer version, or damaged, are "other"
        for moment, opens in ((first, 1), (last, -1))
    )


def covered(start: float, end: float, edges: Sequence[_Edge]) -> Iterator[Span]:
    """Cover [start, end] without gap or overlap: at each moment the open span that is first in ORDER, else "other" of
    the step that comes next. `edges`: of the spans, sorted; those outside count as at the border."""
    edges = [(min(max(moment, start), end), *rest) for moment, *rest in edges]  # type: ignore[misc]
    steps = [(moment, step) for moment, opens, _, _, step in edges if opens == 1]
    open_now: dict[tuple[int, str, int], int] = defaultdict(int)
    covered_to, upcoming = start, 0
    for moment, opens, rank, activity, step in [*edges, (end, -1, 0, "", 0)]:
        if moment > covered_to:
            while upcoming < len(steps) - 1 and steps[upcoming][0] < moment:
                upcoming += 1
            current = min(open_now, default=None)
            if current is not None:
                yield covered_to, moment, current[1], current[2]
            else:
                yield covered_to, moment, "other", steps[upcoming][1] if steps else 0
            covered_to = moment
        if activity:
            key = (rank, activity, step)
            open_now[key] += opens
            if not open_now[key]:
                del open_now[key]


def step_spans(events: Iterable[Mapping[str, Any]], steps: Collection[int]) -> dict[int, list[list[Any]]]:
    """Return the spans of these steps as [process, what, start, seconds], relative to the step's first one. Spans of a
    process that are equal and near each other are joined where there are more than JOINED_ABOVE of them."""
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    chosen = set(steps)
    for event in events:
        if "seconds" in event and event["step"] in chosen:
            by_step[event["step"]] += [event, *parts_of(event)]
    return {step: _joined(by_step[step]) for step in sorted(by_step)}


def _joined(spans: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    start = min(span["start"] for span in spans)
    gap = (max(span["start"] + span["seconds"] for span in spans) - start) / JOINED_ABOVE
    equal = Counter((span["process"], span["what"]) for span in spans)
    by_process: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span["start"]):
        first, last = span["start"] - start, span["start"] + span["seconds"] - start
        same = by_process[span["process"], span["what"]]
        if same and first - same[-1][3] < gap and equal[span["process"], span["what"]] > JOINED_ABOVE:
            same[-1][3] = max(same[-1][3], last)
        else:
            same.append([span["process"], span["what"], first, last])
    rows = [row for same in by_process.values() for row in same]
    return [[process, activity, round(first, 4), round(last - first, 4)] for process, activity, first, last in rows]
