"""Warn of what may spoil a run: what each step raised while it went on (observe/alarms.py), and what only the course of
all steps shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from grpo_mcore.observe.alarms import StepAlarms
from grpo_mcore.tools.report.device_seconds import WAITS, DeviceSeconds
from grpo_mcore.tools.report.run_files import RunFiles

RECENT = 10
"""Number of last steps that are looked at."""


@dataclass(frozen=True)
class PageAlarm:
    """`text`: what happened, in words; `help`: the key to change or the page to read; `grave`: the run may be
    useless."""

    text: str
    help: str
    grave: bool = False


def alarms(run: RunFiles, devices: DeviceSeconds) -> list[PageAlarm]:
    """Return the alarms of a run, the grave ones first."""
    steps, validations = run.metrics["train"], run.metrics["validation"]
    raised = [*_of_steps(steps), *_of_metrics(steps), *_of_validation(validations), *_of_run(run)]
    raised += _of_devices(devices, overlaps=run.rewarded)
    return sorted(raised, key=lambda alarm: not alarm.grave)


def values(lines: Sequence[Mapping[str, float | None]], *names: str) -> list[float]:
    """Return the first of the metrics `names` that any line has, without the steps that lack it."""
    for name in names:
        if numbers := [value for line in lines if (value := line.get(name)) is not None]:
            return numbers
    return []


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _of_steps(lines: Sequence[Mapping[str, float | None]]) -> Iterator[PageAlarm]:
    """Yield what the steps of a run raised, each kind once, as the run itself did."""
    alarms = StepAlarms()
    for line in lines:
        step = int(line["step"] or 0)
        alarms.of_step(step, {name: value for name, value in line.items() if value is not None})
    for alarm in alarms.raised:
        yield PageAlarm(f"{alarm.text[0].upper()}{alarm.text[1:]}", f"first in step {alarm.step}", grave=True)


def _of_metrics(lines: Sequence[Mapping[str, float | None]]) -> Iterator[PageAlarm]:
    if lines and any(name in line and line[name] is None for line in lines for name in ("loss", "grad_norm")):
        yield PageAlarm("The loss or the gradient was not finite in some step.", "docs/faults.md", grave=True)
    entropy = values(lines, "entropy", "approx_entropy")
    if len(entropy) >= 2 * RECENT:
        first, last = _mean(entropy[:RECENT]), _mean(entropy[-RECENT:])
        if last < 0.1 * first:
            yield PageAlarm(
                f"The policy has almost stopped exploring: its entropy fell from {first:.3g} to {last:.3g}.",
                "loss_fn.entropy_coeff, a greater loss_fn.ratio_clip_max, a lower learning rate: docs/objective.md",
            )
    equal = values(lines, "zero_advantage_rate")[-RECENT:]
    if equal and _mean(equal) > 0.5:
        yield PageAlarm(
            f"In the last {len(equal)} steps {_mean(equal):.0%} of the samples had advantage 0, because the rewards of "
            "their group are equal: the task is too easy or too hard for the model, or answers are not found.",
            "grpo.use_dynamic_sampling; look at the samples below",
        )
    cut = values(lines, "truncation_rate")
    if cut and _mean(cut[-RECENT:]) > max(0.1, 1.5 * _mean(cut[:RECENT])):
        yield PageAlarm(
            f"More and more samples are cut off by the length limit: {_mean(cut[:RECENT]):.0%} in the first steps, "
            f"{_mean(cut[-RECENT:]):.0%} in the last.",
            "policy.generation.max_new_tokens, grpo.overlong_filtering, grpo.reward_shaping",
        )
    norms = [norm for norm in values(lines, "grad_norm") if math.isfinite(norm)]
    if len(norms) >= RECENT and max(norms) > 20 * max(median(norms), 1e-12):
        yield PageAlarm(
            f"The gradient had a spike: {max(norms):.3g}, {max(norms) / max(median(norms), 1e-12):.0f} times the "
            "median.",
            "policy.max_grad_norm",
        )


def _of_validation(lines: Sequence[Mapping[str, float | None]]) -> Iterator[PageAlarm]:
    losses = values(lines, "val_loss")
    if len(losses) >= 3 and losses[-1] > 1.1 * min(losses):
        yield PageAlarm(
            f"The validation loss rises again: its lowest was {min(losses):.3f}, the last is {losses[-1]:.3f}.",
            "fewer steps or epochs, a lower learning rate; checkpointing.metric_name keeps the best checkpoint",
        )
    accuracy = values(lines, "accuracy", "reward")
    if len(accuracy) >= 3 and accuracy[-1] < max(accuracy) - 0.1 * max(1.0, abs(max(accuracy))):
        yield PageAlarm(
            f"The last validation ({accuracy[-1]:.3f}) is well below the best one ({max(accuracy):.3f}).",
            "checkpointing.metric_name keeps the best checkpoint; a lower learning rate or a KL penalty "
            "(loss_fn.reference_policy_kl_penalty) slows the drift",
        )


def _of_run(run: RunFiles) -> Iterator[PageAlarm]:
    restarts = [event for event in run.marks if event["what"] == "restart"]
    if restarts:
        last = restarts[-1]
        yield PageAlarm(
            f"{len(restarts)} times an engine or an environment was restarted; the last: {last['process']}, "
            f"{last['why']}",
            "docs/faults.md",
        )
    if run.setting("logger.samples", str) != "none":
        if missing := len(set(run.steps) - set(run.samples.get("train", {}))):
            yield PageAlarm(
                f"The samples of {missing} of {len(run.steps)} steps are not there: dropped by the writer, or deleted "
                "to make room.",
                "logger.max_samples_gb",
            )


def _of_devices(devices: DeviceSeconds, *, overlaps: bool = True) -> Iterator[PageAlarm]:
    for device, seconds in devices.by_device.items():
        waited = {wait: seconds.get(wait, 0.0) for wait in WAITS}
        idle = sum(waited.values()) / max(devices.wall, 1e-9)
        if idle > 0.3:
            most = max(waited, key=waited.__getitem__)
            yield PageAlarm(
                f"Device {device} did nothing for {idle:.0%} of the time; most of it: {most}.",
                "docs/async.md lets generation and training overlap; `grpo-mcore plan` predicts the balance"
                if overlaps
                else "a larger policy.train_global_batch_size; checkpointing.is_async; fewer validations",
            )
