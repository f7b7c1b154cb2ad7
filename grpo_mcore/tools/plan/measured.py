"""Compare what `plan` predicts with what a run measured, for the run's closing report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from grpo_mcore.driver.record.run_report import MeasuredRun
from grpo_mcore.tools.plan.memory import gradient_bytes, host_optimizer_bytes, optimizer_bytes, weight_bytes
from grpo_mcore.tools.plan.run_plan import Plan, make_plan
from grpo_mcore.tools.plan.timing import refit_plan
from grpo_mcore.tools.plan.workload import DEVICES, Device

TIMERS = {
    "refit": "refit",
    "generation": "generate",
    "teachers": "teachers",
    "log-probs": "logprobs",
    "critic": "train/critic",
    "training": "train",
}
"""Phase of the plan -> timer of the run."""


@dataclass(frozen=True)
class Compared:
    """One line of the comparison: seconds per step, or bytes on the rank with the most."""

    what: str
    predicted: float
    measured: float
    unit: str  # "s" or "bytes"


@dataclass(frozen=True)
class PlanComparison:
    """A run beside its plan. The data sheet of `device` gives the predicted seconds; `mean_length` is the mean length
    of the samples that were trained on."""

    device: Device
    mean_length: int
    lines: tuple[Compared, ...]

    def plain(self) -> list[dict[str, Any]]:
        """Return the lines as plain values, for summary.json."""
        return [vars(line) for line in self.lines]

    def text(self) -> list[str]:
        """Return the lines of a small table."""
        device = self.device
        speed = f"{device.flops / 1e12:g} TFLOP/s and {device.memory_bandwidth / 1e9:g} GB/s a rank"
        rows = [f"{'predicted against measured':32}{'predicted':>12}{'measured':>12}{'ratio':>9}"]
        for line in self.lines:
            name = f"{line.what}, s a step (median)" if line.unit == "s" else f"{line.what}, MB of a rank (most)"
            by = 1.0 if line.unit == "s" else 1e6
            ratio = f"{line.measured / line.predicted:>9.2f}" if line.predicted else f"{'-':>9}"
            rows.append(f"  {name:30}{line.predicted / by:>12.4g}{line.measured / by:>12.4g}{ratio}")
        if device.name == "cpu":
            return rows
        samples = f"samples of {self.mean_length:,} tokens, as they were"
        return [*rows, f"  seconds: the data sheet of {device.name}, {speed};", f"           {samples}"]


def compare(run: MeasuredRun) -> PlanComparison | None:
    """Compare a run with its plan. Return None if nothing was trained, or if the plan does not know the accelerator."""
    if not run.steps or not run.memory or not all(run.memory):
        return None
    device = _device(run.memory[0])
    if device is None:
        return None
    plan = make_plan(run.recipe, run.model, device, mean_length=max(1, run.mean_length), teachers=run.teachers)
    seconds = [] if device.name == "cpu" else _seconds(plan, run.steps)  # no CPU is the rule of thumb of its cores
    return PlanComparison(device, run.mean_length, (*seconds, *_bytes(plan, run.memory)))


def _device(memory: Mapping[str, Any]) -> Device | None:
    """Return the device with the name that its driver reports, and the nearest memory."""
    if "device" not in memory:
        return DEVICES["cpu"]
    known = [device for device in DEVICES.values() if device.name.partition("-")[0] in memory["device"]]
    return min(known, key=lambda device: abs((device.memory or 0) - memory["device bytes"]), default=None)


def _seconds(plan: Plan, steps: Sequence[Mapping[str, float]]) -> list[Compared]:
    """Compare the seconds, without the first step, which warms everything up, if there are others."""
    steps = steps[1:] or steps
    compared = []
    for phase in plan.times.phases:
        if (timer := TIMERS.get(phase.name)) is None:
            continue  # a run measures it as part of the others
        inside = TIMERS["critic"] if phase.name == "training" else ""
        measured = [step[timer] - step.get(inside, 0.0) for step in steps if timer in step]
        if measured:
            compared.append(Compared(phase.name, phase.likely, median(measured), "s"))
    return compared


def _bytes(plan: Plan, memory: Sequence[Mapping[str, Any]]) -> list[Compared]:
    load, stages = plan.load, range(plan.load.layout.pipeline)
    predicted = {
        "weights": max(weight_bytes(load, stage) for stage in stages),
        "gradients": max(gradient_bytes(load, stage) for stage in stages),
        "optimizer": max(
            optimizer_bytes(load, load.layout.coordinates(rank).pipeline, load.layout.coordinates(rank))
            for rank in range(load.world)
        ),
    }
    if load.host_share:
        predicted["optimizer on the host"] = max(host_optimizer_bytes(load, stage) for stage in stages)
    if plan.refit is not None:
        predicted["refit buffer"] = refit_plan(load).buffer_bytes
    if "peak" in memory[0]:
        predicted["peak"] = max(stage.peak.total for stage in plan.stages)
    return [
        Compared(name, size, max(rank[name] for rank in memory), "bytes")
        for name, size in predicted.items()
        if name in memory[0]
    ]
