"""Runs of a recipe with each combination of some values and seeds, each an ordinary run in a folder of its own."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.base.files import make_folder
from grpo_mcore.observe.band import MIN_SEEDS, Band, make_band
from grpo_mcore.observe.run_folder import read_object
from grpo_mcore.recipe import Algorithm, Recipe, RecipeError, algorithm_of, load_recipe
from grpo_mcore.recipe.loading.merge import override
from grpo_mcore.tools.launch.spec import code_revision
from grpo_mcore.tools.report.run_files import NoRun, RunFiles, find_run, read_run

SWEEP_FILE = "sweep.json"
RUNNING_S = 600
"""A run that wrote something within this many seconds counts as running."""


class SweepError(ValueError):
    """The words do not name a sweep, or its folder holds another one."""


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep. `setting`: the swept values, without the seed, such as "preset=gspo,ratio_clip_max=0.3".
    `folder` holds its logs and checkpoints; `words` are the overrides of its command line."""

    setting: str
    seed: int | None
    folder: Path
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    def files(self) -> RunFiles | None:
        """Return what the run has written, or None before it has."""
        try:
            return read_run(find_run(self.folder / "logs"))
        except NoRun:
            return None


def split_values(text: str) -> list[str]:
    """Return the values of "a,b,c". Commas within brackets, braces or quotes do not separate."""
    parts, depth, quote, start = [], 0, "", 0
    for index, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


PLACES = {"logger.log_dir": "logs", "checkpointing.checkpoint_dir": "checkpoints"}
"""Keys that a sweep sets, and the folder of each in that of a run."""


def sweep_runs(
    recipe: str,
    words: Sequence[str],
    seeds: int,
    folder: Path,
    checked_algorithm: Callable[[Recipe], Algorithm] = lambda recipe: algorithm_of(recipe.config),
    below: Sequence[str] = (),
) -> list[SweepRun]:
    """Return the runs of a sweep: all combinations of the values of `words`, each with `seeds` seeds, which begin with
    the recipe's. All runs have the words with one value; `preset=a,b` names files of recipes/presets/.
    `checked_algorithm` returns what the command trains, and raises if it would refuse the recipe; `below`: overrides
    that the command sets below the words.

    Raises SweepError if nothing varies, RecipeError, before anything starts, if one of the recipes is wrong.
    """
    fixed, varied = [], []
    for word in words:
        key, sign, value = word.partition("=")
        if key.lstrip("+") in PLACES:
            raise SweepError(f"{key}: each run has its own, in the sweep's folder; choose that with --folder")
        values = split_values(value) if sign and not key.startswith(("+", "~")) else [value]
        if len(values) > 1:
            varied.append([(key, choice) for choice in values])
        else:
            fixed.append(_override(key, value) if sign else word)
    if not varied and seeds == 1:
        raise SweepError("nothing varies: give a key several values, key=a,b,c, or --seeds a number above 1")
    last_parts = [values[0][0].rpartition(".")[2] for values in varied]
    shorten = len(set(last_parts)) == len(last_parts)
    runs = []
    for chosen in itertools.product(*varied):
        setting = ",".join(f"{key.rpartition('.')[2] if shorten else key}={value}" for key, value in chosen)
        overrides = [*fixed, *(_override(key, value) for key, value in chosen)]
        loaded = load_recipe(recipe, [*below, *overrides])
        config, algorithm = loaded.config, checked_algorithm(loaded)
        first, mirror = getattr(config, algorithm).seed if seeds > 1 else 0, config.checkpointing.mirror
        section: str = algorithm
        if config.on_policy_distillation.enabled:
            try:
                load_recipe(recipe, [*below, *overrides, f"{algorithm}.seed={first + 1}"])
            except RecipeError:  # it contradicts the recipe's distillation.seed
                section = "distillation"
        for seed in range(first, first + seeds) if seeds > 1 else [None]:
            name = ",".join(filter(None, [setting, "" if seed is None else f"seed={seed}"]))
            run_folder = folder / re.sub(r"[^\w.,=+-]+", "_", name)
            run_words = [*overrides, *([] if seed is None else [f"{section}.seed={seed}"])]
            run_words += [override(key, str(run_folder / inside)) for key, inside in PLACES.items()]
            if mirror is not None:
                run_words.append(f"checkpointing.mirror={mirror.rstrip('/')}/{run_folder.name}")
            load_recipe(recipe, [*below, *run_words])
            runs.append(SweepRun(setting or "all", seed, run_folder, tuple(run_words)))
    if len({run.folder for run in runs}) < len(runs):
        raise SweepError(f"two runs would share a folder: {', '.join(run.name for run in runs)}")
    return runs


def claim_folder(folder: Path, recipe: str, runs: Sequence[SweepRun]) -> None:
    """Note in the folder which sweep it holds. Raises SweepError if it holds another one."""
    file = folder / SWEEP_FILE
    sweep: dict[str, Any] = {"recipe": recipe, "runs": {run.name: list(run.words) for run in runs}}
    if file.exists():
        held = read_object(file)
        if held is None or not isinstance(held.get("runs"), dict):
            raise SweepError(f"{file} is damaged: remove it if the runs in {folder} are those of this sweep")
        if held != sweep:
            other = sorted(held["runs"].keys() ^ sweep["runs"].keys())
            difference = f"other runs ({', '.join(other[:3])})" if other else "the same runs with other settings"
            raise SweepError(
                f"{folder} holds another sweep, of {held.get('recipe')} with {difference}; choose another --folder"
            )
        return
    make_folder(folder, "--folder")
    file.write_text(json.dumps(sweep, indent=1), encoding="utf-8")


def state(run: SweepRun, now: float) -> str:
    """Return "finished", "running", "interrupted", "failed" or "not begun". `now`: unix time."""
    files = run.files()
    if files is None:
        return "not begun"
    if (end := files.end) is not None:
        return "finished" if end.is_complete else "failed" if end.kind == "failed" else "interrupted"
    return "running" if now - files.last_written < RUNNING_S else "interrupted"


def by_setting(runs: Sequence[SweepRun]) -> dict[str, list[RunFiles]]:
    settings: dict[str, list[RunFiles]] = {}
    for run in runs:
        if (files := run.files()) is not None:
            settings.setdefault(run.setting, []).append(files)
    return settings


def check_band(runs: Sequence[SweepRun]) -> None:
    """Raise SweepError where the runs of a sweep, once they are finished, would not make a band."""
    if len({run.setting for run in runs}) > 1 or len(runs) < MIN_SEEDS:
        raise SweepError(f"--band is of one setting with --seeds {MIN_SEEDS} or more: leave out the other values")


def claim_band(file: Path) -> None:
    """Make the file of a band, so that one that cannot be written is said before the runs: SweepError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise SweepError(f"--band: {file} cannot be written: {error.strerror}") from error


def sweep_band(recipe: str, runs: Sequence[SweepRun]) -> Band:
    """Return the band of the finished runs. Raises BandError where too few are."""
    written = {run.seed: files for run in runs if (files := run.files()) is not None}
    finished = {seed: it for seed, it in written.items() if seed is not None and it.end and it.end.is_complete}
    metrics = {seed: (it.recipe, it.metrics["train"], it.metrics["validation"]) for seed, it in finished.items()}
    return make_band(recipe, code_revision(), metrics)


def _override(key: str, value: str) -> str:
    return f"defaults=presets/{value}" if key == "preset" else f"{key}={value}"
