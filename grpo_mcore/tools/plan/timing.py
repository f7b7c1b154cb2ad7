"""FLOPs and seconds of each phase of a step: a floor from the data sheet, and what is likely."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_mcore.families import Block, forward_flops
from grpo_mcore.tools.plan.devices import Device
from grpo_mcore.tools.plan.memory import EngineMemory, gradient_bytes, weight_bytes
from grpo_mcore.tools.plan.refit_traffic import RefitTraffic
from grpo_mcore.tools.plan.workload import Workload

COMPUTE_EFFICIENCY = 0.40
"""Share of a device's peak FLOP/s that dense training reaches in practice."""
MEMORY_EFFICIENCY = 0.60
"""Share of the memory bandwidth that decoding reaches."""
LINK_EFFICIENCY = 0.80
MAX_SEQUENCES = 256
"""Samples that an engine runs together at most."""


@dataclass(frozen=True)
class PhaseTime:
    """A phase of a step. `flops`: of all ranks. `floor`, `likely`: seconds. `bound`: what the time goes into."""

    name: str
    flops: float
    floor: float
    likely: float
    bound: str


@dataclass(frozen=True)
class StepTime:
    phases: tuple[PhaseTime, ...]
    bubble: float
    """Share of a training rank's time that it waits for other stages."""

    @property
    def likely(self) -> float:
        return sum(phase.likely for phase in self.phases)

    @property
    def slowest(self) -> PhaseTime:
        return max(self.phases, key=lambda phase: phase.likely)


