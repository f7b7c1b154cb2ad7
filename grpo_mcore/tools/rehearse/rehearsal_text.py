"""A rehearsal as text, and a sweep of them as a table with the best first."""

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_mcore.layout import LayoutError
from grpo_mcore.recipe import MasterConfig, RecipeError
from grpo_mcore.tools.plan.run_hours import SOURCE
from grpo_mcore.tools.plan.workload import PlanError
from grpo_mcore.tools.rehearse.recording import Recording
from grpo_mcore.tools.rehearse.rehearse import Rehearsal, RehearsalError, rehearse
from grpo_mcore.tools.sweep import split_values


def rehearsal_text(run: Rehearsal) -> str:
    """Return what a rehearsal predicts, as lines."""
    mean, median, late = run.step
    phases = ", ".join(f"{name} {seconds:.3g}" for name, seconds in run.phases.items() if seconds >= 0.005 * mean)
    rows = {
        "step": f"{mean:.4g} s (median {median:.4g}, 95 % {late:.4g}), of {run.steps} steps, without the first",
        "phases": f"{phases} s",
        "throughput": f"{run.tokens_per_second:,.0f} tokens/s, {run.tokens_per_device:,.0f} tokens/s for each of "
        f"{run.devices:,} devices, which compute {run.busy:.0%} of the time",
        "age": f"{run.age:.2f} weight versions",
        "whole run": f"{_hours(run.gpu_hours)} GPU-hours to the recipe's last step, without checkpoints and "
        f"validations; {SOURCE}",
        "driver": f"{run.driver_cpu:.3g} processor seconds a step on this machine (with the models {run.cpu:.3g}), "
        f"{run.memory / 1e9:.2f} GB with the models",
        "run folder": str(run.folder),
    }
    return "\n".join(f"{name:<12}{text}" for name, text in rows.items())


def sweep_settings(words: Sequence[str]) -> list[dict[str, str]]:
    """Return each combination of the values of `key=a,b,c`. Raises ValueError for words of another form."""
    if unclear := [word for word in words if "=" not in word]:
        raise ValueError(f"--sweep {unclear[0]}: expected KEY=A,B,C")
    keys = [word.partition("=")[0] for word in words]
    values = [split_values(word.partition("=")[2]) for word in words]
    return [dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*values)]


def rehearse_all(
    settings: Sequence[Mapping[str, str]],
    load: Callable[[Mapping[str, str]], MasterConfig],
    folder: Path,
    steps: int,
    config_json: str | None = None,
    recording: Recording | None = None,
) -> Iterator[tuple[Mapping[str, str], Rehearsal | str]]:
    """Rehearse each setting in a folder of its own. Yield it with its rehearsal, or why there is none."""
    for number, setting in enumerate(settings):
        subfolder = folder / f"setting-{number:02d}"
        shutil.rmtree(subfolder, ignore_errors=True)
        try:
            yield setting, rehearse(load(setting), subfolder, steps, config_json=config_json, recording=recording)
        except (RecipeError, LayoutError, PlanError, RehearsalError) as error:  # the others are rehearsed all the same
            yield setting, str(error).partition("\n")[0]


def sweep_text(rehearsed: Sequence[tuple[Mapping[str, str], Rehearsal | str]]) -> str:
    """Return a table of a sweep, the most tokens per device and second first, and why it is the best."""
    done = [(setting, run) for setting, run in rehearsed if isinstance(run, Rehearsal)]
    done.sort(key=lambda pair: -pair[1].tokens_per_device)
    rows = [("setting", "s/step", "95 %", "tokens/s/device", "busy", "age", "GPU-hours")]
    for setting, run in done:
        numbers = f"{run.step[0]:.4g}", f"{run.step[2]:.4g}", f"{run.tokens_per_device:,.0f}"
        rows.append((_named(setting), *numbers, f"{run.busy:.0%}", f"{run.age:.2f}", _hours(run.gpu_hours)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"{_named(setting)}: {reason}" for setting, reason in rehearsed if isinstance(reason, str)]
    if len(done) > 1:
        (best, first), (_, second) = done[:2]
        ours, theirs = _seconds_of_tokens(first), _seconds_of_tokens(second)
        gains = {name: theirs.get(name, 0.0) - seconds for name, seconds in ours.items()}
        most = max(gains, key=lambda name: gains[name])
        if gains[most] > 0:
            advantage = f"against the next one, {most} takes {gains[most]:.3g} s less for 1,000 tokens of a device"
            lines.append(f"{_named(best)} is best: {advantage}")
    return "\n".join(lines)


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _seconds_of_tokens(run: Rehearsal) -> dict[str, float]:
    """Return the seconds of each phase for 1,000 tokens of a device: steps of other settings may have more samples."""
    thousands = run.tokens_per_device * run.phases["total"] / 1000
    return {name: seconds / max(thousands, 1e-9) for name, seconds in run.phases.items() if name != "total"}


def plain(run: Rehearsal) -> dict[str, Any]:
    """Return a rehearsal as plain values, for --json."""
    values = asdict(run) | {"folder": str(run.folder), "tokens_per_device": run.tokens_per_device}
    return {name: value for name, value in values.items() if name != "summary"}


def _named(setting: Mapping[str, str]) -> str:
    return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in setting.items())
