"""`make_plan`: a recipe's batch, layout, memory, time and refit, before anything is started. Imports neither
Megatron-Core nor vLLM nor Ray, and needs no accelerator."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.families import ModelShape, parameter_count, read_hf_config, shape_of
from grpo_mcore.families.activations import Kernels
from grpo_mcore.families.known import CONFIGS, known_config
from grpo_mcore.recipe import MasterConfig, batch_equation
from grpo_mcore.refit.layout import LayoutError
from grpo_mcore.refit.plan import RefitError
from grpo_mcore.tools.plan.advice import bottleneck, warnings
from grpo_mcore.tools.plan.devices import DEVICES, Device, PlanError, device_named
from grpo_mcore.tools.plan.memory import EngineMemory, StageMemory, fits, memory
from grpo_mcore.tools.plan.refit_traffic import RefitTraffic, refit_traffic
from grpo_mcore.tools.plan.search import Candidate, search
from grpo_mcore.tools.plan.timing import StepTime, step_time
from grpo_mcore.tools.plan.workload import Workload, workload_of


@dataclass(frozen=True)
class Plan:
    """Everything that is known before a run. Bytes, FLOPs, seconds."""

    model: str
    batch: str
    load: Workload
    device: Device
    engine: EngineMemory
    stages: tuple[StageMemory, ...]
    times: StepTime
    refit: RefitTraffic | None
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        possible = self.refit is not None or not self.load.grpo
        return possible and fits(self.stages, self.engine, self.load, self.device)

    @property
    def bottleneck(self) -> str:
        return bottleneck(self.times)

    def plain(self) -> dict[str, Any]:
        """For --json."""
        load, layout = self.load, self.load.layout
        return {
            "model": self.model,
            "parameters": parameter_count(load.shape),
            "batch": self.batch,
            "device": asdict(self.device),
            "layout": asdict(layout) | {"world_size": layout.world_size, "describe": layout.describe()},
            "mean_length": load.mean_length,
            "micro_batches": load.micro_batches,
            "stages": [
                {
                    "stage": stage.stage,
                    "ranks": list(ranks_of(load, stage.stage)),
                    "layers": [[chunk.start, chunk.stop] for chunk in load.chunks[stage.stage]],
                    "parameters": load.params(stage.stage).numel,
                    "expert_parameters": load.params(stage.stage).expert_numel,
                    "memory": {phase.name: phase.parts | {"total": phase.total} for phase in stage.phases},
                    "peak": stage.peak.name,
                }
                for stage in self.stages
            ],
            "engine": asdict(self.engine) | {"longest_samples_at_once": self.engine.sequences(load.max_length)}
            if load.grpo
            else None,
            "time": {"phases": [asdict(phase) for phase in self.times.phases], "likely": self.times.likely,
                     "pipeline_bubble": self.times.bubble},
            "refit": asdict(self.refit) if self.refit else None,
            "fits": self.fits,
            "bottleneck": self.bottleneck,
            "warnings": list(self.warnings),
        }  # fmt: skip


def ranks_of(load: Workload, stage: int) -> range:
    """The policy ranks of a pipeline stage: ranks run tensor first, then context, data, and pipeline."""
    each = load.layout.stage_size
    return range(stage * each, (stage + 1) * each)


def plan_device(config: MasterConfig, name: str | None, memory_gb: float | None) -> Device:
    """`name`, or what the recipe's cluster.platform says: cpu, otherwise an H100. Raises PlanError."""
    return device_named(name or ("cpu" if config.cluster.platform == "cpu" else "H100"), memory_gb)


def plan_shape(config: MasterConfig, config_json: str | Path | None = None) -> ModelShape:
    """The model's shape: from `config_json`, from its folder, or by its name. Raises PlanError, FamilyError."""
    name = config.policy.model_name
    if config_json is not None:
        path = Path(config_json)
        if not path.is_file():
            raise PlanError(f"--config-json {path}: no such file")
        return shape_of(json.loads(path.read_text()))
    if Path(name).is_dir():
        return shape_of(read_hf_config(name))
    if (known := known_config(name)) is None:
        raise PlanError(
            f"policy.model_name {name!r} is no folder here and not among the models known by name "
            f"({', '.join(CONFIGS)}); give its Hugging Face config.json with --config-json PATH"
        )
    return shape_of(known)


def make_plan(
    config: MasterConfig,
    shape: ModelShape,
    device: Device,
    *,
    mean_length: int | None = None,
    kernels: Kernels | None = None,
) -> Plan:
    """The plan of a recipe. Raises FamilyError for a layout that the model does not allow. A refit that cannot be is a
    warning, and the plan does not fit."""
    kernels = kernels or ("cpu" if device.name == "cpu" else "transformer_engine")
    load = workload_of(config, shape, kernels=kernels, mean_length=mean_length)
    engine, stages = memory(load, device)
    impossible, traffic = [], None
    if load.grpo:
        try:
            traffic = refit_traffic(load)
        except (RefitError, LayoutError) as error:
            impossible.append(f"no refit: {error}")
    times = step_time(load, device, engine, traffic)
    found = [*impossible, *warnings(load, device, engine, stages, times, traffic)]
    equation = batch_equation(config, "grpo" if load.grpo else "sft")
    return Plan(config.policy.model_name, equation, load, device, engine, stages, times, traffic, tuple(found))


__all__ = [
    "DEVICES", "Candidate", "Device", "Plan", "PlanError", "Workload", "make_plan", "plan_device", "plan_shape",
    "ranks_of", "search",
]  # fmt: skip
