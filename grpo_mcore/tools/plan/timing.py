"""FLOPs and seconds of each phase of a step, a floor from the data sheet and a likely value; bytes of the refit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from grpo_mcore.families import AdapterShape, Block, ModelShape, Param, adapter_params, forward_flops, params_of
from grpo_mcore.refit.plan.plan import DTYPE_BYTES, RefitPlan, count_refit, plan_refit, wire_dtype
from grpo_mcore.tools.plan.memory import EngineMemory, gradient_bytes, optimizer_bytes, teacher_weights, weight_bytes
from grpo_mcore.tools.plan.workload import Device, TeacherLoad, Workload

COMPUTE_EFFICIENCY = 0.40
"""Share of a device's peak FLOP/s that dense training reaches in practice."""
MEMORY_EFFICIENCY = 0.60
"""Share of the memory bandwidth that decoding reaches."""
LINK_EFFICIENCY = 0.80
"""Share of a link's bandwidth that is reached."""
HOST_BANDWIDTH = 200e9
"""Bytes per second that all ranks of a node read and write in host memory: an assumption, half of two sockets' data
sheets."""
LAYER_LAUNCHES_S = 80 * 8e-6
"""Seconds that the host takes to launch a layer's kernels in one sweep: about 80, as `plan --trace` counts them, of 8
microseconds, as usual in PyTorch. A device with fewer tokens than that waits for its host."""
REFIT_SERIAL = 1.2
"""How much longer the busiest ranks of a refit's buckets work, one bucket after the other, than all at once would:
`serial_path_ratio` of `grpo-mcore refit plan` is 1.0 to 1.26 for the recipes."""
ALL_REDUCE_S = 9e-6
"""Seconds that the smallest all-reduce of an engine takes."""
ALL_REDUCE_EFFICIENCY = 0.1
"""Share of the links' bandwidth that an all-reduce of a megabyte reaches. Both constants are fitted to vLLM's kernel on
2, 4 and 8 H100, as measured in sgl-project/sglang#2904."""
NETWORK_ALL_REDUCE_S = 30e-6
"""Seconds that the smallest all-reduce between two nodes takes, and twice as many of them: an assumption."""


@dataclass(frozen=True)
class PhaseTime:
    """A phase of a step. `flops` are those of all ranks, `floor` and `likely` are seconds. `bound` takes most of the
    time."""

    name: str
    flops: float
    floor: float
    likely: float
    bound: str


@dataclass(frozen=True)
class StepTime:
    phases: tuple[PhaseTime, ...]
    bubble: float
    """Share of the training time in which a rank waits for other stages."""
    apart: bool = False
    """The engines generate on devices of their own while the policy trains."""

    @property
    def likely(self) -> float:
        total = sum(phase.likely for phase in self.phases)
        generation = sum(phase.likely for phase in self.phases if phase.name == "generation")
        refit = sum(phase.likely for phase in self.phases if phase.name == "refit")
        return refit + max(generation, total - generation - refit) if self.apart else total

    @property
    def slowest(self) -> PhaseTime:
        return max(self.phases, key=lambda phase: phase.likely)


def pipeline_bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the share of the time that 1F1B waits: (p - 1) / (v m + p - 1) (arXiv 2104.04473, section 2.2)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def step_time(load: Workload, device: Device, engine: EngineMemory, traffic: RefitTraffic | None) -> StepTime:
    shared = (1 - 1 / load.sharing) * forward_flops(load.shape, [load.prompt])
    forward = (forward_flops(load.shape, [load.mean_length]) - shared) * load.trained
    bubble = pipeline_bubble(load.layout.pipeline, load.micro_batches, load.layout.virtual)
    phases = []
    if load.grpo:
        # On CPU a refit of a small model is mostly waiting and waking, which no bandwidth predicts.
        if traffic is not None and device.name != "cpu":
            seconds = traffic.seconds(load, device)
            phases.append(PhaseTime("refit", 0.0, seconds, REFIT_SERIAL * seconds / LINK_EFFICIENCY, traffic.link))
        if (moved := offload_seconds(load, device, engine)) > 0:
            phases.append(PhaseTime("offload, sleep", 0.0, moved, moved / LINK_EFFICIENCY, "host memory"))
        phases.append(generation_time(load, device, engine))
    if load.teachers:
        phases.append(_teachers(load, device))
    if load.grpo:
        passes = int(load.prev) + int(load.reference)
        if passes:
            phases.append(_pass("log-probs", passes * forward, load, device, bubble, passes, gradients=False))
    if (critic := load.critic_on_ranks) is not None:  # a pass for the values, then its updates
        of_critic = (forward_flops(critic.shape, [load.mean_length]) - shared) * load.samples
        sweeps = 1 + load.critic_epochs * _sweeps(critic)
        phases.append(_pass("critic", sweeps * of_critic, critic, device, bubble, sweeps, gradients=True))
    sweeps = load.epochs * _sweeps(load)
    phases.append(_pass("training", sweeps * forward, load, device, bubble, sweeps, gradients=True))
    return StepTime(tuple(phases), bubble, apart=load.grpo and not load.colocated and not load.waits_for_longest)


