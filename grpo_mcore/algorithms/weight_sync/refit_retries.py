"""A refit in spite of engines that die: they are started anew, and get the weights with the others."""

from __future__ import annotations

from collections.abc import Callable

from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.cluster import DeadlineExceeded, WorkerFailed
from grpo_mcore.refit import RefitError, RefitReport

Restarted = Callable[[str, str], None]
"""Takes note that a worker, by name, is started anew, and why."""


def refit_through_deaths(
    engines: EngineGroup,
    refit: Callable[[EngineGroup], RefitReport],
    restarted: Restarted = lambda worker, why: None,
    *,
    lost_only: bool = False,
) -> RefitReport:
    """`refit`s the engines, or with `lost_only` those that were lost, until all of them have the weights: no engine is
    lost afterwards.

    Raises what `refit` raises where no engine is dead, or where too many have died in a row.
    """
    while True:
        try:
            engines.await_successors()
            numbers = sorted(engines.lost) if lost_only else list(range(len(engines.workers)))
            part = engines.part(numbers)
            report = refit(part)
        except (RefitError, WorkerFailed, DeadlineExceeded) as error:
            dead = engines.replace_dead(error)
            if not dead:
                raise
            for number in dead:
                restarted(engines.workers[number].name, engines.lost[number])
        else:
            engines.refitted(part, numbers)
            return report
