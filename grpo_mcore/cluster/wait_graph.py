"""Who waits for whom, since when, and who keeps them all waiting: told before anything late is ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

IN_A_GROUP = re.compile(r'File "[^"]*/torch/distributed/[^"]*", line \d+ in (\w+)')
FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class Wait:
    """A call without an answer. `seconds`: since it was made, or since its last item; `late`: past its deadline."""

    whom: str
    what: str
    seconds: float
    late: bool


def wait_graph(waits: Sequence[Wait], frames: Mapping[str, str | None]) -> str:
    """One line for each worker that is waited for, and the culprits: those late ones that wait for nobody.

    `frames`: by worker, what it is doing, as `reports.own_frames` gives it; None where its process could not be asked.
    """
    lines = ["who waits for whom:"]
    for wait in sorted(waits, key=lambda wait: (not wait.late, -wait.seconds)):
        overdue = ", past its deadline" if wait.late else ""
        lines.append(f"  the driver waits for {wait.whom}: {wait.what}, for {wait.seconds:.0f} s{overdue}")
    names = list(dict.fromkeys(wait.whom for wait in waits))
    groups = {name: _group_wait(frames.get(name)) for name in names}
    for name in names:
        lines.append(f"  {name} {_doing(frames.get(name), groups[name])}")
    late = [name for name in names if any(wait.late for wait in waits if wait.whom == name)]
    alone = [name for name in late if groups[name] is None]
    if alone:
        lines.append(f"culprit: {', '.join(alone)}")
    elif late:
        lines.append(f"culprit: none of {', '.join(late)} alone: each waits for another in a collective")
    return "\n".join(lines)


def _group_wait(frames: str | None) -> str | None:
    """The collective in which a worker waits for its group."""
    found = IN_A_GROUP.findall(frames or "")
    return found[-1] if found else None


def _doing(frames: str | None, collective: str | None) -> str:
    if frames is None:
        return "does not tell what it is doing: its process has ended, or is on another machine"
    if collective is not None:
        return f"waits for its group in {collective}"
    where = FRAME.search(frames)
    if where is None:
        return "runs no Python of its own"
    path, line, function = where.groups()
    return f"is at {path}:{line} in {function}"
