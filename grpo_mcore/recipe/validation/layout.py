"""Layouts of policy and engines on their devices, and arguments of the engines."""

from collections.abc import Iterator

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import engine_pool, layout_findings, policy_pool
from grpo_mcore.recipe.schema.master import RecipeSections
from grpo_mcore.recipe.validation.rules import engine_argument_findings, tables

_COLOCATED = "policy.generation.colocated."
_NODES, _GPUS = _COLOCATED + "resources.num_nodes", _COLOCATED + "resources.gpus_per_node"
_VLLM = "policy.generation.vllm_cfg."
_KWARGS = "policy.generation.vllm_kwargs"


def check_layout(config: RecipeSections) -> Iterator[Finding]:
    """The layouts of policy and engines must fit the cluster and each other, as far as the recipe alone can say."""
    pool = policy_pool(config)
    if not pool.ranks:
        return  # reported by check_pools
    yield from layout_findings(config)
    if config.cluster.backend == "local" and pool.ranks > 1:
        yield Finding(
            ("cluster.backend", "cluster.gpus_per_node", "cluster.num_nodes"),
            f"the local backend runs one rank in this process, but the cluster has num_nodes {pool.nodes} x "
            f"gpus_per_node {pool.per_node} = {pool.ranks}",
        )


def check_pools(config: RecipeSections) -> Iterator[Finding]:
    """Engines with their own devices must have some and leave some to the policy."""
    cluster, resources = config.cluster, config.policy.generation.colocated.resources
    if engine_pool(config) is None:
        return
    if cluster.backend == "local":
        yield Finding(
            (_COLOCATED + "enabled", "cluster.backend"),
            "engines with their own devices need processes of their own, and the local backend has one; set "
            "cluster.backend: ray",
        )
    if resources.num_nodes is None and resources.gpus_per_node is None:
        yield Finding(
            (_COLOCATED + "enabled", _NODES, _GPUS),
            f"say what the engines get: {_NODES} (of cluster.num_nodes), or {_GPUS} alone (of each node's "
            "cluster.gpus_per_node)",
        )
    elif not policy_pool(config).ranks:
        have, of = ("num_nodes", _NODES) if resources.num_nodes is not None else ("gpus_per_node", _GPUS)
        yield Finding((of, f"cluster.{have}"), f"takes all of cluster.{have} {cluster[have]}: none is left to train")


def check_engine_arguments(config: RecipeSections) -> Iterator[Finding]:
    """vllm_kwargs must not contradict other keys or what a run needs: vLLM would accept it silently."""
    decided = tables()["decided"] | tables()["decided_of_policy"]
    yield from engine_argument_findings(config.policy.generation.vllm_kwargs, _KWARGS, tables()["set_by"], decided)


def check_engine_experts(config: RecipeSections) -> Iterator[Finding]:
    """Whole experts are divided among all ranks of an engine, or not at all."""
    vllm = config.policy.generation.vllm_cfg
    if vllm.expert_parallel_size not in (1, vllm.tensor_parallel_size):
        yield Finding(
            (_VLLM + "expert_parallel_size", _VLLM + "tensor_parallel_size"),
            f"{vllm.expert_parallel_size} is neither 1 nor tensor_parallel_size = {vllm.tensor_parallel_size}; experts "
            "are divided among all ranks of an engine or none",
        )
