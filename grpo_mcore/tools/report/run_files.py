"""Reads what a run has written, also while it goes on and after it was killed."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from grpo_mcore.observe.exit_codes import LOST, RunEnd
from grpo_mcore.observe.ledger.ledger import LEDGER_FILE
from grpo_mcore.observe.logger import HYPERPARAMS_FILE, METRICS_FILE
from grpo_mcore.observe.run_folder import (
    LAST_STEP,
    EventFile,
    is_number,
    read_metrics,
    read_object,
    read_token_texts,
    reason_of,
    say_left_out,
)
from grpo_mcore.observe.samples import SAMPLES_FOLDER, Kind, sample_steps
from grpo_mcore.recipe import MasterConfig

T = TypeVar("T")

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

    def setting(self, key: str, kind: type[T]) -> T | None:
        """Return the recipe's value of a key such as "grpo.max_num_steps". None where it has none, or one of another
        type, which is said."""
        value: Any = self.recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, kind) and (kind is not int or is_number(value, LAST_STEP)):
            return value
        if value is not None:
            say_left_out(f"{self.folder / HYPERPARAMS_FILE}: {key}", f"it is {str(value)[:40]!r}")
        return None

    @property
    def end(self) -> RunEnd | None:
        """How the run ended; None while it goes on, and where it was killed."""
        return None if self.summary is None else RunEnd.of(self.summary)

    @property
    def may_go_on(self) -> bool:
        """Whether the run is not over, or was lost and may be restarted by itself (cluster.max_restarts)."""
        return self.end is None or (self.end.exit_code == LOST and bool(self.setting("cluster.max_restarts", int)))

    @property
    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics["train"]]

    @property
    def algorithm(self) -> str:
        """Return the algorithm of the run: "grpo", "sft", "dpo" or "rm"."""
        begun = [event for event in self.marks if event["what"] == "begin"]
        return begun[-1].get("algorithm", "grpo") if begun else "grpo"

    @property
    def rewarded(self) -> bool:
        """Whether its samples have rewards; examples of the data have none."""
        return self.algorithm == "grpo"

    @property
    def max_steps(self) -> int | None:
        """Steps that the recipe asks for."""
        return self.setting(f"{self.algorithm}.max_num_steps", int)

    @property
    def step_size(self) -> str:
        """What a step trains on, in words."""
        if self.rewarded:
            prompts = self.setting("grpo.num_prompts_per_step", int)
            return f"{prompts} prompts × {self.setting('grpo.num_generations_per_prompt', int)} generations"
        of_pairs = {"dpo": True, "rm": self.setting("rm.reward_model_type", str) == "bradley_terry"}
        items = "pairs" if of_pairs.get(self.algorithm) else "examples"
        return f"{self.setting('policy.train_global_batch_size', int)} {items}"

    @property
    def last_written(self) -> float:
        """Unix time of the last line that the run wrote, or of its start."""
        times = [line.get("unix_time") for lines in self.metrics.values() for line in lines]
        return max(filter(None, [*times, self.last_event]), default=_modified(self.folder))


def find_run(folder: Path) -> Path:
    """Return the log folder (exp_NNN) that `folder` is or holds; of several the one that was written to last. Raises
    NoRun."""
    runs = {path.parent for pattern in PLACES for path in folder.glob(f"{pattern}{METRICS_FILE}")}
    runs |= {path.parent for pattern in PLACES for path in folder.glob(f"{pattern}{HYPERPARAMS_FILE}")}  # before step 1
    if not runs:
        raise NoRun(f"{folder} holds no run: there is no {METRICS_FILE} in it, nor in logs/exp_NNN below it")
    return max(runs, key=lambda run: max(map(_modified, run.glob("*.json*")), default=0.0))


def _modified(path: Path) -> float:
    """Return when a file was written last; 0 for a link to nothing, or a file that is being removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


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
    run = read_run(path)
    folder = run.folder
    if not run.recipe:
        raise NoRun(f"{folder} has no recipe: {HYPERPARAMS_FILE} is missing or cannot be read")
    try:
        recipe = MasterConfig.model_validate(run.recipe)
    except ValueError as error:
        raise NoRun(f"{folder / HYPERPARAMS_FILE} holds no recipe: {reason_of(error)}") from error
    logs, saving = Path(recipe.logger.log_dir), recipe.checkpointing
    above = folder.resolve().parent
    if any(above.parent.glob("step_*")):
        saving.checkpoint_dir = os.path.relpath(above.parent)
    elif not logs.is_absolute() and above.parts[-len(logs.parts) :] == logs.parts:  # else the folder was moved
        saving.checkpoint_dir = os.path.relpath(above.parents[len(logs.parts) - 1] / saving.checkpoint_dir)
    return folder, recipe


def recorded_grpo_run(path: Path) -> tuple[Path, MasterConfig]:
    """Do the same for what only runs of GRPO have. Raises NoRun for a run of another algorithm."""
    run = read_run(path)
    if not run.rewarded:
        raise NoRun(f"{run.folder} is a run of {run.algorithm}: only GRPO has a ledger, and steps to replay")
    return recorded_run(run.folder)


def find_ledger(path: Path) -> Path:
    """Return the ledger that `path` is, or that of the run whose folder of checkpoints or log folder it is or holds.
    Raises NoRun."""
    ledger = path / LEDGER_FILE if path.is_dir() else path
    if ledger.exists():
        return ledger
    if not holds_run(path):
        raise NoRun(f"there is no {ledger}; give a run's log folder, or its folder of checkpoints")
    folder, recipe = recorded_grpo_run(path)
    saving = recipe.checkpointing
    return (Path(saving.checkpoint_dir) if saving.enabled else folder) / LEDGER_FILE


def read_runs(folders: Iterable[Path]) -> list[RunFiles]:
    """Read these runs. One that cannot be read is left out and named: it hides no other."""
    runs = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except OSError as error:  # NoRun too: it was removed meanwhile
            say_left_out(str(folder), reason_of(error))
    return runs


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
    metrics = {prefix: read_metrics(path, prefix) for prefix in prefixes}
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
        read_object(run / HYPERPARAMS_FILE) or {},
        read_object(run / "summary.json"),
        samples,
        read_token_texts(run / SAMPLES_FOLDER),
        marks,
        last_event,
    )


def duration(seconds: float) -> str:
    """Return seconds for a person, such as "45 s", "12 min" or "3.4 h"."""
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
