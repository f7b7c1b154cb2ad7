"""A run in a terminal, redrawn from its files: a running one, a finished one or one that was killed.

It only reads, so it may be started and ended at any time, from any shell that sees the files.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from grpo_mcore.base.text import escaped
from grpo_mcore.observe.run_folder import DAMAGE, reason_of
from grpo_mcore.observe.samples import generated_mask, read_samples
from grpo_mcore.observe.spans import DRIVER
from grpo_mcore.tools.report.device_seconds import ORDER, DeviceSeconds, device_seconds
from grpo_mcore.tools.report.page_alarms import PageAlarm, alarms, values
from grpo_mcore.tools.report.run_files import RunFiles, duration, read_run

BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("reward", ("reward",)),
    ("loss", ("loss",)),
    ("margin", ("rewards_margin_mean",)),
    ("length", ("generated_length",)),
    ("entropy", ("entropy", "approx_entropy")),
    ("prob err", ("token_mult_prob_error",)),
    ("grad norm", ("grad_norm",)),
    ("tokens/s", ("tokens_per_second",)),
)
COLOURS = {
    "generate": "blue", "train": "dark_orange", "log-probs": "yellow", "refit": "purple", "validation": "cyan",
    "checkpoint": "magenta", "prepare": "tan",
}  # fmt: skip
RECENT = 5
"""Steps whose mean duration gives the time left, and whose devices' seconds are shown."""


def watch(folder: Path, console: Console, interval_s: float, *, once: bool = False) -> None:
    """Show the run that `folder` is or holds until the user leaves, or until it is over; with `once` only once. Raises
    NoRun."""
    if once:
        console.print(screen(read_run(folder), _width(console), console.height - 1, time.time()))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            run = read_run(folder)
            live.update(screen(run, _width(console), console.height, time.time()), refresh=True)
            if not run.may_go_on:
                break
            time.sleep(interval_s)
    console.print(screen(run, _width(console), console.height - 1, time.time()))


def _width(console: Console) -> int:
    """Return the columns of a terminal; some say that they have none."""
    return max(console.width, 20)


