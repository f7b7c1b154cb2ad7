"""Memory of a rank in each phase of a step, in bytes, compared with its device."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial

from grpo_mcore.families import Block, ModelShape, Param, Split, adapter_params, local_shape, params_of
from grpo_mcore.families.activations import (
    divergence_bytes,
    embedding_bytes,
    first_stage_bytes,
    forward_bytes,
    last_stage_bytes,
    layer_bytes,
    layer_input_bytes,
    logits_bytes,
    working_bytes,
)
from grpo_mcore.layout import Coordinates
from grpo_mcore.tools.plan.workload import Device, TeacherLoad, Workload

RECEIVER_CONTEXT = 2**30
"""Memory of the process that receives refits for an engine over NCCL, besides a bucket: its CUDA context and NCCL's
buffers, an assumption."""

ADAPTER_COPIES = 4
"""Copies of adapters on a rank of an engine that applies them: in use and staged, stacked for vLLM, in its buffers."""

ENGINE_OVERHEAD = 3 * 2**30
"""Memory that an engine needs besides weights and KV cache: activations of the largest batch, CUDA graphs."""

PROCESS_MEMORY = 6 * 2**30
"""Host memory of a process with torch, CUDA and NCCL, besides what it is known to keep: an assumption."""

SCORED_TOKENS = 2048
"""Tokens of the prompts that a teacher's engine scores at a time: `max_num_batched_tokens` in driver/run/setup.py."""

IMAGE_TOKENS = 1024
"""Tokens of a prompt's image, which no recipe says: of 1,024 x 1,024 pixels at 16 pixels a patch. An assumption."""

CLOSE = 0.92
"""Share of the memory above which fragmentation alone can cause an out-of-memory error."""


@dataclass(frozen=True)
class Phase:
    """Memory of one rank in one phase: its parts by name, in bytes."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank of a pipeline stage; of the optimizer the largest share is counted. `host` has the most bytes on
    the host by part, besides what each process and the engines need there; it is empty if the host is the device."""

    stage: int
    phases: tuple[Phase, ...]
    host: Phase

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one rank of an engine, in bytes. `state_bytes` are the states of Mamba and DeltaNet layers, per
    sequence of any length. `sampler` is what vLLM keeps of the tokens of all requests. `receiver` is what the process
    that receives refits over the network takes of the first GPU of an engine with devices of its own. `adapters` are
    those that a refit brings alone."""

    weights: int
    kv_cache: int
    kv_bytes_per_token: int
    state_bytes: int = 0
    sampler: int = 0
    receiver: int = 0
    adapters: int = 0

    @property
    def woken(self) -> dict[str, int]:
        """Memory of the engine that must be on its device in a refit, by part; the KV cache may be away."""
        parts = {"engine weights": self.weights, "engine adapters": self.adapters, "sampler state": self.sampler}
        return {name: nbytes for name, nbytes in parts.items() if nbytes or name == "engine weights"}

    def sequences(self, length: int) -> int:
        """Return how many sequences of this length the KV cache holds at a time."""
        bytes_of_one = self.kv_bytes_per_token * length + self.state_bytes
        return int(self.kv_cache // bytes_of_one) if self.kv_cache > 0 else 0

    def tokens_beside(self, states: int) -> int:
        """Return how many tokens the KV cache holds beside the states of so many sequences, but at most half of it."""
        return int(max(self.kv_cache - states * self.state_bytes, self.kv_cache / 2) // self.kv_bytes_per_token)


def weight_bytes(load: Workload, stage: int) -> int:
    """Return the bytes of the parameter buffers, with Megatron-Core's padding, and of frozen parameters."""
    params = load.params(stage)
    return (params.buffer + params.frozen) * load.element


def tower_bytes(load: Workload, stage: int) -> int:
    """Return the bytes of the tower that a rank of the stage has: where a layer takes its features."""
    vision, first = load.shape.vision, stage == 0
    if not load.images or vision is None or not (first or min(load.layers[stage]) < vision.deepstack):
        return 0
    return vision.parameters * load.element


