"""Search the layouts of a recipe's model that fit a number of nodes.

A layout is one of the policy (TP, PP with even or uneven stages, EP over one or more nodes, recomputed activations)
with one of the engines (TP, whole or sliced experts, one or more nodes), on the same devices or on nodes of their own.
A policy's memory does not depend on the engines, so it is computed once for all of them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_mcore.families import ModelShape, params_of
from grpo_mcore.layout import DevicePool, EngineDevices, EngineLayout, Finding, PolicyLayout, fits
from grpo_mcore.layout.findings import Key
from grpo_mcore.recipe import MasterConfig, MegatronConfig, policy_layout
from grpo_mcore.recipe.errors import in_yaml
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.tools.plan.memory import (
    CLOSE,
    EngineMemory,
    StageMemory,
    engine_memory,
    engine_parts,
    fits_device,
    memory,
    node_memory,
    policy_memory,
    stage_memory,
)
from grpo_mcore.tools.plan.timing import check_refit, generation_time, step_time
from grpo_mcore.tools.plan.workload import Device, PlanError, Workload

SHARES = (0.85, 0.7, 0.6, 0.5, 0.4)
"""Values of gpu_memory_utilization to try, in this order: more KV cache allows more samples at a time."""
LAYERS_PER_STAGE = 4
"""Fewest layers of a pipeline stage that is tried, but for the first and the last."""
MOST = 5
"""Maximum number of layouts that are returned."""
EQUAL = 1.1
"""Layouts whose times differ by less than this factor count as equally fast: the estimate is no better."""


@dataclass(frozen=True)
class SavedLayout:
    """The layout of the checkpoint `name` that holds the optimizer in the layout's parts, so that no other resumes."""

    name: str
    layout: PolicyLayout

    def refuses(self, layout: PolicyLayout) -> bool:
        """Return whether a run with this layout cannot resume the checkpoint."""
        return layout.optimizer_parts() != self.layout.optimizer_parts()


def saved_layout(config: MasterConfig) -> SavedLayout | None:
    """Return the layout that `--resume` of the recipe would have to keep: that of its newest checkpoint, if this holds
    the optimizer in parts; None where any layout resumes. Raises what reading config.yaml of the checkpoint raises."""
    saving = config.checkpointing
    if not saving.enabled or not Path(saving.checkpoint_dir).is_dir():
        return None
    from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager, saved_recipe  # takes half a second

    if (newest := CheckpointManager(saving).latest()) is None:
        return None
    saved = saved_recipe(newest)
    megatron = MegatronConfig.model_construct(**saved["policy"]["megatron_cfg"])
    if megatron.dist_ckpt_optim_fully_reshardable or not saved["checkpointing"].get("save_optimizer", True):
        return None
    return SavedLayout(str(newest), policy_layout(megatron, 1))


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, as overrides for the command line. `seconds` is the time of a step without the refit, `peak`
    the bytes of the fullest device, `node_memory` the bytes on the host of a node. `own` says that it is the recipe's,
    `refused_by` which checkpoint could not be resumed with it.
    """

    overrides: tuple[str, ...]
    layout: str
    seconds: float
    peak: int
    node_memory: int
    reason: str
    own: bool = False
    refused_by: str | None = None
    load: Workload | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class SearchResult:
    """Layouts that fit, fastest first. `refused` is the commonest reason for which a layout was not tried, where none
    fits."""

    candidates: tuple[Candidate, ...]
    refused: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the result as plain values, for --json."""
        candidates = [
            {it.name: getattr(candidate, it.name) for it in fields(candidate) if it.name != "load"}
            for candidate in self.candidates
        ]
        return {"candidates": candidates, "refused": self.refused}


def search(load: Workload, device: Device, nodes: int, saved: SavedLayout | None = None) -> SearchResult:
    """Return layouts on `nodes` nodes, fastest first, each with the engines that are fastest with it: at most MOST, the
    recipe's own among them if it fits. `saved` marks those that cannot resume it. Raises PlanError for less than one
    node."""
    if nodes < 1:
        raise PlanError(f"--search {nodes}: give a number of nodes, at least 1")
    attempts = _Attempts(load, device, nodes)
    ranked = sorted(attempts.options(), key=lambda option: option.seconds)
    fastest = islice((option for option in ranked if _can_refit(option.load)), MOST)
    candidates = [_candidate(option, load, device, saved) for option in fastest]
    recipes = attempts.recipes_own()
    if recipes is not None and _can_refit(recipes.load):
        own = _candidate(recipes, load, device, saved, is_own=True)
        candidates = [candidate for candidate in candidates if candidate.layout != own.layout][: MOST - 1]
        candidates = sorted([own, *candidates], key=lambda candidate: candidate.seconds)
    return SearchResult(tuple(candidates), None if candidates else attempts.refusal())


