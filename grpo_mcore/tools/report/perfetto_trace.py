"""The events of a run in Chrome's trace format, which Perfetto opens."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_mcore.observe.run_folder import left_out_if_damaged, open_file
from grpo_mcore.observe.spans import parts_of

ROUNDING_US = 300
"""What a span may end after the one around it because the events are rounded."""
PROFILE_PID = 1000
"""Number of the first process of the first profile; each profile has a range of as many."""


def chrome_trace(events: Iterable[Mapping[str, Any]], profiles: Iterable[Path] = ()) -> str:
    """Return the trace as JSON: one row for each process of the run, times in microseconds since its start.
    `profiles`: traces of torch's profiler, which follow as processes of their own on the same clock."""
    spans = [part for event in events if "seconds" in event for part in (event, *parts_of(event))]
    start = min((span["start"] for span in spans), default=0.0)
    rows: dict[str, int] = {}
    complete = []
    for name, ts, dur, span in _in_rows(spans, start):
        complete.append(
            {
                "ph": "X",
                "name": span["what"],
                "cat": span["what"].partition("/")[0],
                "pid": 1,
                "tid": rows.setdefault(name, len(rows) + 1),
                "ts": ts,
                "dur": dur,
                "args": {"step": span["step"]},
            }
        )
    names = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "run"}}]
    names += [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}} for name, row in rows.items()
    ]
    instants = [
        {
            "ph": "i",
            "s": "g",
            "name": f"{event['process']} is restarted: {event['why']}",
            "pid": 1,
            "tid": rows.get(event["process"], 0),
            "ts": round(1e6 * (event["time"] - start)),
        }
        for event in events
        if event["what"] == "restart"
    ]
    profiled: list[dict[str, Any]] = []
    for number, path in enumerate(profiles):
        with left_out_if_damaged(path):
            profiled += list(_profile(path, number, start))
    return json.dumps({"traceEvents": [*names, *complete, *instants, *profiled], "displayTimeUnit": "ms"})


def _in_rows(spans: Sequence[Mapping[str, Any]], start: float) -> Iterator[tuple[str, int, int, Mapping[str, Any]]]:
    """Yield (row, begin, duration, span) in microseconds after `start`. The format wants the spans of a row to nest, so
    those of a process that overlap otherwise, such as two calls at a time to an engine, get rows of their own."""
    open_ends: dict[str, list[list[int]]] = {}  # process -> of each of its rows, when the spans open in it end
    for span in sorted(spans, key=lambda span: (span["start"], -span["seconds"])):
        begin = round(1e6 * (span["start"] - start))
        end = begin + round(1e6 * span["seconds"])
        rows = open_ends.setdefault(span["process"], [])
        for row in rows:
            while row and row[-1] <= begin:
                row.pop()
            if not row or end <= row[-1] + ROUNDING_US:
                break
        else:
            rows.append(row := [])
        if row:
            end = min(end, row[-1])
        number = next(index for index, other in enumerate(rows) if other is row)
        row.append(end)
        name = span["process"] if number == 0 else f"{span['process']} ({number + 1})"
        yield name, begin, end - begin, span


def _profile(path: Path, number: int, start: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a profile, moved to the clock of the run, which started at `start`. The `number` keeps its
    processes apart from those of other profiles. Torch names some processes and threads by words, where the format
    has numbers: they get numbers with names."""
    with open_file(path) as file:
        trace = json.loads(file.read())
    offset = trace.get("baseTimeNanoseconds", 0) / 1e3 - 1e6 * start
    profile = f"{path.stem}, {path.parent.name.replace('_', ' ')}"
    events = [event for event in trace["traceEvents"] if event.get("name") not in ("process_name", "process_labels")]
    pids = {
        pid: PROFILE_PID * (number + 1) + index for index, pid in enumerate(dict.fromkeys(e.get("pid") for e in events))
    }
    for pid, numbered in pids.items():
        args = {"name": f"{profile}: {pid}"}
        yield {"ph": "M", "name": "process_name", "pid": numbered, "tid": 0, "args": args}
    tids: dict[str, int] = {}
    for event in events:
        event["pid"], thread = pids[event.get("pid")], event.get("tid", 0)
        if isinstance(thread, str):
            if thread not in tids:
                tids[thread] = len(tids) + 1
                args = {"name": thread}
                yield {"ph": "M", "name": "thread_name", "pid": event["pid"], "tid": tids[thread], "args": args}
            event["tid"] = tids[thread]
        if "ts" in event:
            event["ts"] += offset
        if "id" in event:  # of a flow between events
            event["id"] = f"{number}.{event['id']}"
        yield event
