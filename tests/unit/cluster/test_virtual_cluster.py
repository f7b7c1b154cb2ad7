"""The cluster in virtual time: the contract of all clusters, and what only processes, machines and time can do."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from grpo_mcore.cluster import (
    Cluster,
    DeadlineExceeded,
    LocalCluster,
    NodeLost,
    NotEnoughResources,
    ObjectLost,
    Parcel,
    WorkerDied,
    WorkerFailed,
    gather,
    remote_call,
    remote_stream,
)
from grpo_mcore.cluster.virtual_cluster import Condition, VirtualCluster, sleep
from tests.cluster_contract import CONTRACT


@pytest.mark.parametrize("kind", [LocalCluster, VirtualCluster], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("law", CONTRACT, ids=lambda law: law.__name__)
def test_it_keeps_the_contract(law: Any, kind: type[Cluster]) -> None:
    with kind() as cluster:
        law(cluster, "abacus")


class Machine:
    """`log`: what its calls did, and when."""

    def __init__(self, cluster: VirtualCluster, log: list[Any]) -> None:
        self.cluster, self.log, self.bell = cluster, log, Condition()

    async def work(self, name: str, seconds: float) -> str:
        self.log.append(("begin", name, self.cluster.clock.now()))
        await sleep(seconds)
        self.log.append(("end", name, self.cluster.clock.now()))
        return name

    async def await_bell(self, seconds: float | None = None) -> float:
        await self.bell.wait(seconds)
        return self.cluster.clock.now()

    def ring(self) -> None:
        self.bell.notify()

    def keep(self, value: Any) -> list[Any]:
        return [self.cluster.store.put(value)]

    async def samples(self, count: int) -> AsyncIterator[Parcel]:
        for number in range(count):
            await sleep(10.0)
            yield Parcel(number, [number])


@pytest.fixture
def cluster() -> VirtualCluster:
    return VirtualCluster(seed=1, nodes=2, gpus=2, call_timeout_s=100.0)


def machine(cluster: VirtualCluster, name: str = "machine", log: list[Any] | None = None, **how: Any) -> Any:
    return cluster.spawn(name, Machine, cluster, [] if log is None else log, **how)


def test_a_day_takes_no_time(cluster: VirtualCluster) -> None:
    began, log = time.monotonic(), list[Any]()
    worker = machine(cluster, log=log)
    calls = [worker.call("work", name, 40_000.0, timeout_s=1e6) for name in "ab"]
    assert [call.result() for call in calls] == ["a", "b"] and cluster.clock.now() == 80_000
    assert log == [("begin", "a", 0), ("end", "a", 40_000), ("begin", "b", 40_000), ("end", "b", 80_000)]
    cluster.clock.sleep(5.0)
    assert cluster.clock.now() == pytest.approx(80_005) and time.monotonic() - began < 60


def test_calls_at_a_time_are_as_many_as_it_has_threads(cluster: VirtualCluster) -> None:
    worker = machine(cluster, concurrency=2, streams=1)
    calls = [worker.call("work", str(number), 10.0) for number in range(3)]
    stream = remote_stream(worker, Machine.samples)(1)
    assert next(stream).label == 0 and cluster.clock.now() == 10
    assert gather(cluster, calls, timeout_s=60, purpose="work") == ["0", "1", "2"] and cluster.clock.now() == 20


def test_calls_wait_for_another_call_at_most_so_long(cluster: VirtualCluster) -> None:
    worker = machine(cluster, concurrency=3)
    waits = [remote_call(worker, Machine.await_bell)(), remote_call(worker, Machine.await_bell)(2.0)]
    assert waits[1].result() == 2.0
    cluster.clock.sleep(3.0)
    remote_call(worker, Machine.ring)().result()
    assert waits[0].result() == pytest.approx(5.0)


def test_a_late_answer_is_named_and_may_be_asked_for_later(cluster: VirtualCluster) -> None:
    worker = machine(cluster)
    call = remote_call(worker, Machine.work, timeout_s=5.0, purpose="the work")("a", 8.0)
    with pytest.raises(DeadlineExceeded, match="the work: no answer from machine within 5 s"):
        call.result()
    assert cluster.clock.now() == pytest.approx(5.0)
    with pytest.raises(DeadlineExceeded, match="samples: no answer from machine within 2 s"):
        cluster.ready([call], 2.0, "samples")
    assert cluster.ready([call], 2.0, "samples") == [call] and cluster.clock.now() == 8.0
    assert call.result() == "a"


def test_a_death_ends_all_calls_and_what_it_had_put_into_the_store(cluster: VirtualCluster) -> None:
    worker = machine(cluster, concurrency=2)
    (kept,) = remote_call(worker, Machine.keep)("put").result()
    stream = remote_stream(worker, Machine.samples)(3)
    handed_over = next(stream).content
    call = remote_call(worker, Machine.work)("a", 50.0)
    cluster.clock.after(5.0, lambda: cluster.kill("machine"))
    with pytest.raises(WorkerDied, match="machine: work failed: its process ended"):
        call.result()
    assert cluster.clock.now() == 15
    with pytest.raises(WorkerDied):
        next(stream)
    with pytest.raises(WorkerDied):
        remote_call(worker, Machine.ring)().result()
    with pytest.raises(ObjectLost):
        cluster.store.fetch(kept)
    assert cluster.store.fetch(handed_over) == [0]
    assert remote_call(machine(cluster), Machine.work)("b", 1.0).result() == "b"


def test_a_machine_takes_its_workers_and_objects_with_it(cluster: VirtualCluster) -> None:
    ranks = cluster.spawn_group("rank", lambda meeting, *args: Machine(*args), [(cluster, [])] * 4, gpus=1, nodes=2)
    assert [rank.place().node for rank in ranks] == ["node-0", "node-0", "node-1", "node-1"]
    beside = machine(cluster, "engine", colocate_with=ranks[2:], gpus=0)
    handed_over = next(remote_stream(beside, Machine.samples)(1)).content
    with pytest.raises(NotEnoughResources):
        machine(cluster, "another", gpus=1)
    cluster.kill_node(cluster.nodes[1])
    with pytest.raises(WorkerDied):
        remote_call(beside, Machine.ring)().result()
    with pytest.raises(ObjectLost):
        cluster.store.fetch(handed_over)
    with pytest.raises(NodeLost):
        machine(cluster, "another", gpus=1)
    with pytest.raises(NodeLost):
        machine(cluster, "another", colocate_with=ranks[2:])
    assert remote_call(ranks[0], Machine.ring)().result() is None
    cluster.restore_node(cluster.nodes[1])
    assert machine(cluster, "another", gpus=1).place().node == "node-1"


def test_a_worker_that_stands_still_answers_when_it_goes_on(cluster: VirtualCluster) -> None:
    worker = machine(cluster)
    cluster.hang("machine", 30.0)
    call = remote_call(worker, Machine.work)("a", 1.0)
    with pytest.raises(DeadlineExceeded, match="it stands still"):
        remote_call(worker, Machine.ring, timeout_s=20.0)().result()
    assert call.result() == "a" and cluster.clock.now() == 31


def test_a_failing_constructor_fails_ready_and_every_call(cluster: VirtualCluster) -> None:
    def broken() -> None:
        raise ValueError("no beads")

    worker = cluster.spawn("abacus", broken)  # type: ignore[arg-type]
    with pytest.raises(WorkerFailed, match="abacus: its constructor failed: ValueError: no beads"):
        worker.ready().result()
    with pytest.raises(WorkerFailed, match="no beads"):
        remote_call(worker, Machine.ring)().result()


def orders(seed: int) -> list[str]:
    log: list[Any] = []
    with VirtualCluster(seed) as cluster:
        workers = [machine(cluster, f"machine-{number}", log) for number in range(4)]
        calls = [remote_call(worker, Machine.work)(worker.name, 1.0) for worker in workers]
        gather(cluster, calls, timeout_s=10.0, purpose="work")
    return [name for _, name, _ in log]


def test_the_seed_alone_decides_what_comes_first_at_one_time() -> None:
    assert orders(3) == orders(3)
    assert len({tuple(orders(seed)) for seed in range(8)}) > 4


def test_waiting_for_ever_for_nobody_is_an_error(cluster: VirtualCluster) -> None:
    call = remote_call(machine(cluster), Machine.await_bell, timeout_s=float("inf"))()
    with pytest.raises(RuntimeError, match="waits for ever"):
        call.result()