def feature_bytes(load: Workload, stage: int) -> int:
    """Return the bytes of the features that a rank of the stage keeps: of each image of its samples once."""
    if not tower_bytes(load, stage):
        return 0
    assert load.shape.vision is not None
    images = min(load.images, math.ceil(load.samples / load.layout.data))
    tokens = images * min(IMAGE_TOKENS, load.mean_length)
    return tokens * load.shape.hidden_size * (1 + load.shape.vision.deepstack) * load.element


def gradient_bytes(load: Workload, stage: int) -> int:
    """Return the bytes of the gradient buffers, which have the length of the parameter buffers."""
    return load.params(stage).buffer * load.gradient


def optimizer_bytes(load: Workload, stage: int, rank: Coordinates | None = None) -> int:
    """Return the bytes of the distributed optimizer on a rank's device (None: the one with most): two float32 moments,
    and a float32 copy of bfloat16 weights."""
    owned = load.params(stage).owned(load.layout, rank) * (1 - load.host_share)
    return int(owned * (8 + (4 if load.element < 4 else 0)))


def host_optimizer_bytes(load: Workload, stage: int, rank: Coordinates | None = None) -> int:
    """Return the bytes on the host for the weights that are updated there: float32 copies, gradients, two moments."""
    return int(load.params(stage).owned(load.layout, rank) * load.host_share * 16)


def _update_bytes(load: Workload, stage: int) -> int:
    """Return the bytes of the update's temporaries on the device: Megatron-Core copies bfloat16 gradients to float32
    unless the optimizer is precision-aware, and on a GPU torch's Adam takes the roots of an optimizer's second moments
    at a time.
    On CPU it goes parameter by parameter, and TransformerEngine's has none. Beside an optimizer on the host torch's is
    fused, and a bfloat16 gradient is copied to float32 on its way there."""
    params, copies = load.params(stage), load.gradient < 4 and (load.host_share > 0 or not load.precision_aware)
    if load.host_share:
        on_device = int(4 * params.owned(load.layout, None) * (1 - load.host_share))
        return copies * (on_device + 4 * params.largest)
    roots = load.kernels == "torch" and not load.precision_aware
    return 4 * (copies * params.owned(load.layout, None) + roots * params.updated_together)


def _host_memory(load: Workload, device: Device, stage: int) -> Phase:
    """Return what a rank keeps on the host: what is updated there; while engines generate, the rest of the optimizer;
    the reference's weights, and the current ones in their place."""
    parts = {}
    if device.memory is not None:
        if load.host_share:
            parts["updated there"] = host_optimizer_bytes(load, stage)
        away = load.colocated and load.engines_sleep or load.offloads
        if load.grpo and away and load.host_share < 1 and not load.keeps_optimizer:
            both = [load] if load.critic_on_ranks is None else [load, load.critic_on_ranks]
            parts["optimizer, while engines generate"] = sum(optimizer_bytes(it, stage) for it in both)
        if load.reference and load.adapters is None:
            parts["reference, and weights in its place"] = 2 * weight_bytes(load, stage)
        if tower := tower_bytes(load, stage):
            parts["tower"] = tower
        if guests := [teacher for teacher in load.teachers if not teacher.apart]:
            parts["teachers"] = sum(map(teacher_weights, guests))
        if load.saves:
            params = load.params(stage)
            kept = params.numel - params.frozen if load.gathers else params.owned(load.layout, None)
            parts["a checkpoint, while it is written"] = 12 * kept
    return Phase("host", parts)


def node_memory(load: Workload, stages: tuple[StageMemory, ...], engine: EngineMemory, device: Device) -> int:
    """Return the bytes of host memory that the busiest node of the policy needs: what its ranks and their engines keep
    there, the refit buffer, and their processes. 0 on CPU, where it is not predicted."""
    if device.memory is None:
        return 0
    processes, of_rank = 1, max(stage.host.total for stage in stages)
    buffer = load.refit_buffer if load.grpo and load.world > 1 else 0
    if load.grpo and load.colocated:
        processes += 1
        # Engines that are paused, or get adapters alone, keep their weights while the policy trains; all do while
        # log-probs are compared. The room for them stays locked.
        keeps = load.refit_adapters or not load.waits_for_longest or load.wakes_after_parity
        of_rank += sum(engine.woken.values()) if load.engines_sleep and keeps else 0
    return load.ranks_per_node * (of_rank + processes * PROCESS_MEMORY) + buffer


