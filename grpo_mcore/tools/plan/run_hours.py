"""Hours of a whole run by a plan's seconds: a range with its source, checkpoints and validations included."""

from __future__ import annotations

from grpo_mcore.families import parameter_count
from grpo_mcore.recipe import MasterConfig, algorithm_of
from grpo_mcore.tools.plan.run_plan import Plan

ELSEWHERE = (1.8, 2.4)
"""Published seconds of a step over planned ones, of three runs of NeMo RL on H100 (docs/plan_and_doctor.md)."""
SOURCE = f"measured elsewhere: {ELSEWHERE[0]} to {ELSEWHERE[1]} x the likely seconds"
WRITES = (0.5e9, 5e9)
"""Bytes a second that a node writes to a shared file system, slow and fast; `doctor --recipe` measures the folder."""
OPTIMIZER = 12
"""Bytes of a trained parameter in a checkpoint beside the weight: float32 copy and two moments. In a float32 policy the
weight itself is written once more in place of the copy."""
SHOWN_STEPS = 1000
"""Steps of a run whose recipe does not limit them."""


def checkpoint_bytes(plan: Plan, *, optimizer: bool = True) -> int:
    """Return the bytes of a checkpoint of the policy: weights, and the optimizer of those that are trained."""
    load, total = plan.load, parameter_count(plan.load.shape)
    frozen = sum(load.params(stage).frozen for stage in range(load.layout.pipeline)) * load.layout.tensor
    trained = max(0, total - frozen) if load.adapters is None else 0
    if load.adapters is not None:
        own = (load.params(stage) for stage in range(load.layout.pipeline))
        trained = sum(params.numel - params.frozen for params in own) * load.layout.tensor
    return total * load.element + (OPTIMIZER * trained if optimizer else 0)


def run_text(plan: Plan, config: MasterConfig) -> list[str]:
    """Return the lines about a checkpoint and the whole run. On CPU only the bytes: no data sheet has its seconds."""
    saving, name = config.checkpointing, algorithm_of(config)
    lines, nbytes = list[str](), checkpoint_bytes(plan, optimizer=saving.save_optimizer)
    on_cpu = plan.device.memory is None
    low, high = (nbytes / plan.load.nodes / rate for rate in reversed(WRITES))
    if saving.enabled:
        rates = f"; {low:,.0f} to {high:,.0f} s at {WRITES[1] / 1e9:g} to {WRITES[0] / 1e9:g} GB/s a node"
        beside = ", while training goes on (checkpointing.is_async)" if saving.is_async else ""
        lines.append(f"checkpoint  {nbytes / 1e9:,.3g} GB" + ("" if on_cpu else f"{rates}{beside}"))
    if on_cpu or name == "eval":
        return lines
    settings, step = config[name], plan.times.likely
    steps = settings.max_num_steps if settings.max_num_steps < 10**6 else SHOWN_STEPS
    saves = 0 if not saving.enabled or saving.is_async else steps // saving.save_period
    val_s = _validations(plan, config, steps) if name == "grpo" else 0.0
    hours = [(steps * step * factor + saves * save + val_s * factor) / 3600
             for factor, save in ((1.0, low), (ELSEWHERE[0], low), (ELSEWHERE[1], high))]  # fmt: skip
    parts = f"{steps:,} steps, {saves:,} checkpoints that they wait for" + (
        f", {val_s / 3600:,.2g} h of validations" if val_s else ""
    )
    lines.append(f"the run     {hours[0]:,.1f} h if nothing disturbs it, {hours[1]:,.1f} to {hours[2]:,.1f} h is usual")
    lines.append(f"            ({parts}; {SOURCE})")
    return lines


def _validations(plan: Plan, config: MasterConfig, steps: int) -> float:
    """Return the likely seconds of all validations: the generation of a step, by their samples. 0 where their number is
    not in the recipe."""
    grpo = config.grpo
    if not config.data.validation or not grpo.max_val_samples:
        return 0.0
    count = (steps // grpo.val_period if grpo.val_period else 0) + grpo.val_at_start + grpo.val_at_end
    generation = next((phase.likely for phase in plan.times.phases if phase.name == "generation"), 0.0)
    return count * generation * grpo.max_val_samples * grpo.val_num_generations_per_prompt / plan.load.samples
