"""A refit goes on until every engine has the weights, even if engines die in it."""

from typing import Any

import pytest

from grpo_mcore.cluster import LocalCluster
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.policy.refit_step import refit_until_done
from grpo_mcore.refit.plan.plan import RefitError


class Engine:
    def __init__(self) -> None:
        self.alive, self.version = True, 0

    def health(self) -> None:
        if not self.alive:
            raise RuntimeError("rank 0 of 1 has died")

    def prepare(self, version: int) -> None:
        assert self.version == version


class World:
    """`deaths`: the engines that die in each refit, in order."""

    def __init__(self, count: int, *deaths: tuple[int, ...], tolerated: int = 3) -> None:
        self.cluster, self.deaths, self.restarts, self.refits = LocalCluster(), list(deaths), [], []
        self.engines = EngineGroup(
            self.cluster,
            [EngineSlot(engine) for n in range(count) for engine in self.start(n)],
            False,
            start=self.start,
            restarts=Retries(tolerated, 0),
        )
        self.version = 1

    def start(self, number: int) -> list[LocalWorker]:
        return [self.cluster.spawn(f"engine-{number}", Engine)]

    def refit(self, group: EngineGroup) -> Any:
        self.refits.append([worker.name for worker in group.workers])
        dying = self.deaths.pop(0) if self.deaths else ()
        for number in dying:
            self.engines.workers[number].target.alive = False
        if any(not worker.target.alive for worker in group.workers):
            raise RefitError("stage_bucket 1 failed")
        for worker in group.workers:
            worker.target.version = self.version
        group.committed(self.version)
        group.prepare()
        return "report"

    def run(self, **how: Any) -> Any:
        return refit_until_done(self.engines, self.refit, lambda *what: self.restarts.append(what), **how)


def test_it_is_repeated_with_a_successor() -> None:
    world = World(2, (1,), (0, 1))
    assert world.run() == "report"
    assert world.refits == [["engine-0", "engine-1"]] * 3
    assert world.restarts == [(f"engine-{n}", "stage_bucket 1 failed") for n in (1, 0, 1)]
    assert not world.engines.lost and world.engines.weight_version == 1
    world.engines.prepare()


def test_lost_engines_come_back_with_their_own_version() -> None:
    """They have it until the next refit of all engines."""
    world = World(2)
    world.run()
    world.engines.workers[0].target.alive = False
    assert world.engines.replace_dead(RuntimeError("it died\nlong story")) == [0]
    assert world.engines.lost == {0: "it died"} and world.engines.serving() == [1]
    world.engines.prepare()  # only of the engine that is not lost
    world.version = 2
    world.run(lost_only=True)
    assert world.refits[-1] == ["engine-0"] and world.engines.weight_version == 1
    assert world.engines.serving() == [0, 1]
    world.engines.prepare()
    world.run()
    assert world.engines.weight_version == 2
    world.engines.prepare()


def test_if_all_engines_live_the_refits_error_is_raised() -> None:
    world = World(1)
    world.refit = lambda group: (_ for _ in ()).throw(RefitError("the checksums differ"))  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="checksums differ"):
        world.run()
    assert not world.restarts


def test_too_many_deaths_in_a_row_are_raised() -> None:
    world = World(1, (0,), (0,), (0,), tolerated=2)
    with pytest.raises(RefitError, match="stage_bucket 1"):
        world.run()
    assert len(world.restarts) == 2
