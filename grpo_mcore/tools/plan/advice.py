"""What a plan means: the bottleneck in one sentence, and warnings with the key to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_mcore.tools.plan.devices import Device
from grpo_mcore.tools.plan.memory import CLOSE, EngineMemory, StageMemory
from grpo_mcore.tools.plan.refit_traffic import RefitTraffic
from grpo_mcore.tools.plan.timing import MAX_SEQUENCES, StepTime
from grpo_mcore.tools.plan.workload import Workload

MEGATRON = "policy.megatron_cfg."
VLLM = "policy.generation.vllm_cfg."


def bottleneck(times: StepTime) -> str:
    """The slowest phase and what it spends its time on."""
    slowest = times.slowest
    return (
        f"{slowest.name} takes {slowest.likely / times.likely:.0%} of a step (about {slowest.likely:.3g} s of "
        f"{times.likely:.3g} s), and most of that is {slowest.bound}"
    )


def warnings(
    load: Workload,
    device: Device,
    engine: EngineMemory,
    stages: Sequence[StageMemory],
    times: StepTime,
    traffic: RefitTraffic | None,
) -> list[str]:
    """Each says what is wrong and which key changes it."""
    return [
        *_memory(load, device, stages),
        *_engines(load, device, engine),
        *_layout(load, times),
        *([f"{traffic.buckets} refit buckets: a larger policy.refit_buffer_size_gb makes fewer of them"]
          if traffic is not None and traffic.buckets > 64 else []),
    ]  # fmt: skip


def _memory(load: Workload, device: Device, stages: Sequence[StageMemory]) -> Iterator[str]:
    if device.memory is None:
        return
    for stage in stages:
        peak = stage.peak
        share = peak.total / device.memory
        if share <= CLOSE:
            continue
        largest = max(peak.parts, key=lambda part: peak.parts[part])
        state = "does not fit" if share > 1 else "is close to the limit"
        yield (
            f"stage {stage.stage} {state}: {peak.name} needs {peak.total / 1e9:.1f} of {device.memory / 1e9:.0f} GB, "
            f"most of it {largest} ({peak.parts[largest] / 1e9:.1f} GB); {_remedy(peak.name, largest, load)}"
        )


def _remedy(phase: str, part: str, load: Workload) -> str:
    if phase == "generation" or part in ("KV cache", "engine overhead"):
        return f"lower {VLLM}gpu_memory_utilization (now {load.engine_share:g})"
    if part == "activations" and not load.recompute:
        return f"set {MEGATRON}activation_checkpointing: true, or lower policy.sequence_packing.train_mb_tokens"
    if part == "activations":
        return "lower policy.sequence_packing.train_mb_tokens"
    if part == "logits":
        return f"raise {MEGATRON}tensor_model_parallel_size, or lower policy.logprob_chunk_size"
    if part == "gradients" and load.gradient > load.element:
        return (
            f"raise {MEGATRON}tensor_model_parallel_size or pipeline_model_parallel_size, or set "
            f"{MEGATRON}distributed_data_parallel_config.grad_reduce_in_fp32: false"
        )
    if part == "optimizer":
        return "add data-parallel ranks (cluster.num_nodes), over which the optimizer is split"
    if part == "engine weights":
        return f"raise {VLLM}tensor_parallel_size"
    return f"raise {MEGATRON}tensor_model_parallel_size or pipeline_model_parallel_size"


def _engines(load: Workload, device: Device, engine: EngineMemory) -> Iterator[str]:
    if not load.grpo:
        return
    together = engine.sequences(load.max_length)
    each = -(-load.samples // load.engines)
    key = f"{VLLM}gpu_memory_utilization" if load.kv_cache is None else f"{VLLM}kv_cache_memory_gb"
    if together < 1:
        yield (
            f"an engine's KV cache cannot hold one sample of {load.max_length:,} tokens: raise {key} or "
            f"{VLLM}tensor_parallel_size"
        )
    elif together < min(each, MAX_SEQUENCES) // 4:
        yield f"an engine's KV cache holds {together} longest samples of the {each} it gets: raise {key}"
    used = load.engines * load.engine_tensor
    if load.colocated and load.kernels != "cpu" and used < load.world:
        yield (
            f"the engines use {used} of {load.world} accelerators: policy.generation.num_engines {load.engines} x "
            f"{VLLM}tensor_parallel_size {load.engine_tensor}"
        )


def _layout(load: Workload, times: StepTime) -> Iterator[str]:
    tensor = load.layout.tensor
    if tensor > load.gpus_per_node:
        yield (
            f"{MEGATRON}tensor_model_parallel_size {tensor} crosses nodes of {load.gpus_per_node}: every layer waits "
            "for the network; use pipeline_model_parallel_size instead"
        )
    if tensor > 1 and not load.layout.sequence_parallel:
        yield f"{MEGATRON}sequence_parallel: true would split the activations between TP regions too, for nothing"
    if times.bubble > 0.2:
        yield (
            f"the pipeline waits {times.bubble:.0%} of the time: {load.micro_batches} micro-batches for "
            f"{load.layout.pipeline} stages; lower {MEGATRON}pipeline_model_parallel_size or "
            "policy.sequence_packing.train_mb_tokens, or raise policy.train_global_batch_size"
        )
