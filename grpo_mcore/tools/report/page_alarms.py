"""Warn of what may spoil a run: what each step raised while it went on (observe/alarms.py), and what only the course of
all steps shows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from grpo_mcore.observe.alarms import KINDS, alarms_of
from grpo_mcore.observe.band import Band, band_of
from grpo_mcore.tools.report.device_seconds import WAITS, DeviceSeconds
from grpo_mcore.tools.report.run_files import RunFiles

RECENT = 10
"""Number of last steps that are looked at."""
SOLVED = 0.9
"""Mean accuracy of the last steps from which on groups of equal rewards are no alarm."""


@dataclass(frozen=True)
class PageAlarm:
    """`kind`: its row of observe/alarms.yaml; `text`: what happened, in words, with what to do first."""

    kind: str
    text: str

    @property
    def grave(self) -> bool:
        """Whether the run may be useless."""
        return KINDS[self.kind].grave

    @property
    def help(self) -> str:
        """First action of the operator, as in docs/operations.md."""
        return KINDS[self.kind].first


def alarms(run: RunFiles, devices: DeviceSeconds) -> list[PageAlarm]:
    """Return the alarms of a run, the grave ones first."""
    steps, validations = run.metrics["train"], run.metrics["validation"]
    raised = [*_of_steps(steps, band_of(run.recipe)[0]), *_of_metrics(steps), *_of_validation(validations)]
    raised += [*_of_run(run), *_of_devices(devices)]
    return sorted(raised, key=lambda alarm: not alarm.grave)


def values(lines: Sequence[Mapping[str, float | None]], *names: str) -> list[float]:
    """Return the first of the metrics `names` that any line has, without the steps that lack it."""
    for name in names:
        if numbers := [value for line in lines if (value := line.get(name)) is not None]:
            return numbers
    return []


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _of_steps(lines: Sequence[Mapping[str, float | None]], band: Band | None) -> Iterator[PageAlarm]:
    """Yield what the steps of a run raised, each kind once, as the run itself did."""
    for alarm in alarms_of(lines, band):
        text = alarm.text.removesuffix(f" First: {KINDS[alarm.kind].first}.")
        yield PageAlarm(alarm.kind, f"{text[0].upper()}{text[1:]} First in step {alarm.step}.")


def _of_metrics(lines: Sequence[Mapping[str, float | None]]) -> Iterator[PageAlarm]:
    if lines and any(name in line and line[name] is None for line in lines for name in ("loss", "grad_norm")):
        yield PageAlarm("not_finite", "The loss or the gradient was not finite in some step.")
    entropy = values(lines, "entropy", "approx_entropy")
    if len(entropy) >= 2 * RECENT:
        first, last = _mean(entropy[:RECENT]), _mean(entropy[-RECENT:])
        if last < KINDS["entropy_fell"].above * first:
            yield PageAlarm(
                "entropy_fell",
                f"The policy has almost stopped exploring: its entropy fell from {first:.3g} to {last:.3g}.",
            )
    equal, solved = values(lines, "zero_advantage_rate")[-RECENT:], values(lines, "accuracy")[-RECENT:]
    rewards = values(lines, "reward")  # graded ones have no accuracy: those that rose and stay at their highest
    risen = bool(rewards) and _mean(rewards[-RECENT:]) >= max(SOLVED * max(rewards), rewards[0] + 0.1 * abs(rewards[0]))
    is_solved = _mean(solved) >= SOLVED if solved else risen and _mean(rewards[-RECENT:]) > 0
    if equal and _mean(equal) > KINDS["equal_groups"].above and not is_solved:
        yield PageAlarm(
            "equal_groups",
            f"In the last {len(equal)} steps {_mean(equal):.0%} of the samples had advantage 0, because the rewards of "
            "their group are equal: the task is too easy or too hard for the model, or answers are not found.",
        )
    cut = values(lines, "truncation_rate")
    if cut and _mean(cut[-RECENT:]) > max(KINDS["truncation_rises"].above, 1.5 * _mean(cut[:RECENT])):
        yield PageAlarm(
            "truncation_rises",
            f"More and more samples are cut off by the length limit: {_mean(cut[:RECENT]):.0%} in the first steps, "
            f"{_mean(cut[-RECENT:]):.0%} in the last.",
        )
    norms = [norm for norm in values(lines, "grad_norm") if math.isfinite(norm)]
    if len(norms) >= RECENT and max(norms) > KINDS["gradient_spike"].above * max(median(norms), 1e-12):
        yield PageAlarm(
            "gradient_spike",
            f"The gradient had a spike: {max(norms):.3g}, {max(norms) / max(median(norms), 1e-12):.0f} times the "
            "median.",
        )


def _of_validation(lines: Sequence[Mapping[str, float | None]]) -> Iterator[PageAlarm]:
    losses = values(lines, "val_loss")
    if len(losses) >= 3 and losses[-1] > KINDS["val_loss_rises"].above * min(losses):
        yield PageAlarm(
            "val_loss_rises",
            f"The validation loss rises again: its lowest was {min(losses):.3f}, the last is {losses[-1]:.3f}.",
        )
    accuracy = values(lines, "accuracy", "reward")
    room = KINDS["validation_fell"].above * max(1.0, abs(max(accuracy, default=0.0)))
    if len(accuracy) >= 3 and accuracy[-1] < max(accuracy) - room:
        yield PageAlarm(
            "validation_fell",
            f"The last validation ({accuracy[-1]:.3f}) is well below the best one ({max(accuracy):.3f}).",
        )


def _of_run(run: RunFiles) -> Iterator[PageAlarm]:
    restarts = [event for event in run.marks if event["what"] == "restart"]
    if restarts:
        last = restarts[-1]
        yield PageAlarm(
            "restarts",
            f"{len(restarts)} times an engine or an environment was restarted; the last: {last['process']}, "
            f"{last['why']}",
        )
    if run.setting("logger.samples", str) != "none":
        if missing := len(set(run.steps) - set(run.samples.get("train", {}))):
            yield PageAlarm(
                "samples_missing",
                f"The samples of {missing} of {len(run.steps)} steps are not there: dropped by the writer, or deleted "
                "to make room.",
            )


def _of_devices(devices: DeviceSeconds) -> Iterator[PageAlarm]:
    for device, seconds in devices.by_device.items():
        waited = {wait: seconds.get(wait, 0.0) for wait in WAITS}
        idle = sum(waited.values()) / max(devices.wall, 1e-9)
        if idle > KINDS["device_idle"].above:
            most = max(waited, key=waited.__getitem__)
            yield PageAlarm(
                "device_idle",
                f"Device {device} did nothing for {idle:.0%} of the time; most of it: {most}.",
            )