def _sweeps(load: Workload) -> int:
    """Return the passes through the layers of an update: forward, gradients of the activations, gradients of the
    weights (negligible for adapters), recomputed forward."""
    return 2 + (load.adapters is None) + (load.recompute or bool(load.recomputed & {"mlp", "moe"}))


def _teachers(load: Workload, device: Device) -> PhaseTime:
    """Return the time in which teachers score the step's samples, one after another: their weights come from the host
    and the policy's optimizer goes there, unless they have nodes to themselves; a forward pass; and hidden states go
    to the policy's ranks by way of the host."""
    flops, floor, likely = 0.0, 0.0, 0.0
    bounds = dict[str, float]()
    for teacher in load.teachers:
        scored, moved = teacher_pass(teacher, load, device), teacher_traffic(teacher, load, device)
        flops += scored.flops
        floor += scored.floor + moved
        likely += scored.likely + moved / LINK_EFFICIENCY
        for bound, seconds in ((scored.bound, scored.likely), ("host memory", moved / LINK_EFFICIENCY)):
            bounds[bound] = bounds.get(bound, 0.0) + seconds
    return PhaseTime("teachers", flops, floor, likely, max(bounds, key=lambda name: bounds[name]))


def teacher_pass(teacher: TeacherLoad, load: Workload, device: Device) -> PhaseTime:
    """Return the time of a teacher's forward pass over its share of the step's samples."""
    its = replace(teacher.load, samples=round(load.samples * teacher.share))
    bubble = pipeline_bubble(its.layout.pipeline, its.micro_batches)
    forward = forward_flops(its.shape, [load.mean_length]) * load.samples * teacher.share
    return _pass("teachers", forward, its, device, bubble, 1, gradients=False)


def teacher_traffic(teacher: TeacherLoad, load: Workload, device: Device) -> float:
    """Return the seconds per step that a rank spends on moving weights and optimizer to and from the host, and on the
    hidden states that go from teacher to policy. A rank moves those of the answers of its data-parallel rank."""
    if device.memory is None:
        return 0.0
    optimizer = max(optimizer_bytes(load, stage) for stage in range(load.layout.pipeline)) if load.colocated else 0
    nbytes = 0.0 if teacher.apart else 2.0 * (teacher_weights(teacher) + optimizer)
    answers = 0.0
    if teacher.distributions:
        tokens = load.samples * teacher.share * (load.mean_length - load.prompt)
        answers = tokens * teacher.load.shape.hidden_size * load.element
        nbytes += answers / teacher.load.layout.data + answers / load.layout.data
    network = answers / teacher.load.nodes / device.node_bandwidth if teacher.apart else 0.0
    return nbytes / min(device.host_bandwidth, HOST_BANDWIDTH / load.ranks_per_node) + network


