"""Resources of workers: what is requested, what the cluster has, and which rank runs where."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from grpo_mcore.rollout.workers import DeadlineExceeded, NotEnoughResources


def check_room(name: str, count: int, cpus: float, gpus: float) -> None:
    """Raise NotEnoughResources if `count` workers do not fit into the whole cluster even when it is empty."""
    there = ray.cluster_resources()
    short = [unit for unit, each in (("CPU", cpus), ("GPU", gpus)) if count * each > there.get(unit, 0.0) + 1e-9]
    if short:
        raise NotEnoughResources(
            f"{name}: too few {' and '.join(short)}s: {request_text(count, cpus, gpus)} asked for, the cluster has "
            f"{resources_text(there)}; ask for less or add nodes"
        )


def reserve(name: str, count: int, cpus: float, gpus: float, timeout_s: float, nodes: int = 1) -> PlacementGroup:
    """Reserve places for `count` workers: on as few nodes as possible, or equally many on each of `nodes` nodes.

    Raises NotEnoughResources, or DeadlineExceeded if the resources stay in use.
    """
    check_room(name, count, cpus, gpus)
    each, rest = divmod(count, nodes)
    if rest:
        raise ValueError(f"{name}: {count} workers cannot be spread evenly over {nodes} nodes")
    if nodes > len(alive := [node for node in ray.nodes() if node["Alive"]]):
        raise NotEnoughResources(f"{name}: {nodes} nodes asked for, the cluster has {len(alive)}; add nodes")
    share = 1 if nodes == 1 else each
    bundle = {unit: share * amount for unit, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0}
    group = placement_group([bundle] * (count // share), strategy="PACK" if nodes == 1 else "STRICT_SPREAD")
    if not group.wait(timeout_s):
        free = resources_text(ray.available_resources())
        remove_placement_group(group)
        over = f" on each of {nodes} nodes" if nodes > 1 else ""
        total = resources_text(ray.cluster_resources())
        detail = f"asked for: {request_text(count, cpus, gpus)}{over}; free: {free} of {total}"
        raise DeadlineExceeded(f"room for {name}", "Ray's scheduler", timeout_s, detail)
    return group


def rank_order(nodes: Sequence[str], count: int | None = None) -> list[tuple[int, int]]:
    """Return (bundle, index on its node) by rank, given the node of each bundle: nodes in order of appearance, the
    bundles of a node in a row, so that neighbouring ranks share a node. `count`: number of workers, if a bundle holds
    several."""
    share = (count or len(nodes)) // len(nodes)
    order = sorted(range(len(nodes)), key=lambda bundle: (nodes.index(nodes[bundle]), bundle))
    return [(bundle, nodes[:bundle].count(nodes[bundle]) * share + place) for bundle in order for place in range(share)]


def nodes_of(group: PlacementGroup) -> list[str]:
    """Return the node of each bundle."""
    by_bundle = placement_group_table(group)["bundles_to_node_id"]
    return [by_bundle[bundle] for bundle in sorted(by_bundle)]


def request_text(count: int, cpus: float, gpus: float) -> str:
    return f"{count} x ({cpus:g} CPU, {gpus:g} GPU)"


def resources_text(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU, {resources.get('GPU', 0.0):g} GPU"
