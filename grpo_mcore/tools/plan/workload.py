"""The input of a plan: an accelerator's data sheet, and a recipe's step as plain values that a search can replace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from grpo_mcore.families import (
    AdapterShape,
    ModelShape,
    adapter_shape,
    check_context_parallel,
    check_length,
    check_settings,
    frozen_parts,
    grouped_experts,
    unquantized_layers,
)
from grpo_mcore.families.activations import Kernels, Rank
from grpo_mcore.layout import EngineLayout, LayoutError, PolicyLayout
from grpo_mcore.recipe import (
    MasterConfig,
    OnPolicyDistillationConfig,
    PPOConfig,
    algorithm_of,
    bin_tokens,
    bins_per_logprob_row,
    compares_distributions,
    divides_nodes,
    engine_layout,
    engine_pool,
    has_greedy_baseline,
    layout_findings,
    needs_prev,
    needs_reference,
    num_engines,
    own_attention,
    policy_layout,
    policy_pool,
    samples_per_step,
    samples_together,
    shares_prefixes,
    teacher_copies,
    teacher_policies,
    teacher_pools,
    teacher_settings,
    uses_images,
)
from grpo_mcore.recipe.schema.generation import ColocatedConfig, VllmConfig
from grpo_mcore.tools.plan.rank_params import RankParams, rank_params

BYTES = {"bfloat16": 2, "float32": 4}
GIB = 2**30


class PlanError(ValueError):
    """A plan that cannot be made; the message says what is missing and how to provide it."""


@dataclass(frozen=True)
class Device:
    """One accelerator: memory in bytes (None: that of the host, not checked), dense bfloat16 FLOP/s, and bandwidths in
    bytes/s in one direction: of its memory, to peers in the node, to other nodes, to the host. `reserved` is memory
    that the driver, NCCL and sleeping engines keep; `host_memory` is in bytes of a node, None if unknown."""

    name: str
    memory: int | None
    flops: float
    memory_bandwidth: float
    peer_bandwidth: float
    node_bandwidth: float
    host_bandwidth: float
    reserved: int = 3 * GIB
    host_memory: int | None = None


DEVICES = {
    device.name: device
    for device in (
        # Host memory of NVIDIA's DGX of this kind; of a workstation an assumption.
        Device("A100-40GB", 40 * 10**9, 312e12, 1.555e12, 300e9, 25e9, 25e9, host_memory=1024 * GIB),
        Device("A100", 80 * 10**9, 312e12, 2.0e12, 300e9, 25e9, 25e9, host_memory=2048 * GIB),
        Device("H100", 80 * 10**9, 989e12, 3.35e12, 450e9, 50e9, 55e9, host_memory=2048 * GIB),
        Device("H200", 141 * 10**9, 989e12, 4.8e12, 450e9, 50e9, 55e9, host_memory=2048 * GIB),
        Device("B200", 180 * 10**9, 2250e12, 8.0e12, 900e9, 50e9, 55e9, host_memory=2048 * GIB),
        # Four of a node of NVL72, whose hosts are linked by NVLink-C2C.
        Device("GB200", 186 * 10**9, 2500e12, 8.0e12, 900e9, 50e9, 450e9, host_memory=960 * 10**9),
        Device("GB300", 279 * 10**9, 2500e12, 8.0e12, 900e9, 100e9, 450e9, host_memory=960 * 10**9),
        # A card of 24 GB without NVLink.
        Device("RTX4090", 24 * 10**9, 165e12, 1.0e12, 25e9, 12e9, 25e9, host_memory=256 * GIB),
        # One rank on a shared host, with a core or two.
        Device("cpu", None, 5e10, 1e10, 5e9, 1e9, 1e10, reserved=0),
    )
}


def _quantized(shape: ModelShape, vllm: VllmConfig) -> tuple[float, tuple[str, ...], bool]:
    """Return the bytes of a quantised weight with its share of a scale, the patterns of layers without, and whether
    rows that are divided over ranks are quantised at the commit."""
    patterns = unquantized_layers(shape, vllm)
    scale = 1 / 32 if vllm.is_mx else 4 / shape.hidden_size if vllm.fp8_per_channel else 4 / 128**2
    return 1 + scale, tuple(pattern.removeprefix("re:") for pattern in patterns), vllm.fp8_per_channel


@dataclass(frozen=True)
class Workload:
    """A recipe's step on a model. Lengths are in tokens. `mean_length` is the expected length of prompt and answer,
    which is in no recipe; `bin_tokens` is the capacity of a training micro-batch."""

    shape: ModelShape
    layout: PolicyLayout
    nodes: int
    gpus_per_node: int
    recompute: bool  # whole layers
    recomputed: frozenset[str]  # or these parts of them
    frozen: tuple[str, ...]  # parts of names of parameters that are not trained
    adapters: AdapterShape | None  # None: all weights are trained
    refit_adapters: bool  # a refit brings the adapters alone
    element: int  # bytes of a weight or activation
    gradient: int  # bytes of a gradient
    precision_aware: bool  # updates take bfloat16 gradients as they are
    host_share: float  # share of the weights that are updated on the host
    kernels: Kernels
    own_attention: bool
    grouped_experts: bool
    samples: int  # per step
    batch: int  # samples per optimizer step
    max_length: int
    mean_length: int
    group: int  # samples of a prompt that may share its computation
    max_new_tokens: int
    bin_tokens: int
    logprob_bins: int  # joined into one row of a log-prob pass
    logprob_chunk: int
    grpo: bool
    reference: bool
    prev: bool
    engine_layout: EngineLayout
    engines: int
    engine_element: int
    engine_quantized: tuple[float, tuple[str, ...], bool] | None  # see _quantized
    engine_share: float  # gpu_memory_utilization
    kv_cache: int | None  # bytes per rank; None: what engine_share leaves
    max_sequences: int  # samples that an engine generates at a time
    wakes_after_parity: bool  # engines sleep with their weights during a comparison of log-probs
    refit_buffer: int
    colocated: bool  # engines and policy share devices
    engine_nodes: int  # nodes with engines
    engine_gpus: int  # accelerators of each of these that they may use
    divided: bool  # engines have some accelerators of each node to themselves
    default_engines: bool  # as many engines as fit
    engines_sleep: bool  # the engines give their memory to the policy while it trains
    offloads: bool  # the optimizer is on the host during the log-prob passes too
    keeps_optimizer: bool  # the optimizer stays on the device while engines generate
    waits_for_longest: bool  # a step's training waits for all of its samples
    saves: bool  # checkpoints are written
    gathers: bool  # for a checkpoint each rank gathers the optimizer of its parameters
    teachers: tuple[TeacherLoad, ...] = ()
    images: int = 0  # per step, one for each prompt; 0: text
    epochs: int = 1  # passes of the policy over the samples of a step
    critic: Workload | None = None  # its passes, as if it were the policy of the run
    critic_epochs: int = 1
    greedy: int = 0  # samples per step that are baselines, and not trained on

    @property
    def critic_on_ranks(self) -> Workload | None:
        """The critic's load in the policy's layout."""
        if self.critic is None:
            return None
        return replace(self.critic, layout=self.layout, nodes=self.nodes, gpus_per_node=self.gpus_per_node)

    @property
    def engines_stay(self) -> bool:
        """Whether the engines keep their memory on the policy's devices in every phase. False on CPU."""
        return self.grpo and self.colocated and not self.engines_sleep and self.kernels != "cpu"

    @property
    def world(self) -> int:
        return self.layout.world_size

    @property
    def ranks_per_node(self) -> int:
        return min(self.world, self.gpus_per_node)

    @property
    def rank(self) -> Rank:
        layout = self.layout
        return Rank(
            layout.tensor, layout.sequence_parallel, self.element, self.kernels, layout.context, layout.expert_tensor,
            self.own_attention, self.grouped_experts, layout.expert,
        )  # fmt: skip

    @property
    def optimizer_steps(self) -> int:
        return max(1, self.samples // self.batch)

    @property
    def trained(self) -> int:
        """Samples per step that are trained on."""
        return self.samples - self.greedy

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in an optimizer step, if each bin is filled with samples of the mean length."""
        per_bin = max(1, int(self.bin_tokens / max(1, self.mean_length * self.computed)))
        return max(1, math.ceil((self.batch - self.greedy / self.optimizer_steps) / self.layout.data / per_bin))

    @property
    def prompt(self) -> int:
        """Expected tokens of a prompt: what a sample's longest answer leaves, at least a quarter."""
        return max(self.mean_length // 4, self.mean_length - self.max_new_tokens)

    @property
    def sharing(self) -> int:
        """Samples of a prompt that share its computation: as many of a group as a bin has room for."""
        answer = max(1, self.mean_length - self.prompt)
        return max(1, min(self.group, (self.bin_tokens - self.prompt) // answer))

    @property
    def computed(self) -> float:
        """Share of the samples' tokens that log-prob passes and training compute."""
        return 1 - (1 - 1 / self.sharing) * self.prompt / self.mean_length

    @cached_property
    def chunks(self) -> tuple[tuple[range, ...], ...]:
        """Layers by stage and model chunk."""
        return self.layout.layers(self.shape.num_layers)

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers by stage."""
        return tuple(tuple(layer for chunk in chunks for layer in chunk) for chunks in self.chunks)

    def params(self, stage: int) -> RankParams:
        if stage not in self._params:
            self._params[stage] = rank_params(
                self.shape, self.layout, stage, self.chunks[stage], self.frozen, self.adapters
            )
        return self._params[stage]

    @cached_property
    def _params(self) -> dict[int, RankParams]:
        return {}


@dataclass(frozen=True)
class TeacherLoad:
    """A teacher's part of a step. `load` are its passes, as if it were the policy of a run on the same devices. It
    scores this `share` of the samples, taken to be equal for all teachers. With `distributions` it sends hidden states,
    which the policy's ranks project with its output layer, and not log-probs. `apart` it has nodes to itself. With
    `engines` it is vLLM engines, whose ranks `load.layout` has too: each a copy of the model."""

    alias: str
    load: Workload
    share: float
    distributions: bool
    apart: bool
    engines: bool = False

    def on(self, nodes: int) -> TeacherLoad | None:
        """Return the same on another number of nodes; None if its layout does not fit them."""
        load, layout = self.load, self.load.layout
        if self.apart:
            return self
        data, rest = divmod(nodes * load.gpus_per_node, layout.tensor * layout.pipeline * layout.context)
        if rest:
            return None
        return replace(self, load=replace(load, nodes=nodes, layout=replace(layout, data=data)))


def workload_of(
    config: MasterConfig,
    shape: ModelShape,
    *,
    kernels: Kernels,
    mean_length: int | None = None,
    teachers: Mapping[str, ModelShape] = MappingProxyType({}),
    critic: ModelShape | None = None,
) -> Workload:
    """Return the workload of a recipe. Raises LayoutError for a layout that fits neither the devices nor the model,
    FamilyError for a setting that the model does not allow.

    `mean_length` is the expected tokens of a sample, by default half of policy.max_total_sequence_length. `teachers`
    are the shapes of those that are to be counted, by alias, `critic` that of the critic.
    """
    policy, generation = config.policy, config.policy.generation
    megatron, vllm = policy.megatron_cfg, generation.vllm_cfg
    optimizer = megatron.optimizer
    pool, cpu = policy_pool(config), kernels == "cpu"
    if findings := layout_findings(config, shape, gpu=not cpu):
        raise LayoutError(*findings)
    check_settings(shape, megatron)
    check_length(shape, policy.max_total_sequence_length)
    layout = policy_layout(policy.megatron_cfg, pool.ranks)
    longest, algorithm = policy.max_total_sequence_length, algorithm_of(config)
    grpo, together = algorithm == "grpo", samples_together(config, algorithm)
    element = BYTES[policy.precision]
    fused = kernels == "transformer_engine"
    shared = shares_prefixes(policy.sequence_packing, transformer_engine=fused)
    ours = own_attention(policy.sequence_packing)
    check_context_parallel(shape, layout.context, fused_attention=fused and not ours)
    selective = megatron.activation_checkpointing and megatron.recompute_granularity == "selective"
    kv_cache_gb = vllm.kv_cache_memory_gb or (1.0 if cpu else None)
    experts = shape, layout.expert_tensor, element, adapter_shape(megatron.peft)
    greedy = config.grpo.num_prompts_per_step if grpo and has_greedy_baseline(config) else 0
    return Workload(
        shape=shape,
        layout=layout,
        nodes=pool.nodes,
        gpus_per_node=pool.per_node,
        recompute=megatron.activation_checkpointing and not selective,
        recomputed=frozenset((selective and megatron.recompute_modules) or ()),
        frozen=frozen_parts(megatron),
        adapters=adapter_shape(megatron.peft),
        refit_adapters=megatron.peft.enabled and megatron.peft.refit == "adapters",
        element=element,
        gradient=4 if megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else element,
        precision_aware=optimizer.use_precision_aware_optimizer,
        host_share=optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0,
        kernels=kernels,
        own_attention=ours,
        grouped_experts=not cpu and megatron.moe_grouped_gemm and grouped_experts(*experts),
        samples=samples_per_step(config) if grpo else together * policy.train_global_batch_size,
        batch=together * policy.train_global_batch_size,
        max_length=longest,
        mean_length=min(longest, mean_length or max(1, longest // 2)),
        group=config.grpo.num_generations_per_prompt - bool(greedy) if grpo and shared else 1,
        max_new_tokens=generation.max_new_tokens or longest,
        bin_tokens=bin_tokens(config, algorithm) or together * longest * policy.train_micro_batch_size,
        logprob_bins=bins_per_logprob_row(policy),
        logprob_chunk=policy.logprob_chunk_size or 1024,
        grpo=grpo,
        reference=grpo and needs_reference(config),
        prev=grpo and needs_prev(config),
        engine_layout=engine_layout(config),
        engines=max(1, num_engines(config, gpu=not cpu)),
        engine_element=BYTES["bfloat16" if vllm.quantization else vllm.precision or policy.precision],
        engine_quantized=_quantized(shape, vllm) if vllm.quantization else None,
        engine_share=vllm.gpu_memory_utilization,
        kv_cache=None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
        max_sequences=vllm.sequences,
        wakes_after_parity=policy.refit_parity is not None,
        refit_buffer=int(policy.refit_buffer_size_gb * 2**30),
        colocated=generation.colocated.enabled,
        engine_nodes=(engine_pool(config) or pool).nodes,
        engine_gpus=(engine_pool(config) or pool).per_node,
        divided=not generation.colocated.enabled and divides_nodes(config),
        default_engines=generation.num_engines is None,
        engines_sleep=not config.grpo.async_grpo.max_age or config.grpo.async_grpo.pauses,
        offloads=grpo and policy.offload_optimizer_for_logprob,
        keeps_optimizer=not policy.offload_optimizer_for_generation,
        waits_for_longest=not config.grpo.async_grpo.max_age,
        saves=config.checkpointing.enabled,
        gathers=megatron.dist_ckpt_optim_fully_reshardable,
        teachers=_teachers(config, teachers, kernels, mean_length),
        epochs=config.ppo.ppo_epochs if config.ppo.enabled else 1,
        critic=_critic(config, critic, kernels, mean_length),
        critic_epochs=config.ppo.critic_epochs,
        images=config.grpo.num_prompts_per_step if uses_images(config) else 0,
        greedy=greedy,
    )


def _critic(
    config: MasterConfig, shape: ModelShape | None, kernels: Kernels, mean_length: int | None
) -> Workload | None:
    if shape is None or config.value is None:
        return None
    changes = {"policy": config.value, "value": None, "ppo": PPOConfig()}
    return workload_of(config.model_copy(update=changes), shape, kernels=kernels, mean_length=mean_length)


def _teachers(
    config: MasterConfig, shapes: Mapping[str, ModelShape], kernels: Kernels, mean_length: int | None
) -> tuple[TeacherLoad, ...]:
    """Return the teachers of a recipe, aliases of one model and layout once."""
    policies, pools, settings = teacher_policies(config), teacher_pools(config), teacher_settings(config)
    loads, copies = {}, teacher_copies(config)
    for alias, shape in shapes.items():
        if copies[alias] != alias:
            continue
        changes: dict[str, Any] = {"policy": policies[alias], "on_policy_distillation": OnPolicyDistillationConfig()}
        if (pool := pools.get(alias)) is not None:
            generation = policies[alias].generation.model_copy(update={"colocated": ColocatedConfig()})
            changes["policy"] = policies[alias].model_copy(update={"generation": generation})
            size = {"num_nodes": pool.nodes, "gpus_per_node": pool.per_node}
            changes["cluster"] = config.cluster.model_copy(update=size)
        loads[alias] = workload_of(config.model_copy(update=changes), shape, kernels=kernels, mean_length=mean_length)
    distributions = compares_distributions(config)
    return tuple(
        TeacherLoad(alias, load, 1 / len(loads), distributions, alias in pools, settings[alias].backend == "vllm")
        for alias, load in loads.items()
    )
