"""Several runs side by side: where each stands, in which settings they differ, and curves with bands over seeds."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.markup import escape
from rich.table import Table

from grpo_mcore.base.text import escaped as printable
from grpo_mcore.observe.run_folder import is_number
from grpo_mcore.recipe import without_secrets
from grpo_mcore.recipe.changes import follows
from grpo_mcore.recipe.errors import leaves
from grpo_mcore.tools.report.run_files import RunFiles, duration

PLACES = ("logger.log_dir", "logger.run_name", "checkpointing.checkpoint_dir", "checkpointing.mirror")
"""Keys in which any two runs differ."""
LAST = 0.1
"""Share of the training steps, the last ones, over which a metric of training is averaged."""

Curve = list[list[Any]]


@dataclass(frozen=True)
class Standing:
    """Where a run stands. `score`: its best validation, or the mean over its last training steps, of `metric`; None
    before there is one. `score_step`: the step of that validation, or the last step. `count`: number of validations
    that the best was chosen from, or of steps that the mean is of. `higher`: whether more of it is better. `settings`:
    the values, as text, of the keys in which the runs differ."""

    name: str
    state: str
    step: int
    max_steps: int | None
    metric: str
    score: float | None
    score_step: int | None
    count: int
    higher: bool
    hours: float
    settings: dict[str, str]


def standings(runs: Sequence[RunFiles]) -> list[Standing]:
    """Return a line for each run, best first; runs without a score come last."""
    settings = differing_settings([run.recipe for run in runs])
    lines = []
    for run, name, values in zip(runs, names(runs), settings, strict=True):
        step = run.steps[-1] if run.steps else 0
        lines.append(Standing(name, state_of(run), step, run.max_steps, *_score(run), _hours(run), values))
    return sorted(lines, key=lambda line: (line.score is None, (-1 if line.higher else 1) * (line.score or 0.0)))


def names(runs: Sequence[RunFiles]) -> list[str]:
    """Return a name for each run: of its folder what the folders do not all begin or end with."""
    parts = [list(run.folder.resolve().parts) for run in runs]
    if len(parts) == 1:
        return [runs[0].name]
    for end in (0, -1):
        while min(map(len, parts)) > 1 and len({folder[end] for folder in parts}) == 1:
            for folder in parts:
                folder.pop(end)
    return ["/".join(folder) for folder in parts]


WIDE = 1000
"""Columns for a table in a file or a pipe, so that each run is one line there."""
MOST_KEYS, MOST_LETTERS = 8, 40
"""Settings of a table for a terminal, and letters of each."""


def table(lines: Sequence[Standing]) -> Table:
    """Return standings as a table for a terminal. Of many settings it has those with most values among the runs."""
    every = list(lines[0].settings) if lines else []
    kept = sorted(every, key=lambda key: -len({line.settings[key] for line in lines}))[:MOST_KEYS]
    keys = [key for key in every if key in kept]
    more = len(every) - len(keys)
    caption = f"{more} further settings differ: `runs --json` and `report` have them" if more else None
    shown = Table(box=None, header_style="bold", pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("run", "state", "step", "score", "of", "at step", "hours", *short_names(keys)):
        is_number = heading in ("step", "score", "at step", "hours")
        shown.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for line in lines:
        step = str(line.step) if line.max_steps is None else f"{line.step}/{line.max_steps}"
        score = "" if line.score is None else f"{line.score:.4g}"
        settings = (_shortened(line.settings[key]) for key in keys)
        kind = "best" if line.metric.startswith("validation/") else "mean"
        at_step = "" if line.score_step is None else f"{line.score_step}, {kind} of {line.count}"
        cells = [line.name, line.state, step, score, line.metric, at_step, f"{line.hours:.2f}", *settings]
        shown.add_row(*(escape(printable(cell)) for cell in cells))
    return shown


def short_names(keys: Sequence[str]) -> list[str]:
    """Return each key's last part, with as many parts before it as tell it from the others."""
    short = []
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
        alone = (end for end in ends if sum(other == end or other.endswith(f".{end}") for other in keys) == 1)
        short.append(next(alone, key))
    return short


def _shortened(text: str) -> str:
    """Return a text, or its end where it is long: paths differ there."""
    return text if len(text) <= MOST_LETTERS else "..." + text[3 - MOST_LETTERS :]


def state_of(run: RunFiles) -> str:
    """Return whether a run is over, and how it ended, or how long it has been silent."""
    if run.end is not None:
        return str(run.end)
    return f"not over, silent for {duration(time.time() - run.last_written)}"


