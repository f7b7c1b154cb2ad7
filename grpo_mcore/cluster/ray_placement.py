"""Resources of workers: what is requested, what the cluster has, and which rank runs where."""

import logging
import time
from collections.abc import Callable, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from grpo_mcore.rollout.workers import DeadlineExceeded, NodeLost, NotEnoughResources

POLL_S = 1.0
"""Seconds between two looks at whether a node has come."""

Watch = Callable[[], None]
"""Called again and again during a wait, which it ends by what it raises."""

logger = logging.getLogger(__name__)


def check_room(name: str, count: int, cpus: float, gpus: float, wait_s: float, watch: Watch) -> None:
    """Raise NotEnoughResources if `count` workers do not fit into the whole cluster even when it is empty. If a node
    has been lost, wait up to `wait_s` seconds for one in its place, then raise NodeLost."""

    def shortage() -> str | None:
        total = ray.cluster_resources()
        needed = {"CPU": count * cpus, "GPU": count * gpus}
        short = [unit for unit, amount in needed.items() if amount > total.get(unit, 0.0) + 1e-9]
        if not short:
            return None
        return (
            f"{name}: too few {' and '.join(short)}s: {request_text(count, cpus, gpus)} asked for, the cluster has "
            f"{resources_text(total)}"
        )

    _refuse_or_wait(shortage, "ask for less or add nodes", wait_s, watch)


def check_nodes(name: str, nodes: int, wait_s: float, watch: Watch) -> None:
    """Raise NotEnoughResources if the cluster has fewer than `nodes` nodes; NodeLost as `check_room` does."""

    def shortage() -> str | None:
        alive = sum(node["Alive"] for node in ray.nodes())
        return f"{name}: {nodes} nodes asked for, the cluster has {alive}" if nodes > alive else None

    _refuse_or_wait(shortage, "add nodes", wait_s, watch)


def _refuse_or_wait(shortage: Callable[[], str | None], advice: str, wait_s: float, watch: Watch) -> None:
    """Return once `shortage` returns None. Otherwise raise NotEnoughResources with what it says and `advice`; if a node
    is lost, or Ray knows of none any more, NodeLost after `wait_s` seconds."""
    deadline, is_logged = time.monotonic() + wait_s, False
    while (missing := shortage()) is not None:
        alive = [bool(node["Alive"]) for node in ray.nodes()]
        if alive and all(alive):
            raise NotEnoughResources(f"{missing}; {advice}")
        lost = len(alive) - sum(alive)
        if time.monotonic() >= deadline:
            raise NodeLost(f"{missing}; {lost} of its nodes are lost, and none came in their place in {wait_s:g} s")
        if not is_logged:
            is_logged = True
            logger.warning("%s; %d of its nodes are lost; waiting up to %g s for others", missing, lost, wait_s)
        watch()
        time.sleep(POLL_S)


def reserve(
    name: str, count: int, cpus: float, gpus: float, timeout_s: float, nodes: int, *, rejoins: bool, watch: Watch
) -> PlacementGroup:
    """Reserve places for `count` workers: on as few nodes as possible, or equally many on each of `nodes` nodes.
    `rejoins`: another node may come in place of one that is lost.

    Raises NotEnoughResources, NodeLost, or DeadlineExceeded if the resources stay in use.
    """
    wait_s = timeout_s if rejoins else 0.0
    check_room(name, count, cpus, gpus, wait_s, watch)
    per_node, rest = divmod(count, nodes)
    if rest:
        raise ValueError(f"{name}: {count} workers cannot be spread evenly over {nodes} nodes")
    check_nodes(name, nodes, wait_s, watch)
    share = 1 if nodes == 1 else per_node
    bundle = {unit: share * amount for unit, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0}
    group = placement_group([bundle] * (count // share), strategy="PACK" if nodes == 1 else "STRICT_SPREAD")
    if not _is_placed(group, timeout_s, watch):
        free = resources_text(ray.available_resources())
        remove_placement_group(group)
        over = f" on each of {nodes} nodes" if nodes > 1 else ""
        total = resources_text(ray.cluster_resources())
        detail = f"asked for: {request_text(count, cpus, gpus)}{over}; free: {free} of {total}"
        raise DeadlineExceeded(f"room for {name}", "Ray's scheduler", timeout_s, detail)
    return group


def _is_placed(group: PlacementGroup, timeout_s: float, watch: Watch) -> bool:
    deadline = time.monotonic() + timeout_s
    while not group.wait(min(max(deadline - time.monotonic(), 0.0), POLL_S)):
        if time.monotonic() >= deadline:
            return False
        watch()
    return True


def rank_order(nodes: Sequence[str], count: int | None = None) -> list[tuple[int, int]]:
    """Return (bundle, index on its node) by rank, given the node of each bundle: nodes in order of appearance, the
    bundles of a node in a row, so that neighbouring ranks share a node. `count`: number of workers, if a bundle holds
    several."""
    share = (count or len(nodes)) // len(nodes)
    order = sorted(range(len(nodes)), key=lambda bundle: (nodes.index(nodes[bundle]), bundle))
    return [(bundle, nodes[:bundle].count(nodes[bundle]) * share + index) for bundle in order for index in range(share)]


def nodes_of(group: PlacementGroup) -> list[str]:
    """Return the node of each bundle."""
    by_bundle = placement_group_table(group)["bundles_to_node_id"]
    return [by_bundle[bundle] for bundle in sorted(by_bundle)]


def request_text(count: int, cpus: float, gpus: float) -> str:
    return f"{count} x ({cpus:g} CPU, {gpus:g} GPU)"


def resources_text(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU, {resources.get('GPU', 0.0):g} GPU"
