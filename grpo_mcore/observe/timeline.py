"""Where the seconds of a step go."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from grpo_mcore.base.clock import REAL

TOTAL = "total"
EVERYTHING_ELSE = "everything_else"


class Timeline:
    """Seconds by phase since the last reset. Phases nest: "commit" inside "refit" is "refit/commit", and its
    seconds are part of refit's. One thread."""

    def __init__(
        self,
        clock: Callable[[], float] = REAL.now,
        on_span: Callable[[str, float, float], None] = lambda name, start, end: None,
    ) -> None:
        """`on_span`: gets each phase and each named pause when it ends, as (path, start, end) of the clock."""
        self._clock, self._on_span = clock, on_span
        self._open: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Start a new step. Raises RuntimeError inside a phase."""
        if self._open:
            raise RuntimeError(f"the phase {'/'.join(self._open)!r} is not over")
        self._start = self._clock()
        self._paused = 0.0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds inside to the phase `name`."""
        self._open.append(name)
        path = "/".join(self._open)
        start, paused = self._clock(), self._paused
        try:
            yield
        finally:
            self._open.pop()
            end = self._clock()
            self._seconds[path] = self._seconds.get(path, 0.0) + end - start - (self._paused - paused)
            self._on_span(path, start, end)

    def time(self, label: str) -> AbstractContextManager[None]:
        """Do the same for a label that names the phases around it too, such as "refit/commit" inside "refit". NeMo RL's
        Timer has this method, which the refit and scripts call."""
        return self.phase(label.removeprefix("/".join([*self._open, ""])))

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Exclude the seconds inside from the step. `name`: the work in them, such as a checkpoint."""
        start, paused = self._clock(), self._paused
        try:
            yield
        finally:
            end = self._clock()
            self._paused = paused + end - start
            self._on_span(name, start, end)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase, of everything else, and in total."""
        total = self._clock() - self._start - self._paused
        outer = sum(spent for path, spent in self._seconds.items() if "/" not in path)
        return {**self._seconds, EVERYTHING_ELSE: total - outer, TOTAL: total}

    def take(self) -> dict[str, float]:
        """Return `seconds()`, then reset: one step's end is the next one's start."""
        seconds = self.seconds()
        self.reset()
        return seconds


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Return each phase's share of the total; those without "/" and everything_else add up to 1."""
    total = seconds[TOTAL]
    return {name: spent / total if total else 0.0 for name, spent in seconds.items() if name != TOTAL}
