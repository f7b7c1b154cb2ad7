"""How runs of a recipe usually go, from runs with many seeds, and a test that says early when a run goes otherwise.

The test looks at a few statistics (`STATISTICS`) after steps that double every other time: at their means since the
look before, and since the first step. In each such window the new run's mean x of a statistic is compared with those of
the band's n runs, of mean m and standard deviation s: t = (x - m) / (s sqrt(1 + 1/n)) has Student's distribution with n
- 1 degrees of freedom if the n + 1 numbers are independent draws of one normal distribution (they are of separate runs,
after a transform such as the logarithm). Its density for a run that is shifted by N(0, SHIFT^2) spreads, over that
without a shift, is an e-value: its mean is 1 for a run like those of the band, whatever m and s are (Perez-Ortiz,
Lardy, de Heide, Grünwald, "E-statistics, group invariance and anytime-valid testing", 2024). A mean of e-values is one,
however they depend on each other (Vovk, Wang, "E-values: calibration, combination and applications", 2021). So steps of
a run may be as correlated as they like. The evidence so far, a sum that only grows, exceeds 1 / ALARM with a
probability of at most ALARM over the whole run (Markov), at whichever step one looks.

Only the normal distribution between seeds is assumed. Where one of the band's own runs is further from the others than
USUAL, as it would be with heavy tails, the statistic's spread is widened until it is not. In a window in which most of
them have the same value, such as reward 0 in the first steps, the spread is the largest of the statistic's windows.
"""

import json
import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_mcore.observe.run_folder import damage_raised_as
from grpo_mcore.recipe import recipe_folders, without_secrets

Floats = NDArray[np.float64]
Line = Mapping[str, float | None]

FORMAT = 1
MIN_SEEDS = 20
"""Fewest runs of a band."""
LARGEST_BYTES = 200_000
"""Size of a band's file. Where there are too many steps, the means of so many in a row are kept that it fits."""
ALARM = 0.01
"""Probability of a false alarm over a whole run."""
SHIFT = 8.0
"""Spreads by which a run that is not like the others is expected to differ from them."""
USUAL = 4.0
"""Spreads by which a run of the band may differ from its others."""
FURTHEST = 1e6
"""Largest t that is told apart; a number that is not finite counts as this."""
SIZES = (
    "policy.model_name", "policy.train_global_batch_size", "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt", "grpo.adv_estimator.name", "ppo.enabled", "grpo.max_num_steps",
    "sft.max_num_steps", "dpo.max_num_steps", "rm.max_num_steps",
    "on_policy_distillation.teacher_model_by_agent_name", "on_policy_distillation.divergence.kl_type",
)  # fmt: skip
"""Beginnings of keys in which a run must not differ from its band: another value makes it another recipe."""
_LEFT_OUT = ("logger", "checkpointing", "cluster", "launch")


class BandError(ValueError):
    """A file is no band that can be used, or a band cannot be made; the message says why."""


@dataclass(frozen=True)
class Statistic:
    """A number of a step. `names`: its metrics, of which the first one there is counts; `add`: all are added. `scale`:
    the form in which it is about normal: "log" of it, "excess" for the log of its distance from 1, "gap" for the log of
    how far below 0 it is, "share" for arcsin sqrt, "plain" for itself. `least`: smallest spread in this form, so that
    rounding is no difference. `tested`: the test looks at it; else it is shown only. `positive`: 0 is no value of it,
    as of the gradient where no sample has an advantage."""

    names: tuple[str, ...]
    scale: str = "plain"
    least: float = 0.01
    add: bool = False
    tested: bool = True
    positive: bool = False

    def of(self, line: Line) -> float:
        """Return its value in a line of metrics; NaN if it has none, also where a loss was not finite."""
        values = [value for name in self.names if (value := line.get(name)) is not None]
        there = len(values) == len(self.names) if self.add else bool(values)
        value = (sum(values) if self.add else values[0]) if there else math.nan
        return math.nan if self.positive and value == 0 else value

    def scaled(self, values: Floats) -> Floats:
        """Return values in the form in which they are compared."""
        if self.scale == "log":
            return np.log(np.maximum(values, 1e-6))
        if self.scale == "gap":
            return np.log(np.maximum(-values, 0.01))
        if self.scale == "excess":
            return np.log(np.maximum(np.abs(values - 1), 1e-3))
        return np.arcsin(np.sqrt(np.clip(values, 0, 1))) if self.scale == "share" else values