@dataclass(frozen=True)
class _Option:
    """A workload that fits, the memory of its engine, and the seconds of a step without the refit."""

    load: Workload
    engine: EngineMemory
    stages: tuple[StageMemory, ...]
    seconds: float


@dataclass(frozen=True)
class _EngineOption:
    """Engines of one layout, with one gpu_memory_utilization."""

    layout: EngineLayout
    count: int
    share: float
    memory: EngineMemory
    seconds: float  # of generation


class _Attempts:
    """All workloads that are tried, and why layouts were refused before their memory was looked at."""

    def __init__(self, load: Workload, device: Device, nodes: int) -> None:
        self._load, self._device, self._nodes = load, device, nodes
        self._refusals: Counter[str] = Counter()

    def recipes_own(self) -> _Option | None:
        """Return the recipe's own layout, if it has this number of nodes and fits."""
        load, device = self._load, self._device
        if total_nodes(load) != self._nodes:
            return None
        engine, stages = memory(load, device)
        if not fits_device(stages, engine, load, device):
            return None
        return _Option(load, engine, stages, step_time(load, device, engine, None).likely)

    def options(self) -> Iterator[_Option]:
        """Yield every policy that fits, with the fastest engines that fit beside it."""
        for placed in _divisions(self._load, self._nodes):
            engines = self._engines(placed)
            for layout in _layouts(placed):
                if findings := fits(layout, layout.world_size, placed.shape):
                    self._refuse(findings)
                    continue
                for recompute in (False, True):
                    policy = replace(placed, layout=layout, recompute=recompute, recomputed=frozenset())
                    option = self._fit(policy, engines)
                    if option is not None:
                        yield option

    def _fit(self, load: Workload, engines: Sequence[_EngineOption]) -> _Option | None:
        """Return the policy with the first of the engines that fit beside it; None if it does not fit."""
        device = self._device
        if device.memory is not None and least_bytes(load, device) > device.memory:
            return None
        stages = tuple(policy_memory(load, device, stage) for stage in range(load.layout.pipeline))
        for engine in engines:
            option = replace(load, engine_layout=engine.layout, engines=engine.count, engine_share=engine.share)
            if _has_room(option, stages, engine.memory, device):
                return _Option(option, engine.memory, stages, step_time(option, device, engine.memory, None).likely)
        return None

    def _engines(self, load: Workload) -> list[_EngineOption]:
        """Return the engines to try, the fastest first."""
        if not load.grpo:
            return [_EngineOption(load.engine_layout, load.engines, load.engine_share, EngineMemory(0, 0, 0), 0.0)]
        pool = DevicePool(load.engine_nodes, load.engine_gpus)
        counted = load.kernels != "cpu" or not load.colocated
        shares = SHARES if load.kv_cache is None and self._device.memory is not None else (load.engine_share,)
        options, refused = [], list[Finding]()
        for layout in _engine_layouts(load, pool):
            count = max(1, pool.ranks // layout.ranks) if counted else load.engines
            if findings := fits(PolicyLayout(), 1, load.shape, EngineDevices(layout, count, pool, counted)):
                refused += [finding for finding in findings if finding.keys[0].startswith("policy.generation")]
                continue
            for share in shares:
                option = replace(load, engine_layout=layout, engines=count, engine_share=share)
                needed = engine_memory(option, self._device)
                if needed.sequences(load.max_length) < 1:
                    continue
                seconds = generation_time(option, self._device, needed).likely
                options.append(_EngineOption(layout, count, share, needed, seconds))
        if not options:
            self._refuse(refused)
        return sorted(options, key=lambda option: option.seconds)

    def _refuse(self, findings: Iterable[Finding]) -> None:
        self._refusals.update(f"{finding.keys[0]}: {finding.message}" for finding in findings)

    def refusal(self) -> str | None:
        """Return the commonest reason for which a layout was refused."""
        return max(self._refusals, key=lambda text: self._refusals[text], default=None)


def _has_room(load: Workload, stages: Sequence[StageMemory], engine: EngineMemory, device: Device) -> bool:
    """Return whether policy and engine leave some memory of the device free, and fit the host of a node."""
    peaks = (
        phase.total + sum(engine_parts(load, device, engine, phase.name).values())
        for stage in stages
        for phase in stage.phases
    )
    if device.memory is not None and max(peaks) > CLOSE * device.memory:
        return False
    return device.host_memory is None or node_memory(load, tuple(stages), engine, device) <= device.host_memory


def total_nodes(load: Workload) -> int:
    """Return the nodes of the cluster: of the policy, and those that engines and teachers have to themselves."""
    engines = load.engine_nodes if load.grpo and not load.colocated and not load.divided else 0
    return load.nodes + engines + _teacher_nodes(load)


def _teacher_nodes(load: Workload) -> int:
    return sum(teacher.load.nodes for teacher in load.teachers if teacher.apart)


def _divisions(load: Workload, nodes: int) -> Iterator[Workload]:
    """Yield the workload on this many nodes, with engines on the policy's devices and on some of the nodes. None where
    a teacher's layout does not fit the policy's nodes."""
    left = nodes - _teacher_nodes(load)
    if load.divided or not load.grpo or load.kernels == "cpu":
        splits = {0}
    elif load.colocated:
        splits = {0, left // 4, left // 2}
    else:
        splits = {load.engine_nodes, left // 4, left // 2, *_powers(left)}
    for split in sorted(splits):
        policy_nodes = left - split
        teachers = tuple(it for teacher in load.teachers if (it := teacher.on(policy_nodes)) is not None)
        engines_fit = split or load.colocated or load.divided
        if policy_nodes < 1 or len(teachers) < len(load.teachers) or not engines_fit:
            continue
        yield replace(
            load, nodes=policy_nodes, teachers=teachers, engine_nodes=split or policy_nodes,
            colocated=load.colocated and not split,
            engine_gpus=load.engine_gpus,
        )  # fmt: skip


def _engine_layouts(load: Workload, pool: DevicePool) -> Iterator[EngineLayout]:
    """Yield layouts of the engines to try: any TP within a node or over whole ones, with whole and with sliced
    experts."""
    recipes = load.engine_layout
    for tensor in sorted({*_powers(pool.ranks), recipes.tensor}):
        ranks = tensor * recipes.pipeline
        if ranks > pool.ranks:
            continue
        nodes = max(1, -(-ranks // pool.per_node))
        sliced_too = load.shape.experts and tensor > 1
        for expert_parallel in (recipes.expert_parallel, not recipes.expert_parallel) if sliced_too else (False,):
            yield EngineLayout(tensor, recipes.pipeline, expert_parallel, nodes)


def _layouts(load: Workload) -> Iterator[PolicyLayout]:
    """Yield layouts of the policy to try: TP within a node, PP with even or uneven stages, CP as in the recipe, EP over
    as many ranks as a stage has."""
    shape, context = load.shape, load.layout.context
    world = load.nodes * load.gpus_per_node
    for tensor in _powers(load.gpus_per_node):
        for pipeline in range(1, max(1, -(-shape.num_layers // LAYERS_PER_STAGE)) + 1):
            data = world // (tensor * pipeline * context)
            if data * tensor * pipeline * context != world or load.batch % data:
                continue
            experts = shape.experts.count if shape.experts else 1
            for first, last in stage_splits(shape.num_layers, pipeline):
                for expert in (size for size in _powers(data * tensor * context) if experts % size == 0):
                    yield PolicyLayout(
                        tensor, pipeline, data, context, expert, first_layers=first, last_layers=last,
                        sequence_parallel=tensor > 1,
                    )  # fmt: skip


def stage_splits(layers: int, stages: int) -> list[tuple[int | None, int | None]]:
    """Return (layers of the first stage, layers of the last stage) of the splits to try; None: as many as the others.

    Where the stages do not divide the layers, those in between have one more than the mean, and the last stage, which
    computes the logits, has so many less; or the first and the last have less in equal parts.
    """
    if layers % stages == 0:
        return [(None, None)]
    usual = -(-layers // stages)
    missing = usual * stages - layers
    splits: list[tuple[int | None, int | None]] = []
    if usual > missing:
        splits.append((None, usual - missing))
    if missing > 1 and usual > missing - missing // 2:
        splits.append((usual - missing // 2, usual - (missing - missing // 2)))
    return splits


def least_bytes(load: Workload, device: Device) -> int:
    """Return the bytes that the fullest rank has at least while it trains: the mean over its stages of what the
    parameters take. So a layout that is far too large is found without its parameters being laid out."""
    layout = load.layout
    dense, experts = _numel(load.shape)
    params = (dense / layout.tensor + experts / (layout.expert * layout.expert_tensor)) / layout.pipeline
    if load.adapters is not None:
        return int(params * load.element) + device.reserved
    moments = 8 + (4 if load.element < 4 else 0)
    optimizer = (dense + experts) / layout.world_size * moments * (1 - load.host_share)
    return int(params * (load.element + load.gradient) + optimizer) + device.reserved


@cache
def _numel(shape: ModelShape) -> tuple[int, int]:
    """Return the number of elements outside of experts, and in them."""
    dense = experts = 0
    for param in params_of(shape):
        if param.copy or param.buffer:
            continue
        numel = sum(math.prod(tensor.shape) for tensor in param.hf)
        if param.expert is None:
            dense += numel
        else:
            experts += numel
    return dense, experts


def _powers(limit: int) -> list[int]:
    return [1 << bit for bit in range(limit.bit_length())]


def _can_refit(load: Workload) -> bool:
    if load.grpo:
        try:
            check_refit(load)
        except RefitError:
            return False
    return True


def _candidate(
    option: _Option, recipe: Workload, device: Device, saved: SavedLayout | None, *, is_own: bool = False
) -> Candidate:
    load = option.load
    stages = tuple(stage_memory(load, device, stage.stage, option.engine) for stage in option.stages)
    times = step_time(load, device, option.engine, None)
    fullest = max((stage.peak for stage in stages), key=lambda peak: peak.total)
    room = "" if device.memory is None else f" of {device.memory / 1e9:.0f}"
    node = node_memory(load, stages, option.engine, device)
    reason = (
        f"about {times.likely:.3g} s a step, most of it {times.slowest.name} ({times.slowest.bound}); peak "
        f"{fullest.total / 1e9:.1f}{room} GB in {fullest.name}; bubble {times.bubble:.0%}"
        + (f"; {node / 1e9:,.0f} GB of host memory a node" if node else "")
    )
    refused_by = saved.name if saved is not None and saved.refuses(load.layout) else None
    return Candidate(
        _overrides(load, recipe), _describe(load), times.likely, fullest.total, node, reason, is_own, refused_by, load
    )


def _describe(load: Workload) -> str:
    layout = load.layout
    text = layout.describe()
    if layout.first_layers or layout.last_layers:
        counts = [len(layers) for layers in load.layers]
        text += f", {counts[0]} layers in the first stage, {counts[-1]} in the last, else {counts[len(counts) // 2]}"
    text += ", recomputed activations" if load.recompute else ""
    text += f", {load.host_share:.0%} of the optimizer on the host" if load.host_share else ""
    if not load.grpo:
        return text
    text += f"; {load.engines} engines x {load.engine_layout.describe()}"
    if load.colocated or load.divided:
        return text
    return f"{text} on {load.engine_nodes} node{'s' if load.engine_nodes > 1 else ''} of their own"


def _overrides(load: Workload, recipe: Workload) -> tuple[str, ...]:
    """Return the keys that turn the recipe into this workload."""
    layout, was, section = load.layout, recipe.layout, "policy.megatron_cfg."
    keys: dict[str, object] = {
        Key.TENSOR: layout.tensor,
        Key.PIPELINE: layout.pipeline,
        Key.SEQUENCE: layout.sequence_parallel,
    }
    for key, value, before in (
        (Key.FIRST, layout.first_layers, was.first_layers),
        (Key.LAST, layout.last_layers, was.last_layers),
        (Key.VIRTUAL, layout.virtual if layout.virtual > 1 else None, was.virtual if was.virtual > 1 else None),
    ):
        if value != before:
            keys[key] = value
    if load.shape.experts is not None:
        keys |= {Key.EXPERT: layout.expert, Key.EXPERT_TENSOR: layout.expert_tensor}
    keys[f"{section}activation_checkpointing"] = load.recompute or bool(load.recomputed)
    if recipe.recomputed and load.recompute:
        keys[f"{section}recompute_granularity"] = "full"
    if load.grpo:
        engine = load.engine_layout
        keys[Key.ENGINE_TENSOR] = engine.tensor
        if engine.expert_parallel or recipe.engine_layout.expert_parallel:
            keys[Key.ENGINE_EXPERT] = engine.tensor if engine.expert_parallel else 1
        keys["policy.generation.vllm_cfg.gpu_memory_utilization"] = load.engine_share
        if not load.default_engines:
            keys["policy.generation.num_engines"] = load.engines
        if not load.colocated and not load.divided:
            keys["policy.generation.colocated.enabled"] = False
            keys["policy.generation.colocated.resources.num_nodes"] = load.engine_nodes
            keys["policy.generation.colocated.resources.gpus_per_node"] = load.engine_gpus
    keys["cluster.num_nodes"] = total_nodes(load)
    return tuple(f"{key}={in_yaml(value)}" for key, value in keys.items())