def _pass(
    name: str, flops: float, load: Workload, device: Device, bubble: float, sweeps: int, *, gradients: bool
) -> PhaseTime:
    """Return the time of passes over the step's samples. `sweeps` is the number of passes through the layers, for
    the traffic."""
    compute = flops / load.world / device.flops
    rows, weights_s, launches_s = _rows(load, gradients), 0.0, 0.0
    if device.memory is not None:
        weights_s = rows * _swept_bytes(load, sweeps, gradients) / device.memory_bandwidth
        launches_s = rows * sweeps * max(map(len, load.layers)) * LAYER_LAUNCHES_S
    links = {
        "tensor-parallel traffic": _tensor_parallel_seconds(load, device) * sweeps,
        "context-parallel traffic": _context_seconds(load, device) * sweeps,
        "tokens to experts and back": _expert_seconds(load, device) * sweeps,
    }
    busy, updates = sum(links.values()), {}
    if gradients:
        updates["gradient and weight traffic"] = _data_parallel_seconds(load, device)
        updates["updates on the host"] = _host_update_seconds(load, device)
    after = sum(updates.values())
    floor = max(compute, weights_s, busy + after)
    kernels = {
        "compute": compute / COMPUTE_EFFICIENCY,
        "weights and gradients, read for each micro-batch": weights_s / MEMORY_EFFICIENCY,
        "kernel launches": launches_s,
    }
    slowest = max(kernels, key=lambda name: kernels[name])
    likely = (kernels[slowest] + busy / LINK_EFFICIENCY) / (1 - bubble) + after / LINK_EFFICIENCY
    links |= updates
    shares = {slowest: kernels[slowest], "pipeline bubble": likely * bubble}
    shares |= {name: seconds / LINK_EFFICIENCY for name, seconds in links.items()}
    return PhaseTime(name, flops, floor, likely, max(shares, key=lambda name: shares[name]))


def _rows(load: Workload, gradients: bool) -> int:
    """Return how many micro-batches a rank computes per step, in training or in a log-prob pass."""
    if gradients:
        return load.micro_batches * load.optimizer_steps
    return math.ceil(load.micro_batches * load.optimizer_steps / load.logprob_bins)


def _swept_bytes(load: Workload, sweeps: int, gradients: bool) -> int:
    """Return the bytes that a rank reads and writes for a micro-batch, however small: the weights in each sweep, but in
    that which computes their gradients these, which it reads and writes."""
    updates = int(gradients and load.adapters is None)
    stages = range(load.layout.pipeline)
    return max(
        (sweeps - updates) * weight_bytes(load, stage) + updates * 2 * gradient_bytes(load, stage) for stage in stages
    )


def _tensor_parallel_seconds(load: Workload, device: Device) -> float:
    """Return the seconds per sweep. Each layer sums its activations twice over the TP ranks; with sequence parallelism
    a reduce-scatter and an all-gather move equally many bytes. Where ranks share key-value heads, attention gathers
    what they projected."""
    tp, shape = load.layout.tensor, load.shape
    if tp == 1:
        return 0.0
    gathered = shape.projected_heads * shape.head_dim if tp > shape.num_kv_heads else 0
    widest = max(
        sum(4 * shape.hidden_size + gathered * shape.is_attention_layer(layer) for layer in layers)
        for layers in load.layers
    )
    return widest * _tokens_per_rank(load) * load.element * (tp - 1) / tp / _link(load, device, tp)


def _context_seconds(load: Workload, device: Device) -> float:
    """Return the seconds per sweep. Every attention layer gathers the keys and values of the other ranks, every other
    mixer all of its inputs."""
    layout, shape = load.layout, load.shape
    if layout.context == 1:
        return 0.0
    width: float = 2 * shape.local_kv_heads(layout.tensor) * shape.head_dim
    if shape.latent is not None:
        width = shape.num_heads * (shape.head_dim + shape.latent.value_dim) / layout.tensor
    scanned = sum(shape.mamba.projected_parts) / layout.tensor if shape.mamba else 0
    widths = {None: width, Block.ATTENTION: width, Block.MAMBA: scanned}
    blocks = shape.blocks or (None,) * shape.num_layers
    gathered = [widths.get(block, 0.0) for block in blocks]
    if (delta := shape.delta) is not None:
        scanned = (sum(delta.convolved_parts) + delta.values + 2 * delta.value_heads) / layout.tensor
        gathered = [scanned if shape.is_delta_layer(layer) else width for layer in range(shape.num_layers)]
    widest = max(sum(gathered[layer] for layer in layers) for layers in load.layers)
    nbytes = widest * _tokens_per_rank(load) * (layout.context - 1) * load.element
    return nbytes / _link(load, device, layout.tensor * layout.context)


