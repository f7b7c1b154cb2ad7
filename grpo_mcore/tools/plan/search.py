"""Search the layouts of a recipe's model that fit a number of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_mcore.layout import DevicePool, EngineDevices, EngineLayout, PolicyLayout, fits
from grpo_mcore.tools.plan.memory import CLOSE, fits_device, memory
from grpo_mcore.tools.plan.timing import pipeline_bubble, step_time
from grpo_mcore.tools.plan.workload import Device, PlanError, Workload

SHARES = (0.85, 0.7, 0.6, 0.5, 0.4)
"""Values of gpu_memory_utilization to try, in this order: more KV cache allows more samples at a time."""
LAYERS_PER_STAGE = 4
"""Fewest layers of a pipeline stage that is tried."""
WORST_BUBBLE = 0.25
"""Largest share of the training time that a layout may wait for other stages."""
MOST = 5
"""Maximum number of layouts that are returned."""

EQUAL = 1.1
"""Layouts whose times differ by less than this factor count as equally fast: the estimate is no better."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, as overrides for the command line. `own`: it is the recipe's."""

    overrides: tuple[str, ...]
    layout: str
    seconds: float
    peak: int
    reason: str
    own: bool = False


def search(load: Workload, device: Device, nodes: int) -> list[Candidate]:
    """Return layouts of the policy on `nodes` nodes that differ in kind, fastest first, each with the engines that are
    fastest with it: at most MOST, and the recipe's own. That one comes first where it is about as fast as any.

    Two layouts are of one kind if they use the same dimensions and both or none recompute. Empty if none fits. Raises
    PlanError for less than one node.
    """
    if nodes < 1:
        raise PlanError(f"--search {nodes}: give a number of nodes, at least 1")
    fastest: dict[tuple[bool, ...], Candidate] = {}
    own: Candidate | None = None
    for option in _options(load, nodes):
        tried = _candidate(option, device, own=option is load)
        if tried is None:
            continue
        own = tried if tried.own else own
        layout = option.layout
        kind = (layout.tensor > 1, layout.pipeline > 1, layout.expert > 1, option.recompute)
        if kind not in fastest or tried.seconds < fastest[kind].seconds:
            fastest[kind] = tried
    ranked = sorted(fastest.values(), key=lambda candidate: candidate.seconds)[:MOST]
    if own is not None:
        ranked = [candidate for candidate in ranked if candidate.layout != own.layout]
        first = not ranked or own.seconds <= EQUAL * ranked[0].seconds
        ranked = [own, *ranked[: MOST - 1]] if first else [*ranked[: MOST - 1], own]
    return ranked


def _options(load: Workload, nodes: int) -> Iterator[Workload]:
    """Yield workloads to try; also the recipe's own, if it has this number of nodes."""
    if nodes == load.nodes:
        yield load
    engine_layouts = list(_engine_layouts(load))
    teachers = tuple(it for teacher in load.teachers if (it := teacher.on(nodes)) is not None)
    if len(teachers) < len(load.teachers):
        return
    for layout in _layouts(load, nodes * load.gpus_per_node):
        world = layout.world_size
        for recompute in (False, True):
            for engine in engine_layouts:
                engines = max(1, world // engine.ranks) if load.colocated else load.engines
                pool = DevicePool(nodes, load.gpus_per_node)
                devices = EngineDevices(engine, engines, pool, counted=load.kernels != "cpu")
                if fits(layout, world, load.shape, devices if load.grpo and load.colocated else None):
                    continue
                yield replace(
                    load, layout=layout, nodes=nodes, recompute=recompute, recomputed=frozenset(),
                    engine_layout=engine, engines=engines, teachers=teachers,
                )  # fmt: skip


def _engine_layouts(load: Workload) -> Iterator[EngineLayout]:
    """Yield layouts of the engines to try: the recipe's alone where they have their own devices or there are none, else
    with any TP within a node."""
    own = load.engine_layout
    if not (load.grpo and load.colocated):
        yield own
        return
    for tensor in sorted({*_powers(load.gpus_per_node), own.tensor}):
        yield replace(own, tensor=tensor, nodes=max(1, tensor * own.pipeline // load.gpus_per_node))


def _layouts(load: Workload, world: int) -> Iterator[PolicyLayout]:
    """Yield layouts of the policy to try: TP and EP within a node, PP that divides the layers, CP as in the recipe."""
    shape, context = load.shape, load.layout.context
    for tensor in _powers(load.gpus_per_node):
        stages = max(1, shape.num_layers // LAYERS_PER_STAGE)
        for pipeline in (size for size in range(1, stages + 1) if shape.num_layers % size == 0):
            data = world // (tensor * pipeline * context)
            if data * tensor * pipeline * context != world or load.batch % data:
                continue
            for expert in _powers(load.gpus_per_node if shape.experts else 1):
                yield PolicyLayout(tensor, pipeline, data, context, expert, sequence_parallel=tensor > 1)


def _powers(limit: int) -> list[int]:
    return [1 << bit for bit in range(limit.bit_length())]


def _candidate(load: Workload, device: Device, *, own: bool) -> Candidate | None:
    bubble = pipeline_bubble(load.layout.pipeline, load.micro_batches, load.layout.virtual)
    if bubble > WORST_BUBBLE and not own:
        return None
    free = load.grpo and load.kv_cache is None and device.memory is not None and not own
    shares = SHARES if free else (load.engine_share,)
    for share in shares:
        option = replace(load, engine_share=share)
        engine, stages = memory(option, device)
        if fits_device(stages, engine, option, device, margin=1.0 if own else CLOSE):
            break
    else:
        return None
    times = step_time(option, device, engine, None)
    layout, peak = option.layout, max(stage.peak.total for stage in stages)
    where = max(stages, key=lambda stage: stage.peak.total).peak.name
    room = "" if device.memory is None else f" of {device.memory / 1e9:.0f}"
    reason = (
        f"about {times.likely:.3g} s a step, most of it {times.slowest.name} ({times.slowest.bound}); peak "
        f"{peak / 1e9:.1f}{room} GB in {where}; bubble {times.bubble:.0%}"
    )
    at = "policy.megatron_cfg."
    overrides: tuple[str, ...] = (
        f"{at}tensor_model_parallel_size={layout.tensor}",
        f"{at}pipeline_model_parallel_size={layout.pipeline}",
        f"{at}sequence_parallel={str(layout.sequence_parallel).lower()}",
        f"{at}activation_checkpointing={str(option.recompute).lower()}",
        f"policy.generation.vllm_cfg.tensor_parallel_size={option.engine_layout.tensor}",
        f"policy.generation.vllm_cfg.gpu_memory_utilization={option.engine_share:g}",
        f"cluster.num_nodes={option.nodes}",
    )
    if option.shape.experts is not None:
        overrides += (f"{at}expert_model_parallel_size={layout.expert}", f"{at}expert_tensor_parallel_size=1")
    if option.engine_layout.expert_parallel:
        overrides += (f"policy.generation.vllm_cfg.expert_parallel_size={option.engine_layout.tensor}",)
    recompute = ", recomputed activations" if option.recompute else ""
    name = f"{layout.describe()}{recompute}, {option.engines} engines x {option.engine_layout.describe()}"
    return Candidate(overrides, name, times.likely, peak, reason, own)
