"""How long the modelled workers take: by the formulas of `plan`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_mcore.families import ModelShape, forward_flops
from grpo_mcore.tools.plan.run_plan import Plan
from grpo_mcore.tools.plan.timing import (
    COMPUTE_EFFICIENCY,
    LINK_EFFICIENCY,
    decoding_step,
    teacher_pass,
    teacher_traffic,
)
from grpo_mcore.tools.plan.workload import Device, TeacherLoad, Workload

STORAGE = 1e9
"""Bytes per second that a node writes to the shared file system, and reads from it: an assumption."""
CPU_STEP_S, CPU_BATCH = 0.0055, 90
"""Seconds of an engine's step on a core besides the model's products, and the number of samples that doubles them.
Measured with vLLM's CPU build and a model of 0.1 M parameters: 6, 13, 19 milliseconds for 8, 128, 256 samples."""
CPU_REQUEST_S = 0.0025
"""Seconds that a request costs an engine on CPU besides its steps: it is taken in, and its sample is handed over and
scored. Measured, see docs/rehearse.md."""
SMALL_CALL_S = 0.002
"""Seconds of a call that computes nothing."""
RECEIVE_S = 0.00002
"""Seconds to fetch and pack a sample of a rank."""


@dataclass(frozen=True)
class TeacherDurations:
    """Seconds of a teacher. `score(lengths)` is a pass over the samples of one of its data-parallel ranks, `move` takes
    its weights to or from the device."""

    score: Callable[[Sequence[int]], float]
    move: float


@dataclass(frozen=True)
class Durations:
    """Seconds of everything that workers do.

    `decode(samples, tokens)` is one step of an engine that holds `samples` with `tokens` in all, `prefill` takes a
    token. `logprobs(lengths)` is a pass over the samples of one data-parallel rank, `train(lengths)` an optimizer step,
    `critic(lengths, epochs)` a pass for values, or the critic's updates.
    An engine's cache holds `kv_tokens`, and an engine generates `max_samples` at a time. `teachers` are by alias.
    """

    decode: Callable[[int, float], float]
    prefill: float
    kv_tokens: float
    max_samples: int
    logprobs: Callable[[Sequence[int]], float]
    train: Callable[[Sequence[int]], float]
    refit: float
    commit: float
    offload: float
    save: float
    load: float
    start: float
    teachers: Mapping[str, TeacherDurations] = field(default_factory=dict)
    critic: Callable[[Sequence[int], int], float] = lambda lengths, epochs: 0.0
    request: float = 0.0
    """Seconds that a request costs an engine besides its steps."""
    receive: Callable[[int], float] = lambda samples: SMALL_CALL_S + RECEIVE_S * samples
    """Seconds until a data-parallel rank has so many samples."""


def planned(plan: Plan, start_s: float, save_s: float | None) -> Durations:
    """Return the durations that a plan predicts. Policy and engines start in `start_s`; a checkpoint takes `save_s`, or
    by default the time of its bytes."""
    load, device, engine = plan.load, plan.device, plan.engine
    phases = {phase.name: phase.likely for phase in plan.times.phases}

    flops = _flops(load.shape, load.mean_length)
    expected = flops([load.mean_length]) * load.samples / load.layout.data  # of a data-parallel rank's samples
    passes = int(load.prev) + int(load.reference)
    critic = phases.get("critic", 0.0) / (1 + 2 * load.critic_epochs)  # an update costs about two passes
    per_token = forward_flops(load.shape, [1]) / load.engine_layout.ranks / device.flops / COMPUTE_EFFICIENCY
    weights = 2 * max(sum(stage.host.total for stage in plan.stages), load.world * engine.weights)
    moved = phases.get("offload, sleep", 0.0) / 2
    refit = phases.get("refit", 0.1)

    def decode(samples: int, tokens: float) -> float:
        seconds = decoding_step(load, device, engine, samples, tokens)
        return seconds if device.memory is not None else seconds + CPU_STEP_S * (1 + samples / CPU_BATCH)

    return Durations(
        decode=decode,
        prefill=per_token,
        request=CPU_REQUEST_S if device.memory is None else 0.0,
        kv_tokens=engine.tokens_beside(load.max_sequences) or load.max_length,
        max_samples=load.max_sequences,
        logprobs=lambda lengths: phases.get("log-probs", 0.0) / max(1, passes) * flops(lengths) / expected,
        train=lambda lengths: phases["training"] * flops(lengths) / expected,
        critic=lambda lengths, epochs: critic * (2.0 * epochs or 1.0) * flops(lengths) / expected,
        refit=refit,
        commit=min(0.1, refit / 10),
        offload=moved / 2,
        save=weights / (STORAGE * load.nodes) if save_s is None else save_s,
        load=weights / (STORAGE * load.nodes) if save_s is None else save_s,
        start=start_s,
        teachers={teacher.alias: _teacher(teacher, load, device) for teacher in load.teachers},
    )


def _flops(shape: ModelShape, mean_length: int) -> Callable[[Sequence[int]], float]:
    """Return the function that gives the FLOPs of a forward pass over samples of some lengths. Those of a sample grow
    with its length and the square of it: two values give both factors."""
    single, double = (forward_flops(shape, [mean_length * n]) for n in (1, 2))
    square = (double - 2 * single) / (2 * mean_length**2)
    linear = single / mean_length - square * mean_length
    return lambda lengths: sum(linear * length + square * length * length for length in lengths)


def _teacher(teacher: TeacherLoad, load: Workload, device: Device) -> TeacherDurations:
    its = teacher.load
    flops, seconds = _flops(its.shape, its.mean_length), teacher_pass(teacher, load, device).likely
    expected = flops([its.mean_length]) * load.samples * teacher.share / its.layout.data
    return TeacherDurations(
        score=lambda lengths: seconds * flops(lengths) / expected,
        move=teacher_traffic(teacher, load, device) / LINK_EFFICIENCY / 2,
    )
