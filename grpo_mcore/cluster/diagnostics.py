"""Text for error messages: the end of a worker's log, what a late worker is doing, and who waits for whom."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_mcore.cluster.inspection import ProcessReport, is_worker, odd_ones, read_from, reports_here
from grpo_mcore.rollout.workers import Place

TAIL_LINES = 15
FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""Beginnings of lines that Ray writes into a worker's log for itself."""

WARNING = re.compile(r"^W\d{4} |WARN|\w*[Ww]arning: |is already registered")
"""Lines of libraries' warnings, which do not tell what a worker is doing."""


def log_tail(log: str) -> str:
    """Return the end of a worker's log, with its path."""
    path = Path(log)
    try:
        text = read_from(path, max(0, path.stat().st_size - 16384))
    except OSError:
        return f"its log is on its node: {log}"
    last = [line for line in text.splitlines() if not line.startswith(RAY_MARKS)][-TAIL_LINES:]
    if not last:
        return f"its log is empty: {log}"
    return "\n".join([f"end of its log, {log}:", *(f"    {line}" for line in last)])


def last_line(log: Path) -> str:
    """Return the last line of a worker's log that is no warning, and the newest state of a progress bar; empty where
    there is none."""
    try:
        text = read_from(log, max(0, log.stat().st_size - 4096))
    except OSError:
        return ""
    lines = text.replace("\r", "\n").splitlines()
    lines = [line for line in lines if not line.startswith((" ", *RAY_MARKS)) and not WARNING.search(line)]
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def stacks(name: str, place: Place) -> str:
    """Return what the threads of a worker are doing, or where it is if that is not on this machine."""
    if not is_worker(place):
        return f"{name} is on {place.address}, its log: {place.log}"
    report = reports_here({name: place})[name]
    if report.state:
        return f"{name} (process {place.pid}) {report.state}; its log: {place.log}"
    frames = report.frames or "no stack: it does not run Python"
    return f"{name} (process {place.pid}) is at, innermost first:\n{frames}\nits log: {place.log}"


@dataclass(frozen=True)
class Wait:
    """A call without an answer. `seconds`: time since the call, or since its last item; `late`: whether its deadline
    has passed."""

    whom: str
    purpose: str
    seconds: float
    late: bool


def wait_graph(waits: Sequence[Wait], reports: Mapping[str, ProcessReport], names: Sequence[str] | None = None) -> str:
    """Return who waits for whom, what the workers are doing, and the culprits: those that others wait for and that wait
    for nobody; else late workers that are in no collective. Workers that are doing the same are one line; the odd ones
    come first, then the fewer they are, the earlier.

    `reports`: state of each worker; one that could not be asked is left out, and accused of nothing. `names`: the
    workers to list, with their stacks; by default those that are waited for, without stacks.
    """
    lines = ["who waits for whom:"]
    calls: dict[tuple[str, bool], list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: (not wait.late, -wait.seconds)):
        calls.setdefault((wait.purpose, wait.late), []).append(wait)
    for (purpose, late), alike in calls.items():
        overdue = ", past its deadline" if late else ""
        whom, longest = listed([wait.whom for wait in alike]), alike[0].seconds
        lines.append(f"  the driver waits for {whom}: {purpose}, for {longest:.0f} s{overdue}")
    with_stacks = names is not None
    names = names if names is not None else list(dict.fromkeys(wait.whom for wait in waits))
    odd = odd_ones({name: reports[name] for name in names if name in reports})
    activities: dict[tuple[str, str], list[str]] = {}
    for name in names:
        report = reports.get(name)
        stack = report.frames if report and with_stacks else ""
        activity = _activity(report) if report else "could not be asked: unknown"
        activities.setdefault((activity, stack), []).append(name)
    for (activity, stack), alike_names in sorted(
        activities.items(), key=lambda item: (not set(item[1]) & set(odd), len(item[1]))
    ):
        lines.append(f"  {listed(alike_names)} {activity}")
        lines += [f"    {line}" for line in stack.splitlines()]
    late_names = [name for name in names if any(wait.late for wait in waits if wait.whom == name)]
    awaited = late_names or list(dict.fromkeys(wait.whom for wait in waits))
    unknown = [name for name in awaited if name not in reports]
    alone = odd or [name for name in late_names if name in reports and reports[name].waiting is None]
    who = "culprit" if late_names else "the others wait for"
    if alone:
        lines.append(f"{who}: {listed(alone)}")
    elif unknown:
        lines.append(f"{who}: unknown; {listed(unknown)} could not be asked")
    elif late_names:
        lines.append(f"culprit: none of {listed(late_names)} alone: each waits for another in a collective")
    return "\n".join(lines)


def listed(names: Sequence[str]) -> str:
    """Return names as text, with numbers in a row as a range: "policy-0 to policy-6, policy-8 (8)"."""
    runs: list[list[str]] = []
    for name in names:
        stem, _, number = name.rpartition("-")
        last = runs[-1][-1] if runs else ""
        follows = number.isdigit() and last == f"{stem}-{int(number) - 1}"
        if follows:
            runs[-1].append(name)
        else:
            runs.append([name])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    return ", ".join(parts) + (f" ({len(names)})" if len(names) > 2 else "")


def _activity(report: ProcessReport) -> str:
    if report.state:
        return report.state
    if report.waiting is not None:
        return f"waits for its group in {report.waiting}"
    where = FRAME.search(report.frames)
    if where is None:
        return "runs no Python of its own"
    path, line, function = where.groups()
    return f"is at {path}:{line} in {function}"
