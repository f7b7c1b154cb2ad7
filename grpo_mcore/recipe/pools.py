"""Who has which devices: policy and engines share them all, or each has its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mcore.recipe.errors import Finding
from grpo_mcore.recipe.master import MasterConfig

_AT = "policy.generation.colocated."
_NODES, _GPUS = _AT + "resources.num_nodes", _AT + "resources.gpus_per_node"


@dataclass(frozen=True)
class DevicePool:
    """`per_node`: accelerators of each node; on CPU processes."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def policy_pool(config: MasterConfig) -> DevicePool:
    """What the policy runs on: the cluster without what belongs to the engines alone."""
    cluster, colocated = config.cluster, config.policy.generation.colocated
    nodes, per_node, taken = cluster.num_nodes, cluster.gpus_per_node, colocated.resources
    if colocated.enabled:
        return DevicePool(nodes, per_node)
    if taken.num_nodes is not None:
        return DevicePool(max(0, nodes - taken.num_nodes), per_node)
    return DevicePool(nodes, max(0, per_node - (taken.gpus_per_node or 0)))


def engine_pool(config: MasterConfig) -> DevicePool | None:
    """What belongs to the engines alone; None where they share the policy's devices."""
    cluster, colocated = config.cluster, config.policy.generation.colocated
    if colocated.enabled:
        return None
    resources = colocated.resources
    if resources.num_nodes is not None:
        return DevicePool(resources.num_nodes, resources.gpus_per_node or cluster.gpus_per_node)
    return DevicePool(cluster.num_nodes, resources.gpus_per_node or 0)


def num_engines(config: MasterConfig, *, gpu: bool) -> int:
    """Engines of the run: policy.generation.num_engines, or as many as their devices hold; one on CPU, where the
    engines have no pool of their own. May be 0 where not one has room."""
    pool, generation = engine_pool(config), config.policy.generation
    if generation.num_engines is not None:
        return generation.num_engines
    if pool is None and not gpu:
        return 1
    return (pool or policy_pool(config)).ranks // generation.vllm_cfg.tensor_parallel_size


def engine_nodes(config: MasterConfig) -> int:
    """Nodes on which one engine lies: as many as its ranks need, where a node has fewer devices."""
    pool = engine_pool(config) or policy_pool(config)
    needed = -(-config.policy.generation.vllm_cfg.tensor_parallel_size // max(1, pool.per_node))
    return max(1, min(pool.nodes, needed))


def check_pools(config: MasterConfig) -> Iterator[Finding]:
    """A pool of the engines' own leaves something to the policy, and holds the engines."""
    pool, cluster = engine_pool(config), config.cluster
    if pool is None:
        return
    generation, resources = config.policy.generation, config.policy.generation.colocated.resources
    tensor, key = generation.vllm_cfg.tensor_parallel_size, "policy.generation.vllm_cfg.tensor_parallel_size"
    if cluster.backend == "local":
        yield Finding(
            (_AT + "enabled", "cluster.backend"),
            "engines of their own need processes of their own, and the local backend has one; set cluster.backend: ray",
        )
    if resources.num_nodes is None and resources.gpus_per_node is None:
        yield Finding(
            (_AT + "enabled", _NODES, _GPUS),
            f"say what the engines get: {_NODES} (of cluster.num_nodes), or {_GPUS} alone (of each node's "
            "cluster.gpus_per_node)",
        )
    elif not policy_pool(config).ranks:
        have, of = ("num_nodes", _NODES) if resources.num_nodes is not None else ("gpus_per_node", _GPUS)
        yield Finding((of, f"cluster.{have}"), f"takes all of cluster.{have} {cluster[have]}: none is left to train")
    elif pool.per_node % tensor and tensor % pool.per_node:
        yield Finding(
            (key, _GPUS, _NODES),
            f"the engines' {pool.per_node} ranks a node are not engines of {tensor} ranks each, nor parts of them",
        )
    elif (generation.num_engines or 1) * tensor > pool.ranks:
        yield Finding(
            ("policy.generation.num_engines", key, _GPUS, _NODES),
            f"{generation.num_engines or 1} engines x TP {tensor} do not fit the {pool.nodes} x {pool.per_node} ranks "
            "of their pool",
        )
