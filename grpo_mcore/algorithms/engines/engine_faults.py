"""Engines whose calls fail or get no answer in time, while samples are generated: which are replaced, who goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.algorithms.engines.retries import Retries
from grpo_mcore.cluster import DeadlineExceeded, WorkerDied, WorkerFailed


class EngineFaults:
    """Waits for nothing; whoever waits for engines tells it what comes from them.

    An engine is silent where nothing has come of any of its calls for the cluster's `call_timeout_s`. The time in which
    it stood still for the policy does not count.
    """

    def __init__(
        self,
        engines: EngineGroup,
        retries: Retries,
        restore: Callable[[], None] | None,
        on_restart: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retries`: of calls that fail while their engine lives. `restore`: waits for engines that were started anew,
        and refits them. `on_restart`: gets the name of each that is started anew, and why."""
        self._engines, self._retries = engines, retries
        self._restore, self._on_restart, self._clock = restore, on_restart, clock
        self._heard: dict[int, float] = {}  # by engine: when it last gave something, or was given something to do

    def heard(self, engine: int) -> None:
        """It was given something to do, or has given something."""
        self._heard[engine] = self._clock()

    def reset(self) -> None:
        """A call has come to its end."""
        self._retries.reset()
        self._engines.restarts.reset()

    def seconds_left(self, busy: Collection[int]) -> float:
        """Until the first of these engines is silent; 0 where one is."""
        now, timeout_s = self._clock(), self._engines.cluster.call_timeout_s
        return min((max(0.0, timeout_s - now + self._since(engine)) for engine in busy), default=timeout_s)

    def silent(self, busy: Collection[int]) -> list[int]:
        """Which of these engines are."""
        return [engine for engine in busy if not self.seconds_left([engine])]

    def _since(self, engine: int) -> float:
        return max(self._heard[engine], self._engines.prepared_at)

    def met(self, error: WorkerFailed | DeadlineExceeded, engine: int) -> bool:
        """A call of this engine has failed, or had no answer in time. True: it is lost with all its calls, and its
        successor starts. False: it lives, and the call may be made again. Raises `error` where that cannot be made
        good: it was the request's own fault, or happened too often."""
        if isinstance(error.__cause__, ValueError):
            raise error
        name = self._engines.workers[engine].name
        if isinstance(error, DeadlineExceeded):
            self._engines.replace([engine], error)
        elif not self._engines.replace_dead(error, [engine]):
            self._retries.failed(error)
            return False
        self._on_restart(name, f"{error.what}: {cause(error)}")
        return True

    def another(self, engine: int) -> int:
        """The next engine that may be sent something; `engine` itself where there is no other."""
        later = [number for number in self._engines.serving() if number > engine]
        return (later or self._engines.serving() or [engine])[0]

    def restore(self, waiting: int) -> None:
        """Brings lost engines back, for which so many samples wait."""
        if self._restore is None:
            whys = "; ".join(self._engines.lost.values())
            raise WorkerDied("the engines", f"{waiting} samples", f"none is left, and no refit can follow: {whys}")
        self._restore()


def cause(error: WorkerFailed | DeadlineExceeded) -> str:
    """In one line."""
    return error.cause if isinstance(error, WorkerFailed) else f"no answer within {error.seconds:.6g} s"