def _expert_seconds(load: Workload, device: Device) -> float:
    """Return the seconds per sweep. Each expert layer sends a token's copies to its experts' ranks and back."""
    layout, experts = load.layout, load.shape.experts
    size = layout.expert * layout.expert_tensor
    if experts is None or size == 1:
        return 0.0
    layers = max(sum(load.shape.is_expert_layer(layer) for layer in layers) for layers in load.layers)
    tokens = _tokens_per_rank(load) * load.rank.share
    nbytes = 2 * layers * tokens * experts.active * load.shape.hidden_size * load.element * (size - 1) / layout.expert
    return nbytes / _link(load, device, size)


def _tokens_per_rank(load: Workload) -> float:
    """Return the tokens of a step that one rank computes."""
    return load.trained * load.mean_length * load.computed / load.layout.data / load.layout.context


def _link(load: Workload, device: Device, ranks: int) -> float:
    """Return the bandwidth in a group of this many neighbouring ranks."""
    return device.peer_bandwidth if ranks <= load.gpus_per_node else device.node_bandwidth


def _data_parallel_seconds(load: Workload, device: Device) -> float:
    """Return the seconds per step. Every optimizer step reduce-scatters the gradients and all-gathers the weights."""
    dp = load.layout.data * load.layout.context
    if dp == 1:
        return 0.0
    nbytes = max(gradient_bytes(load, stage) + weight_bytes(load, stage) for stage in range(load.layout.pipeline))
    return load.optimizer_steps * nbytes * (dp - 1) / dp / _link(load, device, load.layout.tensor * dp)


def offload_seconds(load: Workload, device: Device, engine: EngineMemory) -> float:
    """Return the seconds per step in which policy and sleeping engines move to the host and back, all ranks of a node
    at once: the optimizer unless it stays, and an engine's weights if it is paused or a refit brings adapters alone.
    Other engines drop their weights, which the refit replaces."""
    sleeps = load.colocated and load.engines_sleep
    if device.memory is None or not (sleeps or load.offloads and (load.prev or load.reference)):
        return 0.0
    kept = load.keeps_optimizer
    models = [load] if load.critic_on_ranks is None else [load, load.critic_on_ranks]
    stages = range(load.layout.pipeline)
    nbytes = 0 if kept else max(sum(optimizer_bytes(it, stage) for it in models) for stage in stages)
    if sleeps and (load.refit_adapters or not load.waits_for_longest):  # paused engines keep their weights
        nbytes += sum(engine.woken.values())
    return 2 * nbytes / min(device.host_bandwidth, HOST_BANDWIDTH / load.ranks_per_node)


def _host_update_seconds(load: Workload, device: Device) -> float:
    """Return the seconds per step. Float32 gradients go to the host and weights come back; there Adam reads 16 bytes a
    weight and writes 12, of all ranks of the node."""
    if device.memory is None:
        return 0.0
    owned = max(load.params(stage).owned(load.layout, None) for stage in range(load.layout.pipeline)) * load.host_share
    copies, adam = owned * (4 + load.element) / device.host_bandwidth, owned * 28 * load.ranks_per_node / HOST_BANDWIDTH
    return load.optimizer_steps * (copies + adam)


