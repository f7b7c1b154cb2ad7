"""Policy and engines on separate devices: who makes room, who receives, and when a network group is left."""

from collections import Counter
from dataclasses import replace
from typing import Any

from grpo_mcore.cluster import LocalCluster, Place
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.driver.policy.policy_group import PolicyGroup


class Called:
    """Counts every method that is called on it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.update([(name, *args) if args else name])


class Placed(LocalWorker):
    def __init__(self, name: str, node: str, pid: int) -> None:
        super().__init__(name, Called())
        self.node, self.pid = node, pid

    def place(self) -> Place:
        return Place(self.node, "127.0.0.1", self.pid, (), "")


def policy(offloads: bool) -> tuple[PolicyGroup, Called]:
    rank = Called()
    nothing: Any = None
    group = PolicyGroup(
        LocalCluster(), [LocalWorker("policy-0", rank)], nothing, nothing, "", "float32", nothing,
        offloads=offloads,
    )  # fmt: skip
    return group, rank


def test_only_a_policy_that_shares_its_devices_makes_room() -> None:
    for colocated in (True, False):
        group, rank = policy(colocated)
        group.offload()
        group.onload()
        assert rank.calls == ({"offload": 1, "onload": 1} if colocated else {})


def test_the_nodes_of_the_engines() -> None:
    workers = [Placed(f"engine-{i}", node, i) for i, node in enumerate(("b", "a", "b", "c", "a"))]
    found = EngineGroup(LocalCluster(), list(map(EngineSlot, workers)), sleeps=False, colocated=False).nodes()
    assert found.engines == [[0], [1], [0], [2], [1]]
    assert [host.name for host in found.hosts] == ["engine-0", "engine-1", "engine-3"]


def test_the_nodes_of_engines_over_several_nodes() -> None:
    workers = [Placed("engine-0", "a", 0), Placed("engine-1", "c", 1)]
    followers = [[Placed("engine-0-node-1", "b", 2)], [Placed("engine-1-node-1", "d", 3)]]
    group = EngineGroup(LocalCluster(), list(map(EngineSlot, workers, followers)), sleeps=False)
    found = group.nodes()
    assert found.engines == [[0, 1], [2, 3]]
    assert [host.name for host in found.hosts] == ["engine-0", "engine-0-node-1", "engine-1", "engine-1-node-1"]
    assert group.subset([1]).nodes().engines == [[0, 1]] and group.subset([1]).all_hosts() == [
        workers[1],
        *followers[1],
    ]
    assert policy(offloads=True)[0].node_of_rank(found.hosts) == [-1]


def test_ranks_leave_the_network_group_of_an_engine_that_was_replaced() -> None:
    group, rank = policy(offloads=False)
    first, other = Placed("engine-0", "a", 1), Placed("engine-1", "b", 2)
    group.connect_to([first, other])
    group.connect_to([first, other])
    assert not rank.calls
    group.connect_to([Placed("engine-0", "a", 3), other])
    assert rank.calls == {"close_refit": 1}
    group.connect_to([Placed("engine-0", "a", 3)])
    assert rank.calls == {"close_refit": 2}


def test_engines_release_their_memory_only_if_they_share_devices() -> None:
    for sleeps, pauses, asked in ((False, False, {}), (True, False, {("release", False, True): 1})):
        worker = LocalWorker("engine-0", Called())
        group = EngineGroup(LocalCluster(), [EngineSlot(worker)], sleeps, pauses=pauses)
        group.release()
        assert worker.target.calls == asked and not group.paused
    group = replace(group, pauses=True)
    group.committed(4)
    worker.target.calls.clear()
    group.release()
    assert worker.target.calls == {("release", True, True): 1} and group.paused
    group.prepare()
    assert worker.target.calls[("prepare", 4)] == 1 and not group.paused
    group.release()
    assert group.paused
    part = group.subset([0])  # as a refit does
    part.committed(5)
    part.prepare()
    assert worker.target.calls[("prepare", 5)] == 1 and group.weight_version == 5
    assert not group.paused and group.slots[0].prepared_at > 0, "the loop must not offload the policy a second time"
