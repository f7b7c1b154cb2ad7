"""Memory of a rank: what a stage holds in each phase of a step, in bytes, against its device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from grpo_mcore.families import Block, ModelShape, local_shape, params_of
from grpo_mcore.families.activations import (
    first_stage_bytes,
    last_stage_bytes,
    layer_bytes,
    layer_input_bytes,
    logits_bytes,
)
from grpo_mcore.parallel.mesh import Coordinates
from grpo_mcore.tools.plan.devices import Device
from grpo_mcore.tools.plan.workload import Workload

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
    """One rank of an engine, in bytes. `sequences`: of the longest length that the KV cache holds at one time.
    `state_bytes`: of one sequence, however long: the states of Mamba layers."""

    weights: int
    kv_cache: int
    kv_bytes_per_token: int
    state_bytes: int = 0

    def sequences(self, length: int) -> int:
        each = self.kv_bytes_per_token * length + self.state_bytes
        return int(self.kv_cache // each) if self.kv_cache > 0 else 0


def weight_bytes(load: Workload, stage: int) -> int:
    """The buffers that the parameters live in, with Megatron-Core's padding, and parameters that are not trained."""
    params = load.params(stage)
    return (params.buffer + params.frozen) * load.element


def gradient_bytes(load: Workload, stage: int) -> int:
    """The gradient buffers: as long as those of the parameters."""
    return load.params(stage).buffer * load.gradient


def optimizer_bytes(load: Workload, stage: int, here: Coordinates | None = None) -> int:
    """State of the distributed optimizer on a rank (None: the one with most): two float32 moments (momentum: one), and
    a float32 copy of the weights where these are bfloat16."""
    state = 8 if load.optimizer == "adam" else 4 * load.momentum
    return load.params(stage).owned(load.layout, here) * (state + (4 if load.element < 4 else 0))


def activation_bytes(load: Workload, stage: int, tokens: int | None = None, *, padding: float = 1.0) -> int:
    """Peak of what the backward pass keeps: every micro-batch in flight on this stage, rows of `tokens` (None: full
    bins), of which a context-parallel rank has its part."""
    rank, layout = load.rank, load.layout
    here = (tokens or load.bin_tokens) / layout.context
    chunks = _in_flight(load, stage)
    ends = first_stage_bytes(here) if stage == 0 else 0.0
    last = stage == layout.pipeline - 1
    head = last_stage_bytes(load.shape, rank, here) if last else 0.0
    heads = chunks[-1] if layout.virtual == 1 else 1  # interleaved, the last stage turns around at once
    kept = layer_input_bytes(load.shape, rank, here)
    found, largest = chunks[0] * ends, 0.0
    for flying, layers in zip(chunks, load.chunks[stage], strict=True):
        each = [
            layer_bytes(load.shape, rank, here, layer, length=load.mean_length, padding=padding) for layer in layers
        ]
        found += flying * (kept * len(each) if load.recompute else sum(each))
        largest = max([largest, *each])
    if not load.recompute:
        return int(found + heads * head)
    # One layer at a time is computed again, when the head's are gone.
    return int(found + max(head, largest - kept if largest else 0.0))


def _in_flight(load: Workload, stage: int) -> list[int]:
    """Micro-batches of which the backward pass is still to come, of each model chunk at the peak.

    1F1B has as many as there are stages from this one to the end. Interleaved (arXiv 2104.04473, section 2.2), groups
    of as many micro-batches as there are stages go through the chunks in turn.
    """
    stages, chunks, count = load.layout.pipeline, load.layout.virtual, load.micro_batches
    if chunks == 1:
        return [min(stages - stage, count)]
    total = -(-count // stages) * stages * chunks
    ahead = total if total == stages * chunks else min(total, (stages - stage - 1) * 2 + (chunks - 1) * stages + 1)
    found = [0] * chunks
    for step in range(ahead):
        found[step // stages % chunks] += 1
    return found


def engine_memory(load: Workload, device: Device) -> EngineMemory:
    """One rank of an engine: vLLM splits as Megatron-Core does, and experts and Mamba mixers too; each rank has one
    key-value head at least, and the whole of a latent."""
    shape, tensor = load.shape, load.engine_tensor
    weights = _engine_numel(shape, tensor)
    attention = shape.blocks.count(Block.ATTENTION) if shape.blocks else shape.num_layers
    width = 2 * max(1, shape.num_kv_heads // tensor) * shape.head_dim
    if shape.latent is not None:
        width = shape.latent.key_value_rank + shape.latent.rotary_dim
    state = 0
    if (mamba := shape.mamba) is not None:
        numel = mamba.inner * mamba.state_size + mamba.convolved * (mamba.kernel - 1)
        state = shape.blocks.count(Block.MAMBA) * numel // tensor * load.engine_element
    if load.kv_cache is not None:
        cache = load.kv_cache
    elif device.memory is None:
        cache = 2**30
    else:
        cache = int(load.engine_share * device.memory) - weights * load.engine_element - ENGINE_OVERHEAD
    return EngineMemory(weights * load.engine_element, cache, attention * width * load.engine_element, state)


@cache
def _engine_numel(shape: ModelShape, tensor: int) -> int:
    return sum(math.prod(local_shape(param, shape, tensor)) for param in params_of(shape) if not param.copy)


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
    here = load.bin_tokens / load.layout.context
    each = (layer_bytes(load.shape, load.rank, here, layer, length=load.mean_length) for layer in load.layers[stage])
    forward = int(max(each))  # one layer's; more than it needs
    chunk = min(load.logprob_chunk, math.ceil(here))
    phases = []
    if load.grpo:
        # The buffer lies in host memory where there are several policy ranks.
        shared = load.colocated and load.world == 1 and device.memory is not None
        buffer = {"refit buffer": load.refit_buffer} if shared else {}
        engines = {"engine weights": engine.weights} if load.colocated else {}
        # The optimizer has made room for the engines by then, where there is memory to save.
        kept = base if load.colocated and load.engines_sleep and device.memory is not None else state
        phases.append(Phase("refit", {**kept, **buffer, **engines}))
        if load.colocated:
            phases.append(Phase("generation", {**base, **buffer, **cached}))
        if load.prev or load.reference:
            aside = load.reference and load.adapters is None  # else it is the model without them
            clone = {"weights set aside for the reference": weights} if aside else {}
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