TEACHER_GAP = "on_policy_distillation/teacher_student_logprob_gap_mean"
STATISTICS = {
    "reward": Statistic(("reward",)),
    "entropy": Statistic(("entropy", "approx_entropy"), "log"),
    "generated_length": Statistic(("generated_length",), "log"),
    "prompt_length": Statistic(("prompt_length",), "log"),
    "distinct_prompts": Statistic(("distinct_prompts",), "share"),
    "grad_norm": Statistic(("grad_norm",), "log", 0.05, positive=True),
    "clipped": Statistic(("clip_fraction_low", "clip_fraction_high"), "share", add=True),
    "kl": Statistic(("kl_penalty", "kl_in_reward")),
    "mismatch": Statistic(("token_mult_prob_error",), "excess", 0.3),
    "equal_groups": Statistic(("zero_advantage_rate",), "share"),
    "critic_loss": Statistic(("critic/loss",), "log", 0.05),
    "explained_var": Statistic(("critic/explained_var",), "excess"),
    "critic_values": Statistic(("critic/values_mean",)),
    "teacher_gap": Statistic((TEACHER_GAP,), "gap"),
    "loss_and_gap": Statistic(("loss", TEACHER_GAP), add=True),  # the reverse KL is minus the gap's expectation
    "loss": Statistic(("val_loss", "loss"), "log", tested=False),
    "tokens": Statistic(("tokens",), tested=False),
    "truncated": Statistic(("truncation_rate",), tested=False),
    "accuracy": Statistic(("accuracy",), tested=False),
}
"""Statistics that a band keeps of each step; the test looks at those that are `tested`. Chosen before any run."""


@dataclass(frozen=True)
class Band:
    """Runs of a recipe that differ in their seeds alone. `recipe`: its name; `settings`: its values by key; `code` and
    `machine`: what they ran on. `steps`: the last step of each mean; `curves`: [seeds, steps] by statistic, NaN where
    there is none; `validation_steps` and `validation`: the same of validations."""

    recipe: str
    settings: Mapping[str, Any]
    code: str
    machine: str
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    curves: Mapping[str, Floats]
    validation_steps: tuple[int, ...]
    validation: Mapping[str, Floats]

    @property
    def digest(self) -> str:
        return digest(self.settings)

    @property
    def name(self) -> str:
        return f"band of {len(self.seeds)} runs"

    def another_recipe(self, recipe: Mapping[str, Any]) -> str | None:
        """Return in which size a run's recipe differs from the band's, None if in none."""
        for key in (key for key in self.settings if key.startswith(SIZES)):
            own, other = (_short_path(values.get(key)) for values in (self.settings, settings_of(recipe)))
            if own != other:
                return f"it is of another recipe ({self.recipe}): {key} is {other} here and {own} there"
        return None

    def largest(self, name: str) -> float:
        """Return the largest value of a statistic in any step of its runs, 0 if they have none."""
        return float(np.nanmax(self.curves[name])) if name in self.curves else 0.0

    def plain_curves(self) -> dict[str, list[list[Any]]]:
        """Return [steps, medians, lowest, highest] by the full name of each metric, for a page."""
        parts = ((self.steps, self.curves, "train"), (self.validation_steps, self.validation, "validation"))
        return {
            f"{prefix}/{name}": [list(steps), *([float(f"{x:.6g}") for x in edge] for edge in edges)]
            for steps, curves, prefix in parts
            for key, values in curves.items()
            if steps and not np.isnan(values).all(0).any()
            for edges in [[np.nanquantile(values, q, axis=0) for q in (0.5, 0, 1)]]
            for name in STATISTICS[key].names
            if not STATISTICS[key].add
        }