def generation_time(load: Workload, device: Device, engine: EngineMemory) -> PhaseTime:
    """Return the time of prefill and decoding. A decoding pass generates one token a sample; it reads the weights once
    and every sample's keys, values and states. A sample that ends makes room for the next one; if no step is generated
    ahead, all wait for the longest, which is taken to have policy.max_total_sequence_length."""
    flops = forward_flops(load.shape, [load.mean_length]) * load.samples
    prompt, new_tokens = load.prompt, load.mean_length - load.prompt
    per_engine = math.ceil(load.samples / load.engines)
    together = max(1, min(per_engine, load.max_sequences, engine.sequences(load.mean_length) or 1))
    passes = per_engine / together * new_tokens
    context = prompt + new_tokens / 2
    memory_s, compute_s = _decoding(load, device, engine, together, together * context)
    prefill = per_engine * prompt * _flops_of_token(load) / device.flops
    # A step that waits for its longest sample ends with passes over ever fewer samples, which read the weights all the
    # same.
    longest = min(load.max_new_tokens, load.max_length - prompt)
    tail = max(0.0, longest - passes) if load.waits_for_longest else 0.0
    weights_s = engine.weights / device.memory_bandwidth
    tail_s = tail * (weights_s / MEMORY_EFFICIENCY + _decoding_all_reduces(load, device, 1))
    floor = passes * max(memory_s, compute_s) + prefill + tail * weights_s
    seconds = {
        "memory bandwidth of decoding": passes * memory_s / MEMORY_EFFICIENCY,
        "compute of decoding": passes * compute_s / COMPUTE_EFFICIENCY,
    }
    reduced = passes * _decoding_all_reduces(load, device, together)
    likely = max(seconds.values()) + reduced + prefill / COMPUTE_EFFICIENCY + tail_s
    seconds |= {"all-reduces of decoding": reduced, "the longest samples": tail_s}
    return PhaseTime("generation", flops, floor, likely, max(seconds, key=lambda name: seconds[name]))


def decoding_step(load: Workload, device: Device, engine: EngineMemory, samples: int, tokens: float) -> float:
    """Return the likely seconds of one decoding pass of an engine over `samples` that hold `tokens` in all."""
    memory_s, compute_s = _decoding(load, device, engine, samples, tokens)
    likely = max(memory_s / MEMORY_EFFICIENCY, compute_s / COMPUTE_EFFICIENCY)
    return likely + _decoding_all_reduces(load, device, samples)


def _decoding(load: Workload, device: Device, engine: EngineMemory, samples: int, tokens: float) -> tuple[float, float]:
    """Return the least seconds of a decoding pass: by memory bandwidth, and by compute. States are read and written."""
    read = engine.weights + tokens * engine.kv_bytes_per_token + 2 * samples * engine.state_bytes
    return read / device.memory_bandwidth, samples * _flops_of_token(load) / device.flops


def _flops_of_token(load: Workload) -> float:
    return forward_flops(load.shape, [1]) / load.engine_layout.ranks


def _decoding_all_reduces(load: Workload, device: Device, samples: int) -> float:
    """Return the seconds of all-reduces in one decoding pass: one after each mixer and one after each MLP, inside a
    node and then, of an engine on several, between its nodes."""
    tensor, nodes = load.engine_layout.tensor, load.engine_layout.nodes
    if tensor == 1:
        return 0.0
    count = len(load.shape.blocks) if load.shape.blocks else 2 * load.shape.num_layers
    nbytes = samples * load.shape.hidden_size * load.engine_element
    seconds = all_reduce_seconds(min(tensor, load.gpus_per_node), nbytes, device.peer_bandwidth)
    if nodes > 1 and tensor > load.gpus_per_node:  # each of a node's devices sums its part with its like
        part = nbytes / load.gpus_per_node
        seconds += NETWORK_ALL_REDUCE_S * math.log2(nodes) + part * 2 * (nodes - 1) / nodes / (
            LINK_EFFICIENCY * device.node_bandwidth
        )
    return count * seconds


def all_reduce_seconds(ranks: int, nbytes: int, bandwidth: float) -> float:
    """Return the seconds of an all-reduce of `nbytes`, of a few megabytes at most, inside a node."""
    return ALL_REDUCE_S + nbytes * 2 * (ranks - 1) / ranks / (ALL_REDUCE_EFFICIENCY * bandwidth)


