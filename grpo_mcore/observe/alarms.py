"""Alarms of a run: signs in its metrics that something spoils it. alarms.yaml has every kind, its threshold, and what
to do first."""

import json
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from grpo_mcore.observe.band import Band, BandTest


@dataclass(frozen=True)
class AlarmKind:
    """A row of alarms.yaml. `by`: the run raises it itself, or the page of `report`; `when`: the sign, in words;
    `first`: what to do first; `above`: its threshold; `in_a_row`: steps in a row with the sign; `grave`: the run may be
    useless."""

    by: Literal["run", "page"]
    when: str
    first: str
    above: float = 0.0
    in_a_row: int = 1
    grave: bool = False


KINDS: dict[str, AlarmKind] = {
    name: AlarmKind(**row)
    for name, row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
MISMATCH = KINDS["engine_mismatch"].above
"""Largest mean of exp|engine's log-prob - policy's| of a step that raises no alarm. Numerics alone stay below 1.01."""

WEBHOOK_S = 10.0
"""Seconds that a webhook gets to answer."""


@dataclass(frozen=True)
class Alarm:
    """A warning about a run. `kind`: its name; `step`: the step that raised it; `text`: the event, with numbers, and
    the remedy."""

    kind: str
    step: int
    text: str


def _engine_mismatch(metrics: Mapping[str, float]) -> str | None:
    current = metrics.get("token_mult_prob_error/age_0", metrics.get("token_mult_prob_error"))
    if metrics.get("token_share/age_0") == 0:  # every token is of older weights: numerics cannot be told from age
        current = None
    if current is None or current <= MISMATCH:  # NaN raises it too
        return None
    return (
        f"engine and policy disagree: under the same weights their probabilities of a token differ by a factor of "
        f"{current:.4g} on average (1 is equal, up to {MISMATCH} is usual). The policy trains on another model's "
        "samples."
    )


def _stale_samples(metrics: Mapping[str, float]) -> str | None:
    mismatch = metrics.get("token_mult_prob_error")
    if mismatch is None or mismatch <= KINDS["stale_samples"].above or _engine_mismatch(metrics):
        return None
    return (
        f"samples of older weights are far from the policy: their probabilities of a token differ by a factor of "
        f"{mismatch:.4g} on average, at an age of {metrics.get('trajectory_age_mean', 0.0):.3g}."
    )


def _tokens_left_out(metrics: Mapping[str, float]) -> str | None:
    mismatch = metrics.get("token_mult_prob_error", 1.0)
    if not 0 < mismatch < 1 - KINDS["tokens_left_out"].above:
        return None
    return (
        f"the mean factor between the probabilities of engine and policy is {mismatch:.4g}, and no factor is below 1: "
        f"about {1 - mismatch:.0%} of the tokens that are counted are not in the loss."
    )


def _refit_mismatch(metrics: Mapping[str, float]) -> str | None:
    after_refit = metrics.get("refit/mult_prob_error")
    if after_refit is None or after_refit <= KINDS["refit_mismatch"].above:
        return None
    return (
        "after a refit an engine does not compute what the policy does: on random prompts their probabilities of a "
        f"token differ by a factor of {after_refit:.4g} on average (policy.refit_parity)."
    )


def _equal_rewards(metrics: Mapping[str, float]) -> str | None:
    if metrics.get("zero_advantage_rate") != 1:
        return None
    if metrics.get("accuracy") == 1:
        return "every sample is solved, so nothing is left to learn: harder prompts, or the end of the run."
    return (
        "all advantages are 0, since the rewards compared are equal: the task is too hard or too easy for the "
        "model, or the environment finds no answers."
    )


def _policy_stands_still(metrics: Mapping[str, float]) -> str | None:
    stands_still = metrics.get("grad_norm") == 0 or ("loss" in metrics and metrics.get("lr") == 0)
    if not stands_still or _equal_rewards(metrics):
        return None
    return (
        f"the policy does not move: gradient norm {metrics.get('grad_norm', 0.0):.3g}, learning rate "
        f"{metrics.get('lr', 0.0):.3g}."
    )


def _answers_cut(metrics: Mapping[str, float]) -> str | None:
    cut = metrics.get("truncation_rate", 0.0) * (metrics.get("generated_length_max") != 1)  # a choice has no end
    return f"{cut:.0%} of the answers do not come to an end." if cut > KINDS["answers_cut"].above else None


def _failed_samples(metrics: Mapping[str, float]) -> str | None:
    failed, count = metrics.get("num_failed_samples", 0.0), metrics.get("num_samples", 0.0)
    if not count or failed <= KINDS["failed_samples"].above * count:
        return None
    return f"{failed:.0f} of {count:.0f} samples have no reward, because their environment failed on them."


SIGNS: dict[str, Callable[[Mapping[str, float]], str | None]] = {
    "engine_mismatch": _engine_mismatch,
    "stale_samples": _stale_samples,
    "tokens_left_out": _tokens_left_out,
    "refit_mismatch": _refit_mismatch,
    "equal_rewards": _equal_rewards,
    "policy_stands_still": _policy_stands_still,
    "answers_cut": _answers_cut,
    "failed_samples": _failed_samples,
}
"""Kind of alarm that a run raises: function that returns its text for a step's metrics, None without a sign."""


class StepAlarms:
    """Looks at the metrics of each step, and raises each kind of alarm once.

    `stop_after`: number of steps in a row with an alarm of one kind after which the run is to stop; None: never.
    `band`: how runs of its recipe usually go.
    """

    def __init__(self, stop_after: int | None = None, band: Band | None = None) -> None:
        self._stop_after = stop_after
        self.band = None if band is None else BandTest(band)
        self._in_a_row: Counter[str] = Counter()
        self.raised: list[Alarm] = []

    def of_step(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Return the alarms that this step raises and no step before it has."""
        new = []
        texts = {kind: look(metrics) for kind, look in SIGNS.items()}
        if self.band is not None:
            texts["left_band"] = self.band.sign(step, metrics)
            if metrics.get("truncation_rate", 0.0) <= self.band.band.largest("truncated"):
                texts["answers_cut"] = None
        for kind, text in texts.items():
            patience = KINDS[kind].in_a_row
            self._in_a_row[kind] = 0 if text is None else self._in_a_row[kind] + 1
            if text is not None and self._in_a_row[kind] >= patience and kind not in {a.kind for a in self.raised}:
                repeated = f" That is so for {patience} steps in a row." if patience > 1 else ""
                new.append(Alarm(kind, step, f"{text}{repeated} First: {KINDS[kind].first}."))
        self.raised += new
        return new

    @property
    def stop_reason(self) -> str | None:
        """Why the run is to stop; None if it is not."""
        if self._stop_after is None:
            return None
        for alarm in self.raised:
            if (steps := self._in_a_row[alarm.kind]) >= max(self._stop_after, KINDS[alarm.kind].in_a_row):
                return f"the alarm {alarm.kind} for {steps} steps (logger.alarms.stop_after)"
        return None


def alarms_of(lines: Iterable[Mapping[str, float | None]], band: Band | None = None) -> list[Alarm]:
    """Return the alarms that the recorded metrics of a run's steps raise, one of each kind. `band`: see StepAlarms."""
    alarms = StepAlarms(band=band)
    for line in lines:
        metrics = {name: value for name, value in line.items() if value is not None}
        alarms.of_step(int(metrics.get("step", 0)), metrics)
    return alarms.raised


def post_alarm(url: str, run: str, alarm: Alarm) -> None:
    """Send an alarm to a webhook as JSON: run, step, kind, and `text`, which Slack and others show. Raises OSError."""
    text = f"{run}, step {alarm.step}: {alarm.text}"
    content = {"text": text, "run": run, "step": alarm.step, "kind": alarm.kind}
    request = urllib.request.Request(
        url, data=json.dumps(content).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=WEBHOOK_S):
        pass
