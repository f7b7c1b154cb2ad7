"""How many consecutive failures are tolerated, and how long to wait before each retry."""

from collections.abc import Callable

from grpo_mcore.base.clock import REAL, Clock

LONGEST_WAIT_S = 60.0

WATCH_S = 0.5
"""Seconds between two calls of `watch` in a wait."""


class Retries:
    """Counts consecutive failures. The first is followed by a wait of `first_wait_s` seconds, each further one by twice
    the wait before, at most LONGEST_WAIT_S. After `tolerated` failures the next one is raised."""

    def __init__(
        self, tolerated: int, first_wait_s: float, clock: Clock = REAL, watch: Callable[[], None] | None = None
    ) -> None:
        """`watch`: called again and again during a wait, which it ends by what it raises."""
        self._tolerated, self._first_wait_s, self._clock, self._watch = tolerated, first_wait_s, clock, watch
        self._in_a_row = 0

    @property
    def exhausted(self) -> bool:
        """Whether the next failure would be raised."""
        return self._in_a_row >= self._tolerated

    def failed(self, error: BaseException) -> None:
        """Count a failure and wait. Raises `error` if the limit is exceeded."""
        if self.exhausted:
            raise error
        self._in_a_row += 1
        wait_s = min(self._first_wait_s * 2 ** (self._in_a_row - 1), LONGEST_WAIT_S)
        deadline = self._clock.now() + wait_s
        while self._watch is not None and (left_s := deadline - self._clock.now()) > WATCH_S:
            self._watch()
            self._clock.sleep(min(left_s, WATCH_S))
        self._clock.sleep(max(deadline - self._clock.now(), 0.0))

    def reset(self) -> None:
        """Record a success: failures are counted from 0 again."""
        self._in_a_row = 0