def pipeline_bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """(p - 1) / (v m + p - 1) of 1F1B (arXiv 2104.04473, section 2.2, as a share of the whole time)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def step_time(load: Workload, device: Device, engine: EngineMemory, traffic: RefitTraffic | None) -> StepTime:
    """All phases of one step of the loop."""
    lengths = [load.mean_length]
    forward = forward_flops(load.shape, lengths) * load.samples
    bubble = pipeline_bubble(load.layout.pipeline, load.micro_batches, load.layout.virtual)
    phases = []
    if load.grpo:
        if traffic is not None:
            seconds = traffic.seconds(load, device)
            phases.append(PhaseTime("refit", 0.0, seconds, seconds / LINK_EFFICIENCY, traffic.link))
        phases.append(_generation(load, device, engine))
        passes = int(load.prev) + int(load.reference)
        if passes:
            phases.append(_pass("log-probs", passes * forward, load, device, bubble, passes, gradients=False))
    # Forward, gradients of the activations, those of the weights (of which adapters have next to none), and once more
    # forward.
    sweeps = 2 + (load.adapters is None) + load.recompute
    phases.append(_pass("training", sweeps * forward, load, device, bubble, sweeps, gradients=True))
    return StepTime(tuple(phases), bubble)


def _pass(
    name: str, flops: float, load: Workload, device: Device, bubble: float, sweeps: int, *, gradients: bool
) -> PhaseTime:
    """Forward (and backward) passes over the step's samples. `sweeps`: passes through the layers, for TP's traffic."""
    compute = flops / load.world / device.flops
    tensor = _tensor_parallel_seconds(load, device) * sweeps
    context, experts = _context_seconds(load, device) * sweeps, _expert_seconds(load, device) * sweeps
    links = tensor + context + experts
    data = _data_parallel_seconds(load, device) if gradients else 0.0
    floor = max(compute, links + data)
    likely = (compute / COMPUTE_EFFICIENCY + links / LINK_EFFICIENCY) / (1 - bubble) + data / LINK_EFFICIENCY
    shares = {
        "compute": compute / COMPUTE_EFFICIENCY,
        "tensor-parallel traffic": tensor / LINK_EFFICIENCY,
        "context-parallel traffic": context / LINK_EFFICIENCY,
        "tokens to experts and back": experts / LINK_EFFICIENCY,
        "gradient and weight traffic": data / LINK_EFFICIENCY,
        "pipeline bubble": likely * bubble,
    }
    return PhaseTime(name, flops, floor, likely, max(shares, key=lambda name: shares[name]))


def _tensor_parallel_seconds(load: Workload, device: Device) -> float:
    """Per sweep: each layer sums its activations twice over the TP ranks (with sequence parallelism a reduce-scatter
    and an all-gather move as many bytes)."""
    tp = load.layout.tensor
    if tp == 1:
        return 0.0
    layers = max(len(layers) for layers in load.layers)
    nbytes = 2 * layers * _tokens_of_a_rank(load) * load.shape.hidden_size * load.element * 2 * (tp - 1) / tp
    return nbytes / _link(load, device, tp)


def _context_seconds(load: Workload, device: Device) -> float:
    """Per sweep: every attention layer gathers the keys and values of the other ranks, and of a Mamba mixer all that it
    scans."""
    layout, shape = load.layout, load.shape
    if layout.context == 1:
        return 0.0
    width = 2 * shape.num_kv_heads * shape.head_dim / layout.tensor
    if shape.latent is not None:
        width = shape.num_heads * (shape.head_dim + shape.latent.value_dim) / layout.tensor
    scanned = sum(shape.mamba.projected_parts) / layout.tensor if shape.mamba else 0
    widths = {None: width, Block.ATTENTION: width, Block.MAMBA: scanned}
    blocks = shape.blocks or (None,) * shape.num_layers
    each = max(sum(widths.get(blocks[layer], 0.0) for layer in layers) for layers in load.layers)
    nbytes = each * _tokens_of_a_rank(load) * (layout.context - 1) * load.element
    return nbytes / _link(load, device, layout.tensor * layout.context)


def _expert_seconds(load: Workload, device: Device) -> float:
    """Per sweep: each expert layer sends a token's copies to its experts' ranks and gets them back."""
    layout, experts = load.layout, load.shape.experts
    size = layout.expert * layout.expert_tensor
    if experts is None or size == 1:
        return 0.0
    layers = max(sum(load.shape.is_expert_layer(layer) for layer in layers) for layers in load.layers)
    tokens = _tokens_of_a_rank(load) * load.rank.share
    nbytes = 2 * layers * tokens * experts.active * load.shape.hidden_size * load.element * (size - 1) / layout.expert
    return nbytes / _link(load, device, size)


def _tokens_of_a_rank(load: Workload) -> float:
    """Of a step."""
    return load.samples * load.mean_length / load.layout.data / load.layout.context


def _link(load: Workload, device: Device, ranks: int) -> float:
    """Bandwidth among neighbouring ranks."""
    return device.peer_bandwidth if ranks <= load.gpus_per_node else device.node_bandwidth


def _data_parallel_seconds(load: Workload, device: Device) -> float:
    """Per step: reduce-scatter of the gradients and all-gather of the weights, once an optimizer step."""
    dp = load.layout.data * load.layout.context
    if dp == 1:
        return 0.0
    nbytes = max(gradient_bytes(load, stage) + weight_bytes(load, stage) for stage in range(load.layout.pipeline))
    return load.optimizer_steps * nbytes * (dp - 1) / dp / _link(load, device, load.layout.tensor * dp)


def _generation(load: Workload, device: Device, engine: EngineMemory) -> PhaseTime:
    """Prefill, then one token a sample and pass: a pass reads the weights once and every sample's keys and values."""
    flops = forward_flops(load.shape, [load.mean_length]) * load.samples
    prompt = max(load.mean_length // 4, load.mean_length - load.max_new_tokens)  # a quarter, where nothing says more
    new_tokens = load.mean_length - prompt
    each = math.ceil(load.samples / load.engines)
    together = max(1, min(each, MAX_SEQUENCES, engine.sequences(load.mean_length) or 1))
    rounds = math.ceil(each / together)
    context = prompt + new_tokens / 2
    read = engine.weights + together * context * engine.kv_bytes_per_token
    per_token = forward_flops(load.shape, [1]) / load.engine_tensor
    memory_s, compute_s = read / device.memory_bandwidth, together * per_token / device.flops
    prefill = each * prompt * per_token / device.flops
    floor = rounds * new_tokens * max(memory_s, compute_s) + prefill
    likely = (
        rounds * new_tokens * max(memory_s / MEMORY_EFFICIENCY, compute_s / COMPUTE_EFFICIENCY)
        + prefill / COMPUTE_EFFICIENCY
    )
    bound = "memory bandwidth of decoding" if memory_s > compute_s else "compute of decoding"
    return PhaseTime("generation", flops, floor, likely, bound)
