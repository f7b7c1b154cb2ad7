"""Engines whose calls fail or time out during generation: decide whether to retry or to replace the engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from grpo_mcore.cluster import DeadlineExceeded, WorkerDied, WorkerFailed
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.interfaces import GenerationInterface


class EngineFaults:
    """Decides what to do about failed calls. It never waits for engines: the caller reports what it gets from them.

    An engine has timed out when none of its calls has returned anything for the cluster's `call_timeout_s`, not
    counting the time for which it was paused while the policy trained.
    """

    def __init__(
        self,
        engines: GenerationInterface,
        retries: Retries,
        restore: Callable[[], object] | None,
        on_restart: Callable[[str, str], None],
    ) -> None:
        """`retries`: limit for calls that fail while their engine is alive. `restore`: waits for restarted engines and
        refits them. `on_restart`: gets the name of each engine that is restarted, and the reason."""
        self._engines, self._retries = engines, retries
        self._restore, self._on_restart, self._clock = restore, on_restart, engines.cluster.clock
        # Engines with calls under way, in the order of the time at which each last returned something or got a call:
        self._last_active: OrderedDict[int, float] = OrderedDict()

    def mark_active(self, engine: int) -> None:
        """Record that the engine returned something, or was given its first call."""
        self._last_active[engine] = self._clock.now()
        self._last_active.move_to_end(engine)

    def mark_idle(self, engine: int) -> None:
        """Record that none of the engine's calls is under way any more."""
        self._last_active.pop(engine, None)

    def reset(self) -> None:
        """Record that a call succeeded: failures are counted from 0 again."""
        self._retries.reset()
        self._engines.restarts.reset()

    def seconds_left(self) -> float:
        """Return the seconds until the first engine times out; 0 if one has."""
        timeout_s = self._engines.cluster.call_timeout_s
        if not self._last_active:
            return timeout_s
        engine, active = next(iter(self._last_active.items()))
        since = max(active, self._engines.slots[engine].prepared_at)
        return max(0.0, timeout_s - self._clock.now() + since)

    def late_engine(self) -> int | None:
        """Return the engine that timed out first, if one has."""
        return next(iter(self._last_active)) if self._last_active and not self.seconds_left() else None

    def handle(self, error: WorkerFailed | DeadlineExceeded, engine: int) -> bool:
        """Decide about a call of this engine that failed or timed out. Return True if the engine is lost with all its
        calls and its successor is starting, False if it is alive and the call may be repeated.

        Raises `error` if the request itself was wrong, or if this has happened too often.
        """
        if isinstance(error.__cause__, ValueError):
            raise error
        name = self._engines.slots[engine].worker.name
        if isinstance(error, DeadlineExceeded):
            self._engines.replace([engine], error)
        elif not self._engines.replace_dead(error, [engine]):
            self._retries.failed(error)
            return False
        self._on_restart(name, f"{error.purpose}: {cause(error)}")
        return True

    def next_engine(self, engine: int) -> int:
        """Return the next engine that can take calls; `engine` itself if there is no other."""
        later = [number for number in self._engines.serving() if number > engine]
        return (later or self._engines.serving() or [engine])[0]

    def restore(self, waiting: int) -> None:
        """Bring lost engines back. `waiting`: number of samples that wait for one."""
        if self._restore is None:
            reasons = "; ".join(self._engines.lost.values())
            raise WorkerDied("the engines", f"{waiting} samples", f"none is left, and no refit can follow: {reasons}")
        self._restore()


def cause(error: WorkerFailed | DeadlineExceeded) -> str:
    """Return the cause in one line."""
    return error.cause if isinstance(error, WorkerFailed) else f"no answer within {error.seconds:.6g} s"
