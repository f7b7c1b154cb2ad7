"""How often in a row something may fail before it ends the run, and how long to wait before the next try."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_WAIT_S = 60.0


class Retries:
    """Failures in a row. The first is followed by a wait of `first_wait_s`, each further one by twice the last wait, at
    most LONGEST_WAIT_S. `tolerated`: so many; one more is raised."""

    def __init__(self, tolerated: int, first_wait_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._tolerated, self._first_wait_s, self._sleep = tolerated, first_wait_s, sleep
        self._in_a_row = 0

    @property
    def exhausted(self) -> bool:
        """One more failure would be raised."""
        return self._in_a_row >= self._tolerated

    def failed(self, error: BaseException) -> None:
        """Waits. Raises `error` where that was one too many."""
        if self.exhausted:
            raise error
        self._in_a_row += 1
        self._sleep(min(self._first_wait_s * 2 ** (self._in_a_row - 1), LONGEST_WAIT_S))

    def reset(self) -> None:
        """It did not fail this time."""
        self._in_a_row = 0
