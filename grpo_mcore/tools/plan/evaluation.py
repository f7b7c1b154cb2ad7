"""`plan_evaluation`: memory and time of an evaluation. It has engines alone: no policy, no optimizer, no refit."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_mcore.families import ModelShape, parameter_count
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.plan.memory import ENGINE_OVERHEAD, EngineMemory, engine_memory
from grpo_mcore.tools.plan.run_plan import VLLM, plan_workload
from grpo_mcore.tools.plan.timing import PhaseTime, generation_time
from grpo_mcore.tools.plan.workload import Device, Workload

ASSUMED_PROMPTS = 1000
"""Prompts of an evaluation whose recipe does not limit them."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Everything that can be predicted of an evaluation, in bytes and seconds."""

    model: str
    load: Workload
    device: Device
    engine: EngineMemory
    prompts: int
    generation: PhaseTime
    warnings: tuple[str, ...]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of an engine rank, by part."""
        parts = self.engine.woken | {"KV cache": max(0, self.engine.kv_cache)}
        return parts | ({} if self.device.memory is None else {"engine overhead": ENGINE_OVERHEAD})

    @property
    def fits(self) -> bool:
        """Whether the weights fit the device and the KV cache holds at least one longest sample."""
        room = self.device.memory is None or sum(self.memory.values()) <= self.device.memory
        return room and self.engine.sequences(self.load.max_length) >= 1

    def plain(self) -> dict[str, Any]:
        """Return the plan as plain values, for --json."""
        return {
            "model": self.model,
            "parameters": parameter_count(self.load.shape),
            "device": asdict(self.device),
            "engines": self.load.engines,
            "engine": asdict(self.engine) | {"longest_samples_at_once": self.engine.sequences(self.load.max_length)},
            "memory": self.memory | {"total": sum(self.memory.values())},
            "prompts": self.prompts,
            "samples": self.load.samples,
            "time": {"phases": [asdict(self.generation)], "likely": self.generation.likely},
            "fits": self.fits,
            "warnings": list(self.warnings),
        }

    def text(self) -> str:
        """Return the plan for a terminal."""
        load, device = self.load, self.device
        room = "the host's memory" if device.memory is None else f"{device.memory / 1e9:.0f} GB"
        rows = self.memory | {"total": sum(self.memory.values())}
        return "\n".join([
            f"model       {self.model}: {load.shape.family}, {parameter_count(load.shape) / 1e9:.3g} B parameters",
            f"samples     {self.prompts:,} prompts x {load.samples // self.prompts} = {load.samples:,} of "
            f"{load.mean_length:,} tokens, at most {load.max_length:,}",
            f"engines     {load.engines} x {load.engine_layout.describe()} on {load.engine_nodes} x {load.engine_gpus} "
            f"{device.name} ({room}); the KV cache of a rank holds {self.engine.sequences(load.max_length):,} longest "
            "samples",
            "",
            "memory of an engine's rank, GB",
            *(f"  {part:36}{size / 1e9:>12.2f}" for part, size in rows.items()),
            "",
            f"generation  about {self.generation.likely:,.3g} s, most of it {self.generation.bound}",
            f"verdict     {'it fits' if self.fits else 'IT DOES NOT FIT'}",
            *(f"warning     {warning}" for warning in self.warnings),
        ])  # fmt: skip


def plan_evaluation(
    config: MasterConfig, shape: ModelShape, device: Device, *, mean_length: int | None = None
) -> EvaluationPlan:
    """Plan an evaluation. Raises what `plan_workload` raises."""
    load = plan_workload(config, shape, device, mean_length=mean_length)
    prompts = config.eval.num_prompts or ASSUMED_PROMPTS
    load = replace(load, grpo=True, samples=prompts * config.eval.samples_per_prompt, batch=load.engines)
    engine, warnings = engine_memory(load, device), list[str]()
    if engine.sequences(load.max_length) < 1:
        warnings.append(
            f"an engine's KV cache cannot hold one sample of {load.max_length:,} tokens: raise "
            f"{VLLM}gpu_memory_utilization or {VLLM}tensor_parallel_size, or lower {VLLM}max_model_len"
        )
    if config.eval.num_prompts is None:
        warnings.append(f"the time is that of {ASSUMED_PROMPTS:,} prompts; it is proportional to their number")
    generation = generation_time(load, device, engine)
    return EvaluationPlan(config.policy.model_name, load, device, engine, prompts, generation, tuple(warnings))
