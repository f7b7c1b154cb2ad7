"""The events of a run in Chrome's trace format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def chrome_trace(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the trace as JSON: one row for each process of the run, times in microseconds since its start."""
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
    return json.dumps({"traceEvents": [*names, *complete, *instants], "displayTimeUnit": "ms"})
