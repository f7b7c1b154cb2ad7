"""Memory of a rank: what a stage holds in each phase of a step, in bytes, against its device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_mcore.algorithms.plan.devices import Device
from grpo_mcore.algorithms.plan.workload import Workload
from grpo_mcore.families import local_shape, params_of
from grpo_mcore.families.activations import (
    first_stage_bytes,
    last_stage_bytes,
    layer_bytes,
    layer_input_bytes,
    logits_bytes,
)

ENGINE_OVERHEAD = 3 * 2**30
"""What an engine takes inside its share besides weights and KV cache: activations of the largest batch, CUDA graphs."""


CLOSE = 0.92
"""Share of the memory above which fragmentation alone can end a run."""


@dataclass(frozen=True)
class Phase:
    """One phase on one rank: its parts by name, in bytes."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StageMemory:
    """A pipeline stage: all its ranks hold as much (the largest share of the optimizer is counted)."""

    stage: int
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class EngineMemory:
    """One rank of an engine, in bytes. `sequences`: of the longest length that the KV cache holds at one time."""

    weights: int
    kv_cache: int
    kv_bytes_per_token: int

    def sequences(self, length: int) -> int:
        return int(self.kv_cache // (self.kv_bytes_per_token * length)) if self.kv_cache > 0 else 0


def weight_bytes(load: Workload, stage: int) -> int:
    """The buffer that the parameters live in, with Megatron-Core's padding."""
    return load.shard(stage).buffer * load.element


def gradient_bytes(load: Workload, stage: int) -> int:
    """The gradient buffer: as long as that of the parameters."""
    return load.shard(stage).buffer * load.gradient


def optimizer_bytes(load: Workload, stage: int, data_rank: int | None = None) -> int:
    """State of the distributed optimizer on a rank (None: the one with most): two float32 moments (momentum: one), and
    a float32 copy of the weights where these are bfloat16."""
    shard = load.shard(stage)
    owned = shard.most_owned if data_rank is None else shard.owned[data_rank]
    state = 8 if load.optimizer == "adam" else 4 * load.momentum
    return owned * (state + (4 if load.element < 4 else 0))


def activation_bytes(load: Workload, stage: int, tokens: int | None = None, *, padding: float = 1.0) -> int:
    """Peak of what the backward pass keeps: every micro-batch in flight on this stage, rows of `tokens` (None: full
    bins). 1F1B has as many micro-batches in flight as there are stages from this one to the end."""
    tokens, rank, stages = tokens or load.bin_tokens, load.rank, load.layout.pipeline
    layers, in_flight = len(load.layers[stage]), min(stages - stage, load.micro_batches)
    layer = layer_bytes(load.shape, rank, tokens, padding=padding)
    ends = first_stage_bytes(tokens) if stage == 0 else 0.0
    head = last_stage_bytes(load.shape, rank, tokens) if stage == stages - 1 else 0.0
    if not load.recompute:
        return int(in_flight * (layers * layer + ends + head))
    kept = layer_input_bytes(load.shape, rank, tokens)
    # One layer at a time is computed again, when the head's are gone.
    return int(in_flight * (layers * kept + ends) + max(head, layer - kept if layers else 0.0))


def engine_memory(load: Workload, device: Device) -> EngineMemory:
    """One rank of an engine: vLLM splits as Megatron-Core does; each rank has one key-value head at least."""
    shape, tensor = load.shape, load.engine_tensor
    weights = sum(math.prod(local_shape(param, shape, tensor)) for param in params_of(shape) if not param.copy)
    heads = max(1, shape.num_kv_heads // tensor)
    per_token = 2 * shape.num_layers * heads * shape.head_dim * load.engine_element
    if load.kv_cache is not None:
        cache = load.kv_cache
    elif device.memory is None:
        cache = 2**30
    else:
        cache = int(load.engine_share * device.memory) - weights * load.engine_element - ENGINE_OVERHEAD
    return EngineMemory(weights * load.engine_element, cache, per_token)


def stage_memory(load: Workload, device: Device, stage: int, engine: EngineMemory) -> StageMemory:
    """All phases on a rank of one stage. The order in a step: refit, generation, log-probs, training.

    Engines that generate while the policy trains (a trajectory age above 0) keep their memory in every phase; those
    with devices of their own take none of the policy's.
    """
    weights, gradients = weight_bytes(load, stage), gradient_bytes(load, stage)
    optimizer = optimizer_bytes(load, stage)
    base = {"weights": weights, "reserved": device.reserved}
    state = {**base, "gradients": gradients, "optimizer": optimizer}
    cached = {"engine weights": engine.weights, "KV cache": max(0, engine.kv_cache)}
    if device.memory is not None:
        cached["engine overhead"] = ENGINE_OVERHEAD
    if load.engines_stay:
        state |= cached
    last = stage == load.layout.pipeline - 1
    forward = int(layer_bytes(load.shape, load.rank, load.bin_tokens))  # one layer's; more than it needs
    chunk = min(load.logprob_chunk, load.bin_tokens)
    phases = []
    if load.grpo:
        # The buffer lies in host memory where there are several policy ranks.
        shared = load.colocated and load.world == 1 and device.memory is not None
        buffer = {"refit buffer": load.refit_buffer} if shared else {}
        engines = {"engine weights": engine.weights} if load.colocated else {}
        phases.append(Phase("refit", {**state, **buffer, **engines}))
        if load.colocated:
            phases.append(Phase("generation", {**base, **buffer, **cached}))
        if load.prev or load.reference:
            clone = {"weights set aside for the reference": weights} if load.reference else {}
            logits = {"logits": int(logits_bytes(load.shape, load.rank, chunk, backward=False))} if last else {}
            phases.append(Phase("log-probs", {**state, **clone, "activations": forward, **logits}))
    logits = {"logits": int(logits_bytes(load.shape, load.rank, chunk, backward=True))} if last else {}
    phases.append(Phase("training", {**state, "activations": activation_bytes(load, stage), **logits}))
    return StageMemory(stage, tuple(phases))


def memory(load: Workload, device: Device) -> tuple[EngineMemory, tuple[StageMemory, ...]]:
    """One rank of an engine, and every stage of the policy, as if an engine's rank lived beside each of its ranks."""
    engine = engine_memory(load, device)
    return engine, tuple(stage_memory(load, device, stage, engine) for stage in range(load.layout.pipeline))


def fits(
    stages: tuple[StageMemory, ...], engine: EngineMemory, load: Workload, device: Device, margin: float = 1.0
) -> bool:
    """Every phase of every stage within `margin` of the device, and a KV cache for one longest sample at least."""
    room = device.memory is None or all(stage.peak.total <= margin * device.memory for stage in stages)
    return room and (not load.grpo or engine.sequences(load.max_length) >= 1)
