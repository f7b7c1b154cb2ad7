"""Every wait for engines hears an urgent request to stop."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.cluster import Worker, WorkerDied
from grpo_mcore.cluster.virtual_cluster import VirtualCluster, sleep
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.driver.engines.retries import Retries

START_S = 300.0


class SlowEngine:
    async def starting(self) -> None:
        await sleep(START_S)

    async def prepare(self, version: int) -> None:
        await sleep(START_S)

    async def health(self) -> None:
        await sleep(START_S)


def start_group(cluster: VirtualCluster, wait_s: float = 0.0) -> EngineGroup:
    def start(number: int) -> Sequence[Worker]:
        return [cluster.spawn(f"engine-{number}", SlowEngine)]

    slots = [EngineSlot(*start(0))]
    slots[0].worker.ready().result()
    restarts = Retries(9, wait_s, cluster.clock, lambda: cluster.watch())
    return EngineGroup(cluster, slots, sleeps=False, start=start, restarts=restarts)


def restart(engines: EngineGroup) -> None:
    engines.replace([0], WorkerDied("engine-0", "samples", "its process ended"))
    engines.await_successors()


WAITS: dict[str, Callable[[EngineGroup], Any]] = {
    "for its successor": restart,
    "for its answer to a health check": EngineGroup.find_dead,
    "until it is prepared": EngineGroup.prepare,
    "for one answer": lambda engines: engines.workers[0].call("prepare", 1).result(),
}


def ask_after(stop: StopRequest, cluster: VirtualCluster, seconds: float) -> None:
    cluster.clock.after(seconds, lambda: stop.ask("SIGTERM asked the run to stop", at_once=True))


@pytest.mark.parametrize(
    ("wait", "wait_s"),
    [*((wait, 0.0) for wait in WAITS.values()), (restart, 60.0)],
    ids=[*WAITS, "before its successor's start"],
)
def test_a_wait_for_an_engine_hears_a_request_to_stop(wait: Callable[[EngineGroup], Any], wait_s: float) -> None:
    cluster = VirtualCluster()
    engines, stop = start_group(cluster, wait_s), StopRequest()
    cluster.watch = stop.check
    began = cluster.clock.now()
    ask_after(stop, cluster, 5.0)
    assert stop.interruptible(lambda: (wait(engines), "it was not interrupted")) is None
    assert cluster.clock.now() - began == pytest.approx(5.0, abs=1.0 if wait_s else 0.1)


@pytest.mark.parametrize(("grace_s", "result"), [(START_S, "whole"), (20.0, None)])
def test_what_should_not_be_left_half_done_is_interrupted_after_its_grace(grace_s: float, result: str | None) -> None:
    cluster = VirtualCluster()
    engines, stop = start_group(cluster), StopRequest()
    cluster.watch = stop.check
    ask_after(stop, cluster, 5.0)
    cluster.clock.after(25.0, lambda: None)  # a virtual wait looks at the watch where something happens
    began = cluster.clock.now()

    def prepare() -> str:
        with cluster.uninterrupted(grace_s):
            engines.prepare()
        return "whole"

    assert stop.interruptible(prepare) == result
    assert cluster.clock.now() - began == pytest.approx(START_S if result else 25.0, abs=0.2)
    ask_after(stop, cluster, 5.0)
    engines.prepare()  # outside of what may be interrupted: an optimizer step, for example
