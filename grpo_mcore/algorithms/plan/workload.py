"""What a plan reads of a recipe, as plain values that a search can replace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Literal

from grpo_mcore.algorithms.logprob_passes import needs_prev, needs_reference
from grpo_mcore.families import FamilyError, ModelShape, Param, check_tensor_parallel, params_of
from grpo_mcore.families.activations import Kernels, Rank
from grpo_mcore.families.shards import Shard, shard_of, stage_layers, stage_params
from grpo_mcore.parallel.mesh import Layout
from grpo_mcore.recipe import MasterConfig, MegatronConfig, engine_pool, num_engines, policy_pool, samples_per_step
from grpo_mcore.recipe.master import runs_grpo

BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Workload:
    """A recipe's step on a model. Lengths in tokens; `mean_length`: prompt and answer of the sample that is expected,
    which no recipe knows; `bin_tokens`: of a training micro-batch."""

    shape: ModelShape
    layout: Layout
    nodes: int
    gpus_per_node: int
    first_layers: int | None
    last_layers: int | None
    recompute: bool
    element: int  # bytes of a weight or activation
    gradient: int  # bytes of a gradient
    optimizer: Literal["adam", "sgd"]
    momentum: bool
    kernels: Kernels
    samples: int  # of a step
    batch: int  # samples of an optimizer step
    max_length: int
    mean_length: int
    max_new_tokens: int
    bin_tokens: int
    logprob_chunk: int
    grpo: bool
    reference: bool
    prev: bool
    engine_tensor: int
    engines: int
    engine_element: int
    engine_share: float  # gpu_memory_utilization
    kv_cache: int | None  # bytes a rank; None: what engine_share leaves
    refit_buffer: int
    colocated: bool  # engines and policy share devices
    engine_nodes: int  # that hold engines
    engines_sleep: bool  # and the engines give their memory away while the policy trains

    @property
    def engines_stay(self) -> bool:
        """Whether the policy's devices hold the engines' memory in every phase. (On CPU there is only the host's.)"""
        return self.grpo and self.colocated and not self.engines_sleep and self.kernels != "cpu"

    @property
    def world(self) -> int:
        return self.layout.world_size

    @property
    def rank(self) -> Rank:
        return Rank(self.layout.tensor, self.layout.sequence_parallel, self.element, self.kernels)

    @property
    def optimizer_steps(self) -> int:
        return max(1, self.samples // self.batch)

    @property
    def micro_batches(self) -> int:
        """Of one rank in an optimizer step: bins of whole samples of the mean length."""
        per_bin = max(1, self.bin_tokens // max(1, self.mean_length))
        return max(1, math.ceil(self.batch / self.layout.data / per_bin))

    @cached_property
    def layers(self) -> tuple[range, ...]:
        """Layers of each stage. Raises FamilyError."""
        return stage_layers(self.shape.num_layers, self.layout.pipeline, self.first_layers, self.last_layers)

    def shard(self, stage: int) -> Shard:
        return _shard(self.shape, self.layers[stage], stage, self.layout.pipeline, self.layout.tensor, self.layout.data)


@cache
def _params(shape: ModelShape) -> tuple[Param, ...]:
    return params_of(shape)


@lru_cache(maxsize=4096)
def _shard(shape: ModelShape, layers: range, stage: int, stages: int, tensor: int, data: int) -> Shard:
    found = stage_params(_params(shape), layers, stage, stages)
    return shard_of(found, shape, tensor, data, shared_apart=shape.tied_embeddings and stages > 1)


def _check_known(shape: ModelShape, megatron: MegatronConfig) -> None:
    """Raises FamilyError for what the plan has no numbers of."""
    if shape.experts or shape.latent or shape.mamba:
        raise FamilyError(f"policy.model_name: no plan of a {shape.family} model yet; only of dense ones")
    for name, size in (
        ("context_parallel_size", megatron.context_parallel_size),
        ("virtual_pipeline_model_parallel_size", megatron.virtual_pipeline_model_parallel_size or 1),
        ("expert_model_parallel_size", megatron.expert_model_parallel_size),
        ("expert_tensor_parallel_size", megatron.expert_tensor_parallel_size),
    ):
        if size > 1:
            raise FamilyError(f"policy.megatron_cfg.{name} {size}: no plan of such a layout yet; only of 1")


def workload_of(
    config: MasterConfig, shape: ModelShape, *, kernels: Kernels, mean_length: int | None = None
) -> Workload:
    """The workload of a recipe. Raises FamilyError for a layout that the model does not allow.

    `mean_length`: tokens of an expected sample; None: half of policy.max_total_sequence_length.
    """
    policy, generation = config.policy, config.policy.generation
    megatron, vllm = policy.megatron_cfg, generation.vllm_cfg
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    _check_known(shape, megatron)
    check_tensor_parallel(shape, tensor)
    pool, cpu = policy_pool(config), kernels == "cpu"
    world = pool.ranks
    layout = Layout(tensor, pipeline, world // (tensor * pipeline), megatron.sequence_parallel)
    longest, grpo = policy.max_total_sequence_length, runs_grpo(config)
    packing = policy.sequence_packing
    element = BYTES[policy.precision]
    kv_cache_gb = vllm.kv_cache_memory_gb or (1.0 if cpu else None)
    found = Workload(
        shape=shape,
        layout=layout,
        nodes=pool.nodes,
        gpus_per_node=pool.per_node,
        first_layers=megatron.num_layers_in_first_pipeline_stage,
        last_layers=megatron.num_layers_in_last_pipeline_stage,
        recompute=megatron.activation_checkpointing,
        element=element,
        gradient=4 if megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else element,
        optimizer=megatron.optimizer.optimizer,
        momentum=megatron.optimizer.sgd_momentum > 0,
        kernels=kernels,
        samples=samples_per_step(config) if grpo else policy.train_global_batch_size,
        batch=policy.train_global_batch_size,
        max_length=longest,
        mean_length=min(longest, mean_length or max(1, longest // 2)),
        max_new_tokens=generation.max_new_tokens or longest,
        bin_tokens=(packing.train_mb_tokens if packing.enabled else None) or longest * policy.train_micro_batch_size,
        logprob_chunk=policy.logprob_chunk_size or 1024,
        grpo=grpo,
        reference=grpo and needs_reference(config),
        prev=grpo and needs_prev(config),
        engine_tensor=vllm.tensor_parallel_size,
        engines=max(1, num_engines(config, gpu=not cpu)),
        engine_element=BYTES[vllm.precision or policy.precision],
        engine_share=vllm.gpu_memory_utilization,
        kv_cache=None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
        refit_buffer=int(policy.refit_buffer_size_gb * 2**30),
        colocated=generation.colocated.enabled,
        engine_nodes=(engine_pool(config) or pool).nodes,
        engines_sleep=not config.grpo.async_grpo.max_age or config.grpo.async_grpo.pauses,
    )
    assert found.layers  # raises here where the layers do not divide
    return found
