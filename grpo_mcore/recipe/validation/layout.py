"""Parallel sizes of the policy must fit the cluster and each other."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mcore.recipe.derived import model_parallel_size, policy_pool, world_size
from grpo_mcore.recipe.errors import Finding
from grpo_mcore.recipe.schema.master import RecipeSections

_AT = "policy.megatron_cfg."


def check_layout(config: RecipeSections) -> Iterator[Finding]:
    """The layout must fit the cluster's ranks, and its options need parallel sizes above 1."""
    megatron, cluster = config.policy.megatron_cfg, config.cluster
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    pool, needed = policy_pool(config), model_parallel_size(config)
    world = pool.ranks
    layout = f"TP {tp} x PP {pp} x CP {megatron.context_parallel_size} = {needed} ranks"
    offer = f"num_nodes {pool.nodes} x gpus_per_node {pool.per_node} = {world}"
    if not config.policy.generation.colocated.enabled:
        if not world:
            return  # reported by check_pools
        offer += " (without the engines' own)"
    layout_keys = (
        _AT + "tensor_model_parallel_size",
        _AT + "pipeline_model_parallel_size",
        _AT + "context_parallel_size",
        "cluster.gpus_per_node",
        "cluster.num_nodes",
    )
    if needed > world:
        yield Finding(layout_keys, f"one copy of the policy needs {layout}, but the cluster has {offer}")
    elif world % needed:
        yield Finding(layout_keys, f"the cluster has {offer} ranks, which is not a multiple of {layout}")
    if megatron.sequence_parallel and tp == 1:
        yield Finding(
            (_AT + "sequence_parallel", _AT + "tensor_model_parallel_size"),
            "sequence parallelism needs tensor_model_parallel_size above 1",
        )
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if megatron[name] is not None and pp == 1:
            yield Finding(
                (_AT + name, _AT + "pipeline_model_parallel_size"),
                "an uneven split needs pipeline_model_parallel_size above 1",
            )
    if cluster.backend == "local" and world > 1:
        yield Finding(
            ("cluster.backend", "cluster.gpus_per_node", "cluster.num_nodes"),
            f"the local backend runs one rank in this process, but the cluster has {offer}",
        )


def check_stages(config: RecipeSections) -> Iterator[Finding]:
    """Several model chunks per stage need several stages."""
    megatron = config.policy.megatron_cfg
    chunks = megatron.virtual_pipeline_model_parallel_size or 1
    if chunks > 1 and megatron.pipeline_model_parallel_size == 1:
        yield Finding(
            (_AT + "virtual_pipeline_model_parallel_size", _AT + "pipeline_model_parallel_size"),
            f"{chunks} model chunks per stage need pipeline_model_parallel_size above 1",
        )


def check_experts(config: RecipeSections) -> Iterator[Finding]:
    """The expert layout must divide the ranks of a pipeline stage."""
    megatron, world = config.policy.megatron_cfg, world_size(config)
    if world % model_parallel_size(config):
        return  # reported by check_layout
    expert, tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    stages = megatron.pipeline_model_parallel_size
    if world // stages % (expert * tensor):
        yield Finding(
            (_AT + "expert_model_parallel_size", _AT + "expert_tensor_parallel_size"),
            f"EP {expert} x ETP {tensor} = {expert * tensor} does not divide the {world // stages} ranks of a pipeline "
            f"stage ({world} ranks / PP {stages})",
        )
    if expert * tensor > 1 and megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield Finding(
            (_AT + "sequence_parallel", _AT + "tensor_model_parallel_size"),
            "experts under tensor parallelism need sequence_parallel: true; without it every tensor-parallel rank "
            "sends all tokens to the experts",
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
