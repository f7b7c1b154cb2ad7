"""Parallel sizes that need each other, or must divide the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mcore.recipe import batch_sizes
from grpo_mcore.recipe.errors import Finding
from grpo_mcore.recipe.master import MasterConfig

AT = "policy.megatron_cfg."


def check_stages(config: MasterConfig) -> Iterator[Finding]:
    """Model chunks need stages."""
    megatron = config.policy.megatron_cfg
    chunks = megatron.virtual_pipeline_model_parallel_size or 1
    if chunks > 1 and megatron.pipeline_model_parallel_size == 1:
        yield Finding(
            (AT + "virtual_pipeline_model_parallel_size", AT + "pipeline_model_parallel_size"),
            f"{chunks} model chunks a stage need pipeline_model_parallel_size above 1",
        )


def check_experts(config: MasterConfig) -> Iterator[Finding]:
    """The ranks of a pipeline stage are dealt to the experts anew."""
    megatron, world = config.policy.megatron_cfg, batch_sizes.world_size(config)
    if world % batch_sizes.model_parallel_size(config):
        return  # told by check_layout
    expert, tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    stages = megatron.pipeline_model_parallel_size
    if world // stages % (expert * tensor):
        yield Finding(
            (AT + "expert_model_parallel_size", AT + "expert_tensor_parallel_size"),
            f"EP {expert} x ETP {tensor} = {expert * tensor} does not divide the {world // stages} ranks of a pipeline "
            f"stage ({world} ranks / PP {stages})",
        )
    if expert * tensor > 1 and megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield Finding(
            (AT + "sequence_parallel", AT + "tensor_model_parallel_size"),
            "experts under tensor parallelism need sequence_parallel true: without it every tensor-parallel rank sends "
            "all tokens to the experts",
        )


def check_engine_experts(config: MasterConfig) -> Iterator[Finding]:
    """Experts are dealt to the ranks of an engine, or not."""
    at, vllm = "policy.generation.vllm_cfg.", config.policy.generation.vllm_cfg
    if vllm.expert_parallel_size not in (1, vllm.tensor_parallel_size):
        yield Finding(
            (at + "expert_parallel_size", at + "tensor_parallel_size"),
            f"{vllm.expert_parallel_size} is neither 1 nor tensor_parallel_size = {vllm.tensor_parallel_size}; experts "
            "are dealt to all ranks of an engine or to none",
        )


def check_router_replay(config: MasterConfig) -> Iterator[Finding]:
    """Stages run the forward pass of one micro-batch between those of another, and recomputation would then follow the
    wrong one's routes."""
    replay, megatron = config.policy.router_replay, config.policy.megatron_cfg
    if replay.enabled and megatron.activation_checkpointing and megatron.pipeline_model_parallel_size > 1:
        yield Finding(
            ("policy.router_replay.enabled", AT + "activation_checkpointing", AT + "pipeline_model_parallel_size"),
            "does not go with activation_checkpointing and pipeline stages together; switch one of them off",
        )