def teacher_weights(teacher: TeacherLoad) -> int:
    """Return the bytes of the weights on a rank of a teacher's largest stage."""
    if teacher.engines:
        return _engine_weights(teacher.load)
    return max(weight_bytes(teacher.load, stage) for stage in range(teacher.load.layout.pipeline))


def _teacher_head(load: Workload) -> dict[str, int]:
    """Return the bytes of a teacher's output layer on a rank of the policy's last stage, if it projects with it."""
    rows = load.shape.padded_vocab_size(load.layout.tensor) // load.layout.tensor
    sizes = [rows * it.load.shape.hidden_size * load.element for it in load.teachers if it.distributions]
    return {"teacher's output layer": sum(sizes)} if sizes else {}


def _teacher_phase(load: Workload, device: Device, beside: dict[str, int]) -> Phase:
    """Return the phase in which the teachers score, one after another: the largest of them, `beside` what the policy
    leaves on its devices, or alone on its own nodes."""
    needed = list[dict[str, int]]()
    for teacher in load.teachers:
        its = teacher.load
        row = its.bin_tokens / its.layout.context
        layers = range(its.shape.num_layers)
        forward = max(forward_bytes(its.shape, its.rank, row, layer, length=its.mean_length) for layer in layers)
        resident = {"reserved": device.reserved} if teacher.apart else beside
        if teacher.engines:
            needed.append({**resident, **_scoring_engine(its, device)})
            continue
        needed.append({**resident, "teacher weights": teacher_weights(teacher), "activations": int(forward)})
    return Phase("teachers", max(needed, key=lambda parts: sum(parts.values())))


def _scoring_engine(load: Workload, device: Device) -> dict[str, int]:
    """Return what a rank of a teacher's engine has on its device: with the logits of a batch of prompts in the model's
    number format, in float32, and as log-probs."""
    engine, tokens = engine_memory(load, device), min(load.max_length, SCORED_TOKENS)
    parts = {"teacher weights": engine.weights, "KV cache": max(0, engine.kv_cache)}
    if device.memory is not None:
        parts["engine overhead"] = ENGINE_OVERHEAD
    return parts | {"logits": tokens * load.shape.vocab_size * (load.engine_element + 8)}


def activation_bytes(
    load: Workload,
    stage: int,
    logits: int = 0,
    tokens: int | None = None,
    *,
    padding: float = 1.0,
    working: bool = False,
) -> int:
    """Return the peak of what is kept for the backward pass, over all micro-batches in flight on this stage, beside
    `logits` bytes of logits. The context-parallel ranks share a row of `tokens`, by default a full bin. `working`: with
    what a layer's backward pass computes, and the embeddings' gradients at its end."""
    rank, layout = load.rank, load.layout
    row = (tokens or load.bin_tokens) / layout.context
    chunks = _in_flight(load, stage)
    ends = first_stage_bytes(row) if stage == 0 else 0.0
    last = stage == layout.pipeline - 1
    head = last_stage_bytes(load.shape, rank, row) if last else 0.0
    heads = chunks[-1] if layout.virtual == 1 else 1  # interleaved: the last stage starts the backward pass at once
    kept = layer_input_bytes(load.shape, rank, row)
    nbytes, largest = chunks[0] * ends, 0.0
    of_layer = partial(layer_bytes, load.shape, rank, row, length=load.mean_length, padding=padding)
    for flying, layers in zip(chunks, load.chunks[stage], strict=True):
        for layer in layers:
            whole = of_layer(layer)
            rest = kept if load.recompute else of_layer(layer, recomputed=load.recomputed)
            nbytes += flying * rest
            beside = working_bytes(load.shape, rank, row, layer) if working else 0.0
            largest = max(largest, whole - rest + beside)
    # One layer at a time is recomputed, after the head's activations and the logits are freed.
    peak = nbytes + max(heads * head, largest - logits)
    if working and stage == 0 and load.adapters is None:
        # Tied embeddings have a gradient from either side, and the sum of both.
        count = 3 if last and load.shape.tied_embeddings else 1
        peak = max(peak, count * embedding_bytes(load.shape, rank) - logits)
    return int(peak)


