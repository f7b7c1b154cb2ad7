"""The events of a run in Chrome's trace format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def chrome_trace(events: Sequence[Mapping[str, Any]], profiles: Iterable[Path] = ()) -> str:
    """Return the trace as JSON: one row for each process of the run, times in microseconds since its start.
    `profiles`: traces of torch's profiler, which follow as processes of their own on the same clock."""
    spans = [event for event in events if "seconds" in event]
    start = min((span["start"] for span in spans), default=0.0)
    rows = {name: number for number, name in enumerate(dict.fromkeys(span["process"] for span in spans), start=1)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}} for name, row in rows.items()
    ]
    complete = [
        {
            "ph": "X",
            "name": span["what"],
            "cat": span["what"].partition("/")[0],
            "pid": 1,
            "tid": rows[span["process"]],
            "ts": round(1e6 * (span["start"] - start)),
            "dur": round(1e6 * span["seconds"]),
            "args": {"step": span["step"]},
        }
        for span in spans
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
    profiled = [event for number, path in enumerate(profiles) for event in _profile(path, number, start)]
    return json.dumps({"traceEvents": [*names, *complete, *instants, *profiled], "displayTimeUnit": "ms"})


def _profile(path: Path, number: int, start: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a profile, moved to the clock of the run, which started at `start`. The `number` keeps its
    processes apart from those of other profiles."""
    trace = json.loads(path.read_text())
    offset = trace.get("baseTimeNanoseconds", 0) / 1e3 - 1e6 * start
    name = f"{path.stem}, {path.parent.name.replace('_', ' ')}"
    pids = {pid: f"{name}: {pid}" for pid in {event.get("pid") for event in trace["traceEvents"]}}
    for event in trace["traceEvents"]:
        event["pid"] = pids[event.get("pid")]
        if "ts" in event:
            event["ts"] += offset
        if "id" in event:  # of a flow between events
            event["id"] = f"{number}.{event['id']}"
        yield event