DTYPE = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True)
class RefitTraffic:
    """Bytes of a refit: `written` by each policy rank into the buffer, `read` by the engine rank that reads most,
    `through_host` in and out of the busiest node's memory, `to_other_nodes` over the busiest node's network link.
    `link` is the kind of link that its time depends on. `merged` and `adapters` are the bytes that a refit of either
    kind moves; `adapters` is None without LoRA."""

    buckets: int
    buffer: int
    tensor_bytes: int
    written: tuple[int, ...]
    read: int
    through_host: int
    to_other_nodes: int
    link: str
    merged: int
    adapters: int | None

    def seconds(self, load: Workload, device: Device) -> float:
        """Return the seconds of the slowest link, and of quantising what was read."""
        # The largest values and the quantised ones read bfloat16 each; a byte is written, and read for the digest.
        quantising = 3 * self.read / device.memory_bandwidth if load.engine_quantized is not None else 0.0
        if load.world == 1:
            return quantising + max(*self.written, self.read) / device.memory_bandwidth
        # A bucket is written while the one before is read, so both directions of a link are busy at once.
        return quantising + max(
            max(*self.written, self.read) / device.host_bandwidth,
            self.through_host / HOST_BANDWIDTH,
            self.to_other_nodes / device.node_bandwidth,
        )


def _refit_params(load: Workload) -> tuple[list[Param], list[Param], list[Param]]:
    """Return the parameters that the refit moves: either all of the model or all of its adapters, which follow."""
    weights = [param for param in params_of(load.shape) if not param.copy]
    adapters = adapter_params(weights, load.adapters) if load.adapters is not None else []
    return adapters if load.refit_adapters else weights, weights, adapters


def refit_plan(load: Workload) -> RefitPlan:
    """Plan the refit of a workload as the run does, which takes seconds for large models.

    Raises RefitError if a row does not fit the buffer, LayoutError if the layouts do not fit the model.
    """
    return plan_refit(
        _refit_params(load)[0], load.shape, load.layout, load.engine_layout, dtype=DTYPE[load.element],
        buffer_bytes=load.refit_buffer, deliveries=load.engine_nodes // load.engine_layout.nodes,
    )  # fmt: skip


def check_refit(load: Workload) -> None:
    """Raise RefitError or LayoutError if the refit is impossible. It plans one parameter of each form, in milliseconds
    for any model."""
    params = _one_of_each_form(load.shape, load.adapters if load.refit_adapters else None)
    count_refit(
        params, load.shape, load.layout, load.engine_layout, dtype=DTYPE[load.element], buffer_bytes=load.refit_buffer
    )


@lru_cache(maxsize=8)
def _one_of_each_form(shape: ModelShape, adapters: AdapterShape | None) -> tuple[Param, ...]:
    params = [param for param in params_of(shape) if not param.copy]
    forms: dict[object, Param] = {}
    for param in params if adapters is None else adapter_params(params, adapters):
        forms.setdefault((param.form, param.stage), param)
    return tuple(forms.values())


def refit_traffic(load: Workload) -> RefitTraffic:
    """Plan the refit of a workload and count its bytes. Raises as `refit_plan` does."""
    engine, span = load.engine_layout, load.engine_layout.nodes
    params, weights, adapters = _refit_params(load)

    def width(param: Param) -> int:
        return DTYPE_BYTES[wire_dtype(param, DTYPE[load.element])]

    counted = count_refit(
        params, load.shape, load.layout, engine, dtype=DTYPE[load.element], buffer_bytes=load.refit_buffer
    )
    held, tensor_bytes = counted.held, sum(counted.held.values())
    buckets = max(1, math.ceil(tensor_bytes / (load.refit_buffer // 2)))
    read = engine.bytes_by_rank(params, load.shape, width)
    holder_nodes = {
        ranks: {rank * load.nodes // load.world for rank in ranks} if load.colocated else () for ranks, _ in held
    }
    arriving = max(
        sum(nbytes for (_, parts), nbytes in held.items() if node % span in parts) for node in range(load.engine_nodes)
    )
    readers = math.ceil(load.engines * engine.ranks / load.engine_nodes)
    other_nodes = max(
        sum(
            nbytes
            for (holders, parts), nbytes in held.items()
            if node % span in parts and node not in holder_nodes[holders]
        )
        for node in range(load.nodes)
    )
    link = "network between nodes" if other_nodes else "host memory" if load.world > 1 else "memory of the device"
    return RefitTraffic(
        buckets,
        load.refit_buffer if buckets > 1 else tensor_bytes,
        tensor_bytes,
        counted.written,
        max(read),
        arriving + readers * max(read),
        other_nodes,
        link,
        sum(param.numel * width(param) for param in weights),
        sum(param.numel * width(param) for param in adapters) or None,
    )
