"""Too few resources: a mistake of the recipe, or a node that is gone. (With Ray's own nodes: test_ray_cluster.py.)"""

from typing import Any

import pytest

from grpo_mcore.cluster import NodeLost, NotEnoughResources, ray_placement
from grpo_mcore.cluster.ray_placement import check_nodes, check_room

HEAD, WORKER, LOST = {"Alive": True, "CPU": 1.0}, {"Alive": True, "CPU": 4.0}, {"Alive": False, "CPU": 0.0}


class Nodes:
    """What Ray says of its nodes: one entry of `seen` a look, the last one from then on."""

    def __init__(self, patch: pytest.MonkeyPatch, *seen: list[dict[str, Any]]) -> None:
        self._seen, self.slept = list(seen), 0.0
        patch.setattr(ray_placement.ray, "nodes", lambda: self._seen[0])
        patch.setattr(ray_placement.ray, "cluster_resources", self._resources)
        patch.setattr(ray_placement.time, "monotonic", lambda: self.slept)
        patch.setattr(ray_placement.time, "sleep", self._sleep)

    def _resources(self) -> dict[str, float]:
        return {"CPU": sum(node["CPU"] for node in self._seen[0])}

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds
        if len(self._seen) > 1:
            self._seen.pop(0)


def test_a_request_that_no_node_could_ever_meet_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, [HEAD, WORKER])
    check_room("engine", 1, 3, 0, 60, watch=lambda: None)
    with pytest.raises(NotEnoughResources, match=r"too few CPUs: 2 x \(3 CPU, 0 GPU\) .* 5 CPU.*; ask for less"):
        check_room("engine", 2, 3, 0, 60, watch=lambda: None)
    with pytest.raises(NotEnoughResources, match="engine: 3 nodes asked for, the cluster has 2; add nodes"):
        check_nodes("engine", 3, 60, watch=lambda: None)
    assert nodes.slept == 0


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
def test_without_a_lost_node_it_is_a_loss_after_a_wait(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    nodes = Nodes(monkeypatch, [HEAD, LOST])
    with pytest.raises(NodeLost, match="has 1 CPU.*; 1 of its nodes are lost, and none came in their place"):
        check_room("engine", 1, 3, 0, wait_s, watch=lambda: None)
    assert nodes.slept == wait_s
    with pytest.raises(NodeLost, match="engine: 2 nodes asked for, the cluster has 1; 1 of its nodes are lost"):
        check_nodes("engine", 2, 0.0, watch=lambda: None)


def test_another_node_in_its_place_is_enough(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(monkeypatch, [HEAD, LOST], [HEAD, LOST], [HEAD, LOST, WORKER])
    check_room("engine", 1, 3, 0, 60, watch=lambda: None)
    check_nodes("engine", 2, 0.0, watch=lambda: None)
    assert nodes.slept == 2 * ray_placement.POLL_S
    assert package_log.text.count("waiting up to 60 s for others") == 1


def test_a_ray_that_knows_no_node_any_more_has_lost_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(monkeypatch, [])
    with pytest.raises(NodeLost, match="the cluster has 0 CPU"):
        check_room("engine", 1, 3, 0, 0.0, watch=lambda: None)
