"""Layouts must fit the cluster, and what depends on them must fit them."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import layout_findings, policy_pool
from grpo_mcore.recipe.schema.master import RecipeSections

_AT = "policy.megatron_cfg."


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


def check_router_replay(config: RecipeSections) -> Iterator[Finding]:
    """Router replay and recomputation exclude each other with pipeline stages: a stage runs the forward pass of one
    micro-batch between those of another, so recomputation would use the wrong micro-batch's routes."""
    replay, megatron = config.policy.router_replay, config.policy.megatron_cfg
    if replay.enabled and megatron.activation_checkpointing and megatron.pipeline_model_parallel_size > 1:
        yield Finding(
            ("policy.router_replay.enabled", _AT + "activation_checkpointing", _AT + "pipeline_model_parallel_size"),
            "cannot be combined with both activation_checkpointing and pipeline stages; switch one of them off",
        )


def check_shared_prefix(config: RecipeSections) -> Iterator[Finding]:
    """Samples share prefixes in packed rows only."""
    packing = config.policy.sequence_packing
    if packing.shared_prefix.enabled and not packing.enabled:
        yield Finding(
            ("policy.sequence_packing.shared_prefix.enabled", "policy.sequence_packing.enabled"),
            "needs policy.sequence_packing.enabled true",
        )
