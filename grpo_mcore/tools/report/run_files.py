"""Reads what a run has written, also while it goes on and after it was killed."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mcore.observe import read_metrics
from grpo_mcore.observe.logger import HYPERPARAMS_FILE, METRICS_FILE
from grpo_mcore.observe.samples import SAMPLES_FOLDER, Kind, read_token_texts, sample_steps
from grpo_mcore.observe.spans import EventFile
from grpo_mcore.recipe import MasterConfig

log = logging.getLogger(__name__)

PLACES = ("", "exp_*/", "logs/exp_*/", "*/exp_*/", "*/logs/exp_*/")
"""Where the log folder of a run may be, below the folder that a user names."""


class NoRun(FileNotFoundError):
    """There is no run in a folder; the message says what was looked for."""


@dataclass(frozen=True)
class RunFiles:
    """The files of a run. `metrics`: lines by prefix ("train", "validation", "machine"); `samples`: files by kind and
    step; `summary`: None until the run is over. `events`: read again by each iteration; `marks`: the starts,
    restarts and tails among them; `last_event`: unix time at which the last one ended, 0 without any."""

    folder: Path
    metrics: dict[str, list[dict[str, Any]]]
    events: Iterable[dict[str, Any]]
    recipe: dict[str, Any]
    summary: dict[str, Any] | None
    samples: dict[Kind, dict[int, Path]] = field(default_factory=dict)
    token_texts: dict[int, str] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    last_event: float = 0.0

    @property
    def name(self) -> str:
        """Name of the run: the folder that holds its logs, and its log folder."""
        folder = self.folder.resolve()
        return f"{folder.parent.parent.name}/{folder.name}"

    @property
    def steps(self) -> list[int]:
        """Steps that are trained."""
        return [line["step"] for line in self.metrics["train"]]

    @property
    def algorithm(self) -> str:
        """Return the algorithm of the run: "grpo", "sft" or "dpo"."""
        begun = [event for event in self.marks if event["what"] == "begin"]
        return begun[-1].get("algorithm", "grpo") if begun else "grpo"

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe's section of the algorithm."""
        return self.recipe.get(self.algorithm) or {}

    @property
    def rewarded(self) -> bool:
        """Whether its samples have rewards; examples of the data have none."""
        return self.algorithm == "grpo"

    @property
    def max_steps(self) -> int | None:
        """Steps that the recipe asks for."""
        return self.settings.get("max_num_steps")

    @property
    def step_size(self) -> str:
        """What a step trains on, in words."""
        if self.rewarded:
            grpo = self.settings
            return f"{grpo.get('num_prompts_per_step')} prompts × {grpo.get('num_generations_per_prompt')} generations"
        items = "pairs" if self.algorithm == "dpo" else "examples"
        return f"{self.recipe.get('policy', {}).get('train_global_batch_size')} {items}"

    @property
    def last_written(self) -> float:
        """Unix time of the last line that the run wrote, or of its start."""
        times = [line["unix_time"] for lines in self.metrics.values() for line in lines]
        return max([*times, *filter(None, [self.last_event])], default=self.folder.stat().st_mtime)


def find_run(folder: Path) -> Path:
    """Return the log folder (exp_NNN) that `folder` is or holds; of several the one that was written to last. Raises
    NoRun."""
    runs = {path.parent for pattern in PLACES for path in folder.glob(f"{pattern}{METRICS_FILE}")}
    runs |= {path.parent for pattern in PLACES for path in folder.glob(f"{pattern}{HYPERPARAMS_FILE}")}  # before step 1
    if not runs:
        raise NoRun(f"{folder} holds no run: there is no {METRICS_FILE} in it, nor in logs/exp_NNN below it")
    return max(runs, key=lambda run: max(path.stat().st_mtime for path in run.glob("*.json*")))


def holds_run(folder: Path) -> bool:
    """Return whether `find_run` finds one."""
    try:
        return bool(find_run(folder))
    except NoRun:
        return False


def recorded_run(path: Path) -> tuple[Path, MasterConfig]:
    """Return the log folder of the run that `path` is or holds, and the run's recipe. Its checkpoint_dir is the folder
    that `grpo-mcore fetch` made, or lies where the run was started rather than in the working directory, where another
    run may have its own. Raises NoRun."""
    folder = find_run(path)
    recipe = MasterConfig.model_validate(json.loads((folder / HYPERPARAMS_FILE).read_text(encoding="utf-8")))
    logs, saving = Path(recipe.logger.log_dir), recipe.checkpointing
    above = folder.resolve().parent
    if any(above.parent.glob("step_*")):
        saving.checkpoint_dir = os.path.relpath(above.parent)
    elif not logs.is_absolute() and above.parts[-len(logs.parts) :] == logs.parts:  # else the folder was moved
        saving.checkpoint_dir = os.path.relpath(above.parents[len(logs.parts) - 1] / saving.checkpoint_dir)
    return folder, recipe


def find_runs(folder: Path) -> list[Path]:
    """Return the log folders of all runs anywhere below `folder`, by name. Raises NoRun."""
    runs = sorted({path.parent for path in folder.rglob(HYPERPARAMS_FILE)})
    if not runs:
        raise NoRun(f"{folder} holds no run: there is no {HYPERPARAMS_FILE} below it")
    return runs


def read_run(folder: Path) -> RunFiles:
    """Read the run that `folder` is or holds. Samples are not read, only found. Raises NoRun."""
    run = find_run(folder)
    path = run / METRICS_FILE
    prefixes = ("train", "validation", "machine")
    metrics = {prefix: read_metrics(path, prefix) if path.exists() else [] for prefix in prefixes}
    events, marks, last_event = EventFile(run), list[dict[str, Any]](), 0.0
    for event in events:
        if "seconds" in event:
            last_event = max(last_event, event["start"] + event["seconds"])
        else:
            marks.append(event)
            last_event = max(last_event, event.get("time", 0.0))
    last = metrics["train"][-1]["step"] if metrics["train"] else math.inf  # later samples: a run went back since
    samples: dict[Kind, dict[int, Path]] = {
        kind: {step: path for step, path in sample_steps(run, kind).items() if step <= last}
        for kind in ("train", "validation")
    }
    return RunFiles(
        run,
        metrics,
        events,
        _json(run / HYPERPARAMS_FILE) or {},
        _json(run / "summary.json"),
        samples,
        read_token_texts(run / SAMPLES_FOLDER),
        marks,
        last_event,
    )


def _json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None where there is none."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        log.warning("%s is left out, it is damaged: %s", path, error)
        return None
    return value if isinstance(value, dict) else None


def duration(seconds: float) -> str:
    """Return seconds for a person, such as "45 s", "12 min" or "3.4 h"."""
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
