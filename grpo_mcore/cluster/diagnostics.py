"""Text for error messages: the end of a worker's log, what a late worker is doing, and who waits for whom."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_mcore.rollout.workers import Place

TAIL_LINES = 15
DUMP_S = 2.0
"""Seconds that a late worker gets to write its stacks."""

IN_COLLECTIVE = re.compile(r'File "[^"]*/torch/distributed/[^"]*", line \d+ in (\w+)')
FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""Beginnings of lines that Ray writes into a worker's log for itself."""


def log_tail(log: str, lines: int = TAIL_LINES) -> str:
    """Return the end of a worker's log, with its path."""
    path = Path(log)
    try:
        text = _read_from(path, max(0, path.stat().st_size - 16384))
    except OSError:
        return f"its log is on its node: {log}"
    last = [line for line in text.splitlines() if not line.startswith(RAY_MARKS)][-lines:]
    if not last:
        return f"its log is empty: {log}"
    return "\n".join([f"end of its log, {log}:", *(f"    {line}" for line in last)])


def last_line(log: Path) -> str:
    """Return the last line of a worker's log: of a progress bar, its newest state. Empty where there is none."""
    try:
        text = _read_from(log, max(0, log.stat().st_size - 4096))
    except OSError:
        return ""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(RAY_MARKS)]
    return lines[-1][:200] if lines else ""


def stacks(name: str, place: Place) -> str:
    """Return what the threads of a worker are doing, or where it is if that is not on this machine."""
    found = frames(place)
    if found is None:
        return f"{name} is on {place.address}, its log: {place.log}"
    found = found or "no stack: it does not run Python"
    return f"{name} (process {place.pid}) is at, innermost first:\n{found}\nits log: {place.log}"


def frames(place: Place) -> str | None:
    """Return the stacks of a worker of this machine, as `frames_here` does; None if it has ended or is on another."""
    return frames_here({"": place})[""]


def frames_here(places: Mapping[str, Place]) -> dict[str, str | None]:
    """Return the stacks of workers of this machine, which they write to their logs on SIGUSR1, all at a time. None: its
    process has ended."""
    sizes: dict[str, int] = {}
    for name, place in places.items():
        if _is_worker(place):
            sizes[name] = Path(place.log).stat().st_size
            os.kill(place.pid, signal.SIGUSR1)
    seen, deadline = dict(sizes), time.monotonic() + DUMP_S
    unfinished = set(sizes)
    while unfinished and time.monotonic() < deadline:
        time.sleep(0.1)
        for name in list(unfinished):
            before, seen[name] = seen[name], Path(places[name].log).stat().st_size
            if sizes[name] < before == seen[name]:
                unfinished.remove(name)
    return {
        name: own_frames(_read_from(Path(place.log), sizes[name])) if name in sizes else None
        for name, place in places.items()
    }


def own_frames(dump: str) -> str:
    """Return the part of faulthandler's dump that matters: leave out the threads of Python's and Ray's own machinery,
    and the frames that called the worker's method."""
    threads = []
    for thread in re.split(r"\n\n(?=(?:Current t|T)hread 0x)", dump.strip()):
        frames = [line for line in thread.splitlines() if line.startswith("  File ")]
        called = [index for index, frame in enumerate(frames) if "/grpo_mcore/cluster/ray_actor.py" in frame]
        frames = frames[: called[0]] if called else frames
        if not all(re.search(r"/ray/|/threading\.py|/concurrent/futures/", frame) for frame in frames):
            threads.append("\n".join(frames))
    return "\n  another thread:\n".join(threads)


@dataclass(frozen=True)
class Wait:
    """A call without an answer. `seconds`: since it was made, or since its last item; `late`: past its deadline."""

    whom: str
    what: str
    seconds: float
    late: bool


def wait_graph(waits: Sequence[Wait], frames: Mapping[str, str | None]) -> str:
    """Return who waits for whom, what the workers that are waited for are doing, and the culprits: late workers that
    wait for no other. Workers that are doing the same are one line; the fewer they are, the earlier it comes.

    `frames`: what each worker is doing, as `own_frames` returns it; None if its process has ended. A worker that could
    not be asked is left out, and accused of nothing.
    """
    lines = ["who waits for whom:"]
    calls: dict[tuple[str, bool], list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: (not wait.late, -wait.seconds)):
        calls.setdefault((wait.what, wait.late), []).append(wait)
    for (what, late), alike in calls.items():
        overdue = ", past its deadline" if late else ""
        whom, longest = listed([wait.whom for wait in alike]), alike[0].seconds
        lines.append(f"  the driver waits for {whom}: {what}, for {longest:.0f} s{overdue}")
    names = list(dict.fromkeys(wait.whom for wait in waits))
    collectives = {name: _collective(frames.get(name)) for name in names}
    activities: dict[str, list[str]] = {}
    for name in names:
        activity = _activity(frames[name], collectives[name]) if name in frames else "could not be asked: unknown"
        activities.setdefault(activity, []).append(name)
    for activity, alike_names in sorted(activities.items(), key=lambda item: len(item[1])):
        lines.append(f"  {listed(alike_names)} {activity}")
    late_names = [name for name in names if any(wait.late for wait in waits if wait.whom == name)]
    alone = [name for name in late_names if name in frames and collectives[name] is None]
    unknown = [name for name in late_names if name not in frames]
    if alone:
        lines.append(f"culprit: {listed(alone)}")
    elif unknown:
        lines.append(f"culprit: unknown; {listed(unknown)} could not be asked")
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


def _collective(frames: str | None) -> str | None:
    """Return the name of the collective in which a worker waits for its group."""
    found = IN_COLLECTIVE.findall(frames or "")
    return found[-1] if found else None


def _activity(frames: str | None, collective: str | None) -> str:
    if frames is None:
        return "has ended: there is no such process any more"
    if collective is not None:
        return f"waits for its group in {collective}"
    where = FRAME.search(frames)
    if where is None:
        return "runs no Python of its own"
    path, line, function = where.groups()
    return f"is at {path}:{line} in {function}"


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def _is_worker(place: Place) -> bool:
    """Return whether the process with that pid on this machine prints to that log. No other process is signalled."""
    try:
        return os.path.samefile(f"/proc/{place.pid}/fd/2", place.log)
    except OSError:
        return False