def differing_settings(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return for each recipe its values, as text, of the keys whose values are not the same in all. Places of files,
    which always differ, are left out, secrets, and keys that follow from others."""
    flat = [leaves(without_secrets(recipe)) for recipe in recipes]
    keys = dict.fromkeys(key for values in flat for key in values)
    differing = [key for key in keys if key not in PLACES and len({_text(values.get(key)) for values in flat}) > 1]
    differing = [key for key in differing if not all(follows(key, values) for values in flat)]
    return [{key: _text(values.get(key)) for key in differing} for values in flat]


def runs_by(runs: Sequence[RunFiles], by: str) -> dict[str, list[RunFiles]]:
    """Return the runs by their values of the recipe's key `by`, such as "loss_fn.ratio_clip_max" or, with commas, of
    several keys. Raises ValueError with a key that no recipe has."""
    keys = by.split(",")
    flat = [leaves(run.recipe) for run in runs]
    for key in keys:
        if not any(key in values for values in flat):
            raise ValueError(f"--group-by: no recipe of these runs has the key {key}")
    grouped: dict[str, list[RunFiles]] = defaultdict(list)
    for run, values in zip(runs, flat, strict=True):
        grouped[", ".join(f"{key.rpartition('.')[2]} {_text(values.get(key))}" for key in keys)].append(run)
    return dict(grouped)


def band(curves: Sequence[Mapping[str, Curve]]) -> dict[str, Curve]:
    """Return, for each metric of some runs' curves ([steps, values]), [steps, means, lowest, highest] over the runs
    that have the step."""
    names = dict.fromkeys(name for run in curves for name in run)
    bands: dict[str, Curve] = {}
    for name in names:
        by_step: dict[int, list[float]] = defaultdict(list)
        for run in curves:
            for step, value in zip(*run.get(name, ([], [])), strict=True):
                by_step[step].append(value)
        steps = sorted(by_step)
        bands[name] = [
            steps, [fmean(by_step[step]) for step in steps], [min(by_step[step]) for step in steps],
            [max(by_step[step]) for step in steps],
        ]  # fmt: skip
    return bands


def _score(run: RunFiles) -> tuple[str, float | None, int | None, int, bool]:
    """Return the metric, value, step, count and direction by which a run is ranked: the metric of the recipe's
    checkpoints where the run has it, else the reward or the loss of validation, else those of training. A validation
    before the first step is of the untrained model, and ranks nothing."""
    prefix, _, name = (run.setting("checkpointing.metric_name", str) or "val:accuracy").partition(":")
    higher = run.setting("checkpointing.higher_is_better", bool) is not False
    for metric, rises in ((name, higher), ("reward", True), ("val_loss", False)) if prefix == "val" else ():
        trained = (line for line in run.metrics["validation"] if line["step"] > 0)
        if validated := [(line[metric], line["step"]) for line in trained if line.get(metric) is not None]:
            score, step = max(validated, key=lambda pair: (pair[0] if rises else -pair[0], -pair[1]))
            return f"validation/{metric}", score, step, len(validated), rises
    for metric, rises in ((name, higher), ("reward", True), ("loss", False)):
        if steps := [(line[metric], line["step"]) for line in run.metrics["train"] if line.get(metric) is not None]:
            last = steps[-max(1, round(LAST * len(steps))) :]
            return f"train/{metric}", fmean(value for value, _ in last), last[-1][1], len(last), rises
    return "", None, None, 0, True


def ranking(settings: Mapping[str, Sequence[RunFiles]]) -> list[str]:
    """Return the settings of a sweep as lines, best first: the mean score of its runs, the lowest and the highest. Two
    whose difference is within the spread of their seeds share a place."""
    scored = {name: [line for line in standings(runs) if line.score is not None] for name, runs in settings.items()}
    scores = {name: [line.score or 0.0 for line in lines] for name, lines in scored.items() if lines}
    best_first = sorted(scores, key=lambda name: fmean(scores[name]) * (-1 if scored[name][0].higher else 1))
    rows, rank, leader = list[str](), 0, list[float]()
    for number, name in enumerate(best_first, start=1):
        low, mean, high = min(scores[name]), fmean(scores[name]), max(scores[name])
        if not leader or not min(leader) <= mean <= max(leader):
            rank, leader = number, scores[name]
        spread = f" ({low:.4g} to {high:.4g}, {len(scores[name])} runs)" if len(scores[name]) > 1 else ""
        rows.append(f"{rank}. {name}: {mean:.4g}{spread} of {scored[name][0].metric}")
    return rows


def _hours(run: RunFiles) -> float:
    if run.summary is not None and is_number(run.summary.get("seconds")):
        return float(run.summary["seconds"]) / 3600
    times = [line["unix_time"] for lines in run.metrics.values() for line in lines if line.get("unix_time")]
    return (max(times) - min(times)) / 3600 if times else 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