def settings_of(recipe: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of a resolved recipe by full key, but seeds and what says only where and how it runs."""
    settings: dict[str, Any] = {}
    for name, value in recipe.items():
        key = f"{path}{name}"
        if key in _LEFT_OUT or name == "seed":
            continue
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            value = {str(position): entry for position, entry in enumerate(value)}
        settings |= settings_of(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return settings


def digest(settings: Mapping[str, Any]) -> str:
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _short_path(value: Any) -> Any:
    """Return the last two parts of a path or of a model's name: folders above them are those of a machine."""
    return "/".join(value.split("/")[-2:]) if isinstance(value, str) else value


def make_band(
    recipe: str, code: str, runs: Mapping[int, tuple[Mapping[str, Any], Sequence[Line], Sequence[Line]]]
) -> Band:
    """Return the band of finished runs: by seed, (resolved recipe, metrics of its steps, of its validations). Raises
    BandError for too few of them, for runs of several recipes, and for unequal lengths."""
    if len(runs) < MIN_SEEDS:
        raise BandError(f"a band needs {MIN_SEEDS} runs or more, and {len(runs)} are finished: give a larger --seeds")
    recipes = [settings_of(without_secrets(run[0])) for run in runs.values()]
    for seed, settings in zip(runs, recipes, strict=True):
        if other := sorted(key for key in settings.keys() & recipes[0].keys() if settings[key] != recipes[0][key]):
            raise BandError(f"seed {seed} ran another recipe than the first: {other[0]} is {settings[other[0]]}")
    of_first = next(iter(runs.values()))[0].get("cluster", {})
    machine = f"{platform.machine()}, {of_first.get('platform')}, {of_first.get('gpus_per_node')} ranks a node"
    every = 1
    while True:
        steps, curves = _curves([train for _, train, _ in runs.values()], every)
        band = Band(
            recipe, recipes[0], code, machine, tuple(runs), steps, curves,
            *_curves([validations for *_, validations in runs.values()], 1),
        )  # fmt: skip
        if not steps:
            raise BandError("the runs have no step in common")
        if (size := len(band_text(band))) <= LARGEST_BYTES:
            return band
        every = max(every + 1, every * size // LARGEST_BYTES)


def _curves(runs: Sequence[Sequence[Line]], every: int) -> tuple[tuple[int, ...], dict[str, Floats]]:
    """Return the steps that all runs have, of each `every` in a row the last, and [seeds, steps] by statistic, means
    over them."""
    by_step = [{int(line["step"] or 0): line for line in lines} for lines in runs]
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    steps = steps[: len(steps) // every * every]
    curves = {}
    for name, statistic in STATISTICS.items():
        values = np.array([[statistic.of(lines[step]) for step in steps] for lines in by_step])
        if every > 1 and steps:
            values = window_means(values, [(first, first + every) for first in range(0, len(steps), every)])
        if steps and np.isfinite(values).any():
            curves[name] = values
    return tuple(steps[every - 1 :: every]), curves


def band_text(band: Band) -> str:
    """Return a band as the text of its file."""
    plain: dict[str, Any] = {"format": FORMAT, "digest": band.digest} | asdict(band)
    for name in ("curves", "validation"):
        plain[name] = {
            key: [[float(f"{x:.4g}") if math.isfinite(x) else None for x in row] for row in values.tolist()]
            for key, values in plain[name].items()
        }
    return json.dumps(plain, separators=(",", ":")) + "\n"


def find_band(name: str) -> Path:
    """Return the file of a band that is given by its path, or by its path in a folder of recipes."""
    places = [Path(name), *(folder / name for folder in recipe_folders())]
    return next((place for place in places if place.is_file()), places[0])


def read_band(name: str) -> Band:
    """Return the band of a file (`find_band`). Raises BandError with the reason for one that cannot be used."""
    path = find_band(name)
    with damage_raised_as(BandError, path):
        plain = json.loads(path.read_bytes()) if path.is_file() else None
    if not isinstance(plain, dict):
        raise BandError(f"{path} is no band: `grpo-mcore sweep RECIPE --seeds {MIN_SEEDS} --band FILE` makes one")
    if plain.get("format") != FORMAT:
        raise BandError(f"{path} is of format {plain.get('format')}, and this version reads {FORMAT}: make it again")
    with damage_raised_as(BandError, path):
        curves = [
            {name: np.array(rows, dtype=np.float64) for name, rows in plain[part].items() if name in STATISTICS}
            for part in ("curves", "validation")
        ]
        band = Band(
            plain["recipe"], dict(plain["settings"]), plain["code"], plain["machine"], tuple(plain["seeds"]),
            tuple(plain["steps"]), curves[0], tuple(plain["validation_steps"]), curves[1],
        )  # fmt: skip
        for steps, values in ((band.steps, curves[0]), (band.validation_steps, curves[1])):
            if wrong := [name for name, rows in values.items() if rows.shape != (len(band.seeds), len(steps))]:
                raise ValueError(f"{wrong[0]} has not a number for each seed and step")
        if not band.steps or any(not isinstance(b, int) or b <= a for a, b in pairwise((0, *band.steps))):
            raise ValueError("its steps do not rise from 1")
        if band.digest != plain["digest"]:
            raise ValueError("its settings are not those of its digest")
    if len(band.seeds) < MIN_SEEDS:
        raise BandError(f"{path} is of {len(band.seeds)} seeds, too few to tell: make it of {MIN_SEEDS} or more")
    return band


def band_of(recipe: Mapping[str, Any]) -> tuple[Band | None, str | None]:
    """Return the band that a run's recipe names (logger.alarms.band), and why it cannot be used."""
    logger = recipe.get("logger") or {}
    if (name := (logger.get("alarms") or {}).get("band")) is None:
        return None, None
    try:
        band = read_band(name)
    except BandError as error:
        return None, str(error)
    reason = band.another_recipe(recipe)
    return (None, f"{name} is not compared with this run: {reason}") if reason else (band, None)


def e_value(t: Floats, freedom: int) -> Floats:
    """Return the e-value of Student's t with `freedom` degrees of freedom (see the top of this file)."""
    wide = 1 + SHIFT**2
    square = np.clip(np.nan_to_num(t, nan=FURTHEST), -FURTHEST, FURTHEST) ** 2
    return np.asarray(((1 + square / freedom) / (1 + square / (freedom * wide))) ** ((freedom + 1) / 2) / wide**0.5)


def windows(count: int) -> list[tuple[int, int]]:
    """Return (steps before it, its end) of each window of `count` steps: after 1, 2, 3, 4, 6, 8, 12, 16, ... steps and
    the last one the test looks at the steps since the look before, and at all so far."""
    ends = [0, 1, 2, 3]
    while ends[-1] < count:
        ends.append(ends[-2] * 2)
    pairs = [(first, min(end, count)) for first, end in zip(ends, ends[1:], strict=False) if first < count]
    return sorted({*pairs, *((0, end) for _, end in pairs)}, key=lambda pair: pair[::-1])


class BandTest:
    """The test of one run against a band."""

    def __init__(self, band: Band) -> None:
        self.band = band
        by_loss = "reward" not in band.curves or "teacher_gap" in band.curves
        tested = [name for name, it in STATISTICS.items() if it.tested or (name == "loss" and by_loss)]
        self._names = [name for name in tested if name in band.curves]
        pairs = windows(len(band.steps))
        steps = (0, *band.steps)
        self._steps = [(steps[first] + 1, steps[end]) for first, end in pairs]
        self._weight = 1 / max(1, len(self._names) * len(pairs))
        self._means = {name: window_means(band.curves[name], pairs) for name in self._names}
        self._reference = {name: reference(STATISTICS[name], rows) for name, rows in self._means.items()}
        self._seen: dict[int, dict[str, float]] = {}
        self.evidence = 0.0
        """Sum of the e-values, each by its weight: 1 / ALARM is an alarm."""
        self.text: str | None = None

    def sign(self, step: int, metrics: Line) -> str | None:
        """Take the metrics of a step. Return how the run has left the band, None as long as it has not."""
        if step > self._steps[-1][1]:
            return self.text
        self._seen[step] = {name: STATISTICS[name].of(metrics) for name in self._names}
        found = list[tuple[float, str, str]]()
        for index, (first, end) in enumerate(self._steps):
            if end == step and all(number in self._seen for number in range(first, end)):
                found += self._look(index)
        self.evidence += sum(gained for gained, *_ in found)
        if self.text is None and self.evidence >= 1 / ALARM:
            most = max(gained for gained, *_ in found)
            by_name = {name: text for gained, name, text in sorted(found) if gained >= min(most / 1000, 1 / ALARM)}
            self.text = (
                f"this run is not like the {len(self.band.seeds)} of its band ({self.band.recipe}): "
                f"{'; '.join(list(by_name.values())[:-4:-1])}. Of runs like theirs at most 1 in {1 / ALARM:.0f} is "
                "ever called so."
            )
        return self.text

    def _look(self, index: int) -> Iterator[tuple[float, str, str]]:
        """Yield for each statistic of a window: evidence, name, and how the run's mean differs."""
        first, end = self._steps[index]
        for name in self._names:
            middle, spread = (part[index] for part in self._reference[name])
            values = np.array([self._seen[step][name] for step in range(first, end + 1)])
            if math.isfinite(spread) and not np.isnan(values).all():
                value, rows = float(np.nanmean(values)), self._means[name][:, index]
                t = (STATISTICS[name].scaled(np.array(value)) - middle) / spread
                where = f"step {end}" if first == end else f"steps {first} to {end}"
                text = f"{name} {value:.3g} in {where}, theirs {rows.min():.3g} to {rows.max():.3g}"
                yield self._weight * float(e_value(t, len(self.band.seeds) - 1)), name, text


def window_means(values: Floats, pairs: Sequence[tuple[int, int]]) -> Floats:
    """Return the means [seeds, windows] of curves [seeds, steps]; steps without a value do not count."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):  # NaN where no step has one
        parts = [(np.where(there, values, 0.0)[:, a:b].sum(1) / there[:, a:b].sum(1)) for a, b in pairs]
    return np.stack(parts, 1)


def reference(statistic: Statistic, means: Floats) -> tuple[Floats, Floats]:
    """Return middle and spread of the t of a new run, [windows] each, NaN where a run of the band has no value."""
    rows = statistic.scaled(means)
    n = len(rows)
    middle, deviation = rows.mean(0), rows.std(0, ddof=1)
    reach = np.nanmax(np.abs(rows)) if np.isfinite(rows).any() else 0.0
    least = statistic.least * (1.0 if statistic.scale != "plain" else 0.1 * max(float(np.ptp(rows)), 1e-3 * reach))
    tied = np.array([2 * max(Counter(column).values()) > n for column in rows.T.tolist()])  # most runs have one value
    rare = np.nanmax(deviation) if np.isfinite(deviation).any() else 0.0
    deviation = np.maximum(deviation, np.where(tied, max(rare, least, 1e-9), max(least, 1e-9)))
    inner = (rows - middle) / (deviation * math.sqrt((n - 1) / n))
    inner *= ~tied
    outer = np.abs(inner) * np.sqrt((n - 2) / np.maximum(n - 1 - inner**2, 1e-6))  # t of each run against the others
    furthest = float(np.nanmax(outer)) if np.isfinite(outer).any() else 0.0
    return middle, deviation * math.sqrt(1 + 1 / n) * max(1.0, furthest / USUAL)