def screen(run: RunFiles, width: int, height: int, now: float) -> Group:
    """Return what is shown in a terminal of this size."""
    devices = device_seconds(run.events)
    lines = [*_head(run, width, now), Text(), *_curves(run, width), Text(), *_devices(run, devices, width)]
    worries = alarms(run, devices)
    room = height - len(lines) - 2
    lines += [Text(), *_alarms(worries, width, min(2 + len(worries), max(2, room // 2)))]
    lines += [Text(), *_samples(run, width, height - len(lines) - 1)]
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines[:height])


def _head(run: RunFiles, width: int, now: float) -> list[Text]:
    done, most = (run.steps[-1] if run.steps else 0), run.max_steps or 0
    silent = now - run.last_written
    state = f"over: {escaped(str(run.end))}" if run.end else f"last sign of life {duration(silent)} ago"
    title = Text.assemble((state, "green" if run.end or silent < 120 else "bold red"), "  ", (f"{run.folder}", "bold"))
    title.truncate(width, overflow="ellipsis")
    if not run.recipe and run.summary is None:  # it is written when all has started
        return [title, Text("policy, engines and environments are starting")]
    durations = values(run.metrics["train"][-RECENT:], "timing/total")
    left = f", {duration((most - done) * sum(durations) / len(durations))} left" if durations and done < most else ""
    lines = [title, _bar(f"step {done} of {most}{left}", done, most, width)]
    if run.summary is None and run.rewarded:
        prompts, scored, phase = run.setting("grpo.num_prompts_per_step", int) or 0, *_current(run, done + 1)
        lines.append(
            _bar(
                f"step {done + 1}: {scored} of {prompts} prompts scored; {phase}", min(scored, prompts), prompts, width
            )
        )
    return lines


def _current(run: RunFiles, step: int) -> tuple[int, str]:
    """Return how many prompts of a step are scored, and what the driver did last."""
    events = [event for event in run.events if event.get("step") == step and "seconds" in event]
    phases = [event["what"] for event in events if event["process"] == DRIVER]
    validated = max((index for index, event in enumerate(events) if event["what"] == "validation"), default=-1)
    scored = sum(event["what"] == "reward" and event["process"] != DRIVER for event in events[validated + 1 :])
    return scored, f"done last: {phases[-1] if phases else 'the step before'}"


def _bar(label: str, done: int, total: int, width: int) -> Text:
    label = label[: max(20, width - 13)]
    room = max(10, width - len(label) - 3)
    filled = min(room, round(room * done / total)) if total else 0
    return Text.assemble(("━" * filled, "green"), ("━" * (room - filled), "grey37"), "  ", label)


def _curves(run: RunFiles, width: int) -> list[Text]:
    """Return a line for each curve: name, first and last value, and a sparkline of the whole run."""
    rows = [(name, values(run.metrics["train"], *metrics)) for name, metrics in CURVES]
    rows.insert(1, ("val", values(run.metrics["validation"], "accuracy", "reward", "val_loss")))
    lines = []
    for name, course in rows:
        if course:
            numbers = f"{course[0]:>9.4g} → {course[-1]:<9.4g}"
            line = Text.assemble((f"{name:<10}", "bold"), numbers, " ")
            lines.append(line.append(sparkline(course, width - len(line) - 1), style="cyan"))
    return lines or [Text("no step is trained yet", style="grey50")]


def sparkline(numbers: Sequence[float], width: int) -> str:
    """Return a course as at most `width` blocks, each the mean of its part."""
    count = max(1, min(width, len(numbers)))
    bounds = [index * len(numbers) // count for index in range(count + 1)]
    means = [sum(numbers[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, span = min(means), max(means) - min(means)
    span = span if span > 1e-5 * max(map(abs, means)) else 0.0  # a course that only rounds differently is flat
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1)) if span else 0] for mean in means)


def _devices(run: RunFiles, devices: DeviceSeconds, width: int) -> list[Text]:
    """Return the shares of the devices' seconds in the last steps as a bar and in words."""
    sums: dict[str, float] = {}
    trained = set(run.steps)
    finished = [step for step in devices.by_step if step in trained]
    for step in finished[-RECENT:]:
        for activity, seconds in devices.by_step[step].items():
            sums[activity] = sums.get(activity, 0.0) + seconds
    total = sum(sums.values())
    if not total:
        return [Text("no events yet", style="grey50")]
    bar, words, drawn = Text(), Text(), 0.0
    for activity in (activity for activity in ORDER if activity in sums):
        before, drawn = round(drawn / total * width), drawn + sums[activity]
        bar.append("█" * (round(drawn / total * width) - before), style=COLOURS.get(activity, "grey50"))
        words.append(f"{activity} {sums[activity] / total:.0%}  ", style=COLOURS.get(activity, "grey50"))
    words.truncate(width, overflow="ellipsis")
    restarts = sum(event["what"] == "restart" for event in run.marks)
    names = ", ".join(list(devices.by_device)[:4]) + (" ..." if len(devices.by_device) > 4 else "")
    health = Text(f"devices: {names}; restarts of workers: {restarts}", style="bold red" if restarts else "grey50")
    health.truncate(width, overflow="ellipsis")
    return [bar, words, health]


def _alarms(worries: Sequence[PageAlarm], width: int, room: int) -> list[Text]:
    if not worries:
        return [Text("no alarms", style="green")]
    lines: list[Text] = []
    console = Console(width=width)
    for alarm in worries:
        text = Text(f"! {escaped(alarm.text)}", style="bold red" if alarm.grave else "yellow")
        lines += text.wrap(console, width)
    return lines[:room]


def _samples(run: RunFiles, width: int, room: int) -> list[Text]:
    """Return the newest samples of training, one a line: the reward (or the mean log-prob of an example's trained
    tokens), and the end of the text."""
    steps = run.samples.get("train", {})
    if not steps or room < 2:
        return []
    step = max(steps)
    of_examples = "their scores" if run.algorithm == "rm" else "the mean log-prob of the tokens trained on"
    note = "" if run.rewarded else f", with {of_examples}"
    lines = [Text(f"samples of step {step}{note}", style="bold")]
    columns = ["uid", "generation", "reward", "turns", *([] if run.rewarded else ["policy_logprobs"])]
    try:
        return lines + [_sample_line(run, sample, width) for sample in read_samples(steps[step], columns)[: room - 1]]
    except DAMAGE as error:
        return [*lines, Text(escaped(f"{steps[step]}: {reason_of(error)}"), style="yellow")]


def _sample_line(run: RunFiles, sample: Mapping[str, Any], width: int) -> Text:
    text = "".join(turn["text"] for turn in sample["turns"] or ()).replace("\n", "⏎")
    text = escaped(text)
    if run.rewarded:
        value = "failed" if sample["reward"] is None else f"{sample['reward']:.3g}"
        colour = "green" if sample["reward"] else "red"
    else:
        value, colour = f"{_mean_logprob(sample):.3g}", "cyan"
    head = escaped(f"{sample['uid']}#{sample['generation']}")[-24:]
    line = Text.assemble((f"{head:<24} ", "grey50"), (f"{value:>6}  ", colour))
    while text and cell_len(text) > width - len(line):  # the end of a sample tells more than its start
        text = text[cell_len(text) - (width - len(line)) :]
    return line.append(text)


def _mean_logprob(example: Mapping[str, Any]) -> float:
    """Return the mean log-prob of an example's trained tokens; NaN where it has none."""
    if not (logprobs := example["policy_logprobs"]):
        return math.nan
    trained = generated_mask(example["turns"] or (), len(logprobs))
    chosen = [logprob for logprob, counts in zip(logprobs, trained, strict=True) if counts]
    return sum(chosen) / len(chosen) if chosen else math.nan