def _in_flight(load: Workload, stage: int) -> list[int]:
    """Return, for each model chunk, the micro-batches at the peak whose backward pass is still to come.

    With 1F1B their number is that of the stages from this one to the last. Interleaved (arXiv 2104.04473, section 2.2),
    groups of as many micro-batches as there are stages go through the chunks in turn.
    """
    stages, chunks, count = load.layout.pipeline, load.layout.virtual, load.micro_batches
    if chunks == 1:
        return [min(stages - stage, count)]
    total = -(-count // stages) * stages * chunks
    ahead = total if total == stages * chunks else min(total, (stages - stage - 1) * 2 + (chunks - 1) * stages + 1)
    counts = [0] * chunks
    for step in range(ahead):
        counts[step // stages % chunks] += 1
    return counts


def engine_memory(load: Workload, device: Device) -> EngineMemory:
    """Return the memory of one rank of an engine. vLLM splits parameters as Megatron-Core does, also experts and Mamba
    mixers; each rank has at least one key-value head, and the whole of a latent."""
    shape, tensor = load.shape, load.engine_layout.tensor
    weights, adapters = _engine_weights(load), ADAPTER_COPIES * _adapter_bytes(load)
    attention = math.ceil(sum(map(shape.is_attention_layer, range(shape.num_layers))) / load.engine_layout.pipeline)
    width = 2 * shape.local_kv_heads(tensor) * shape.head_dim
    if shape.latent is not None:
        width = shape.latent.key_value_rank + shape.latent.rotary_dim
    state, ranks = 0, load.engine_layout.ranks
    if shape.mamba is not None:
        state = shape.blocks.count(Block.MAMBA) * shape.mamba.state(load.engine_element) // ranks
    if shape.delta is not None:
        state = len(shape.delta.layers) * shape.delta.state(load.engine_element) // ranks
    on_gpu = device.memory is not None
    # vLLM's penalties: how often each token was generated, and a bit for each token of the prompt.
    sampler = load.max_sequences * 4 * (shape.vocab_size + math.ceil(shape.vocab_size / 32)) if on_gpu else 0
    receives = on_gpu and load.grpo and not load.colocated
    receiver = RECEIVER_CONTEXT + load.refit_buffer // 2 + _largest_module(load) if receives else 0
    if load.kv_cache is not None:
        cache = load.kv_cache
    elif device.memory is None:
        cache = 2**30
    else:
        cache = int(load.engine_share * device.memory) - weights - adapters - sampler - ENGINE_OVERHEAD
    of_token = attention * width * load.engine_element
    return EngineMemory(weights, cache, of_token, state, sampler, receiver, adapters)


@cache
def _adapter_bytes(load: Workload) -> int:
    """Return the bytes of the adapters that a refit brings alone; each rank of an engine gets all of them whole."""
    if not load.refit_adapters or load.adapters is None:
        return 0
    return sum(param.numel for param in adapter_params(params_of(load.shape), load.adapters)) * load.engine_element


@cache
def _engine_weights(load: Workload) -> int:
    """Return the bytes of the weights that a rank of the largest stage has, with the scales of quantised ones, and its
    share of a tower."""
    shape, layout, stages = load.shape, load.engine_layout, Counter[int]()
    for param, count in _alike(shape) if load.engine_quantized is None else ((it, 1) for it in params_of(shape)):
        nbytes = count * math.prod(local_shape(param, shape, layout.tensor)) * _engine_bytes(load, param)
        if not param.copy:
            stages.update(dict.fromkeys(layout.stages(param, shape.num_layers), nbytes))
    tower = shape.vision.parameters * load.engine_element / layout.tensor if load.images and shape.vision else 0
    return math.ceil(max(stages.values()) + tower)


@cache
def _largest_module(load: Workload) -> int:
    """Return the bytes of the largest layer of a rank as a refit collects it before it is quantised, and of all those
    that wait for the commit; 0 for engines that are not quantised. All experts of a layer are one."""
    modules, waiting = Counter[str](), 0
    if load.engine_quantized is None:
        return 0
    for param in params_of(load.shape):
        if not param.copy and param.engine is not None and _engine_bytes(load, param) != load.engine_element:
            local = math.prod(local_shape(param, load.shape, load.engine_layout.tensor)) * load.engine_element
            modules[param.engine.rpartition(".")[0]] += local
            if load.engine_layout.tensor > 1 and load.engine_quantized[2] and param.engine_split is Split.COLUMNS:
                waiting += local
    return max(modules.values(), default=0) + waiting


def _engine_bytes(load: Workload, param: Param) -> float:
    tensor = param.hf[0]
    if load.engine_quantized is None or len(tensor.shape) < 2 or param.engine_split is Split.VOCAB:
        return load.engine_element
    nbytes, patterns, _ = load.engine_quantized
    layer = tensor.name.removesuffix(".weight")
    return load.engine_element if any(re.match(pattern, layer) for pattern in patterns) else nbytes


@cache
def _alike(shape: ModelShape) -> list[tuple[Param, int]]:
    """Return one parameter of those of a layer that have the same sizes, and their number."""
    first: dict[object, Param] = {}
    counts: Counter[object] = Counter()
    for param in params_of(shape):
        if not param.copy:
            sizes = tuple(tensor.shape for tensor in param.hf)
            kind = (param.layer, param.split, sizes, param.engine is None)
            first.setdefault(kind, param)
            counts[kind] += 1
    return [(param, counts[kind]) for kind, param in first.items()]


def stage_memory(load: Workload, device: Device, stage: int, engine: EngineMemory) -> StageMemory:
    """Return the memory of a rank of one stage in all phases, in their order: refit, generation, teachers, log-probs,
    training.

    Engines that generate while the policy trains (a trajectory age above 0) keep their memory in every phase. Engines
    on other devices take none of the policy's.
    """
    alone = policy_memory(load, device, stage)
    phases = tuple(Phase(it.name, it.parts | engine_parts(load, device, engine, it.name)) for it in alone.phases)
    return StageMemory(stage, phases, alone.host)


def engine_parts(load: Workload, device: Device, engine: EngineMemory, phase: str) -> dict[str, int]:
    """Return what an engine rank has on the policy's device in a phase, by part, in bytes."""
    apart = phase == "teachers" and all(teacher.apart for teacher in load.teachers)
    if not load.grpo or not load.colocated or apart:
        return {}
    cached = {**engine.woken, "KV cache": max(0, engine.kv_cache)}
    if device.memory is not None:
        cached["engine overhead"] = ENGINE_OVERHEAD
    if phase == "generation" or load.engines_stay:
        return cached
    return engine.woken if phase == "refit" else {}


def policy_memory(load: Workload, device: Device, stage: int) -> StageMemory:
    """Return the memory of a rank of one stage in all phases, without an engine's."""
    weights, gradients = weight_bytes(load, stage), gradient_bytes(load, stage)
    optimizer = optimizer_bytes(load, stage)
    passes = load.grpo and (load.prev or load.reference)  # of log-probs, before the training pass
    micro_row = load.bin_tokens / load.layout.context
    row = micro_row * (load.logprob_bins if passes else 1)
    base = {"weights": weights, "reserved": device.reserved}
    trained = {"gradients": gradients, "optimizer": optimizer}
    if (critic := load.critic_on_ranks) is not None:
        base["critic's weights"] = weight_bytes(critic, stage)
        trained["critic's gradients"] = gradient_bytes(critic, stage)
        trained["critic's optimizer"] = optimizer_bytes(critic, stage)
    if load.layout.sequence_parallel and load.kernels != "transformer_engine" and load.adapters is None:
        # Megatron-Core gathers the input of a layer that is trained into one buffer, which it keeps.
        base["gathered row"] = int(load.element * row * load.shape.hidden_size)
    last = stage == load.layout.pipeline - 1
    if last:
        base |= _teacher_head(load)
    if (tower := tower_bytes(load, stage)) and device.memory is None:
        base["tower"] = tower
    seen = {"features of images": features} if (features := feature_bytes(load, stage)) else {}
    state = {**base, **trained}
    layers = load.layers[stage]
    forward = int(max(forward_bytes(load.shape, load.rank, row, it, length=load.mean_length) for it in layers))
    chunk = min(load.logprob_chunk, math.ceil(micro_row))
    # What stays on the device while engines generate. On CPU nothing moves.
    moves = load.colocated and device.memory is not None
    kept_there = {part: size for part, size in trained.items() if part.endswith("optimizer")}
    away = {**base, **kept_there} if load.keeps_optimizer else base
    phases = []
    if load.grpo:
        # With several policy ranks the buffer is in host memory.
        shared = load.colocated and load.world == 1 and device.memory is not None
        buffer = {"refit buffer": load.refit_buffer} if shared else {}
        # The optimizer has been offloaded for the engines by then, if there is device memory to save.
        kept = away if moves and load.engines_sleep else state
        phases.append(Phase("refit", {**kept, **buffer}))
        if load.colocated:
            phases.append(Phase("generation", {**away, **buffer}))
    if load.teachers:
        phases.append(_teacher_phase(load, device, away if moves else state))
    if load.grpo:
        if passes:
            # With adapters the reference is the model without them. On a GPU the current weights wait on the host.
            aside = load.reference and load.adapters is None and device.memory is None
            clone = {"weights set aside for the reference": weights} if aside else {}
            logits = int(logits_bytes(load.shape, load.rank, chunk)) if last else 0
            parts = {"activations": max(forward - logits, 0), "logits": logits}  # one after the other
            kept = base if load.offloads and device.memory is not None else state
            phases.append(Phase("log-probs", {**kept, **clone, **seen, **parts}))
    logits = int(logits_bytes(load.shape, load.rank, chunk, micro_row)) if last else 0
    parts = {"activations": activation_bytes(load, stage, logits, working=True), "logits": logits}
    for teacher in (teacher for teacher in load.teachers if teacher.distributions and last):
        parts["logits"] = divergence_bytes(load.shape, load.rank, chunk)
        parts["teacher's hidden states"] = load.bin_tokens * teacher.load.shape.hidden_size * load.element
    phases.append(Phase("training", {**state, **seen, **parts}))
    phases.append(Phase("optimizer", {**state, "temporaries": _update_bytes(load, stage)}))
    return StageMemory(stage, tuple(phases), _host_memory(load, device, stage))


def memory(load: Workload, device: Device) -> tuple[EngineMemory, tuple[StageMemory, ...]]:
    """Return the memory of an engine rank, and of every stage, as if each policy rank shared its device with one."""
    engine = engine_memory(load, device)
    return engine, tuple(stage_memory(load, device, stage, engine) for stage in range(load.layout.pipeline))


def fits_device(stages: tuple[StageMemory, ...], engine: EngineMemory, load: Workload, device: Device) -> bool:
    """Return whether every phase fits the device, the KV cache holds at least one longest sample, and what is kept on
    the host fits a node's memory."""
    room = device.memory is None or all(stage.peak.total <= device.memory for stage in stages)
    host = device.host_memory is None or node_memory(load, stages, engine, device) <= device.host_memory
    caches = [engine_memory(teacher.load, device) for teacher in load.teachers if teacher.engines]
    caches += [engine] if load.grpo else []
    apart = device.memory is None or not engine.receiver or engines_share(load, engine, device) <= 1
    return room and host and apart and all(cache.sequences(load.max_length) >= 1 for cache in caches)


def engines_share(load: Workload, engine: EngineMemory, device: Device) -> float:
    """Return the share that engines with devices of their own take of the first of these, with what receives refits."""
    assert device.memory is not None
    within = load.engine_share * device.memory
    if load.kv_cache is not None:
        within = sum(engine.woken.values()) + engine.kv_cache + ENGINE_OVERHEAD
    return (within + engine.receiver) / device.memory
