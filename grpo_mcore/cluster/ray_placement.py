"""Room for workers: what is asked, what there is, and which rank runs where."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from grpo_mcore.cluster.interface import DeadlineExceeded, NotEnoughResources


def check_room(name: str, count: int, cpus: float, gpus: float) -> None:
    """Raises NotEnoughResources when `count` workers do not fit into the whole cluster, were it empty."""
    there = ray.cluster_resources()
    short = [unit for unit, each in (("CPU", cpus), ("GPU", gpus)) if count * each > there.get(unit, 0.0) + 1e-9]
    if short:
        raise NotEnoughResources(
            f"{name}: too few {' and '.join(short)}s: {asked(count, cpus, gpus)} asked for, the cluster has "
            f"{room(there)}; ask for less or add nodes"
        )


def reserve(name: str, count: int, cpus: float, gpus: float, timeout_s: float) -> PlacementGroup:
    """A place for each of `count` workers on as few nodes as possible.

    Raises NotEnoughResources, or DeadlineExceeded when the room stays taken.
    """
    check_room(name, count, cpus, gpus)
    bundle = {unit: amount for unit, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0}
    group = placement_group([bundle] * count, strategy="PACK")
    if not group.wait(timeout_s):
        free = room(ray.available_resources())
        remove_placement_group(group)
        detail = f"asked for: {asked(count, cpus, gpus)}; free: {free} of {room(ray.cluster_resources())}"
        raise DeadlineExceeded(f"room for {name}", "Ray's scheduler", timeout_s, detail)
    return group


def rank_order(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """(bundle, place on its node) by rank, given the node of each bundle: nodes in order of appearance, the
    bundles of a node in a row, so that neighbouring ranks share a node."""
    order = sorted(range(len(nodes)), key=lambda bundle: (nodes.index(nodes[bundle]), bundle))
    return [(bundle, nodes[:bundle].count(nodes[bundle])) for bundle in order]


def nodes_of(group: PlacementGroup) -> list[str]:
    """The node of each bundle."""
    by_bundle = placement_group_table(group)["bundles_to_node_id"]
    return [by_bundle[bundle] for bundle in sorted(by_bundle)]


def asked(count: int, cpus: float, gpus: float) -> str:
    return f"{count} x ({cpus:g} CPU, {gpus:g} GPU)"


def room(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU, {resources.get('GPU', 0.0):g} GPU"
