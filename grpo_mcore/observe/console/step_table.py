"""The table of steps: one line a step, numbers that fit their columns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_mcore.observe.timeline import TOTAL

HEADER_EVERY = 20

PHASES = (("generate", "gen"), ("reward", "score"), ("train", "train"), ("refit", "refit"))
"""Phases of a step with a column of their own; the others, such as log-probs, are under "other". "score" is the time in
which nothing was generated and only rewards were awaited. The metrics have all of them, as timing/PHASE."""

COLUMNS = (
    ("reward", "reward", 6),
    ("accuracy", "acc", 5),
    ("kl", "KL", 6),
    ("token_mult_prob_error", "prob err", 8),
    ("length", "length", 6),
    ("entropy", "entropy", 7),
    ("grad_norm", "grad", 6),
)
STEP_WIDTH = 7
PHASE_WIDTH = 5
RATE_WIDTH = 6


@dataclass(frozen=True)
class StepRow:
    """One step as a person sees it; None is shown as "-". `length`: mean tokens generated a sample.
    `computed_tokens`: share of the samples' tokens that is computed; below 1 where they share prefixes. `seconds`:
    Timeline's seconds by phase, with "total". `notes`: lines under it."""

    step: int
    max_steps: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    kl: float | None = None
    token_mult_prob_error: float | None = None
    length: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    computed_tokens: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()


def header_lines(computed_tokens: float | None = None) -> list[str]:
    """Two lines: what the last columns are seconds of, and the names of the columns. Above the first columns it says
    where only a share of the tokens is computed."""
    names = [f"{'step':>{STEP_WIDTH}}", *(f"{name:>{width}}" for _, name, width in COLUMNS)]
    phases = [f"{name:>{PHASE_WIDTH}}" for name in (*(short for _, short in PHASES), "other", "total")]
    left, middle = " ".join(names), " ".join(phases)
    line = f"{left} | {middle} | {'tok/s':>{RATE_WIDTH}}"
    shared = computed_tokens is not None and computed_tokens < 1
    shared_text = f"{computed_tokens:.0%} of the tokens computed: samples share prefixes" if shared else ""
    return [f"{shared_text:{len(left)}} | {' seconds ':-^{len(middle)}} |", line, "-" * len(line)]


def row_line(row: StepRow) -> str:
    """The line of one step, as wide as the header."""
    step = f"{row.step}/{row.max_steps}" if row.max_steps else f"{row.step}"
    values = [f"{step:>{STEP_WIDTH}}", *(fit(getattr(row, key), width) for key, _, width in COLUMNS)]
    total = row.seconds.get(TOTAL)
    seconds = [row.seconds.get(phase) for phase, _ in PHASES]
    other = None if total is None else total - sum(spent or 0.0 for spent in seconds)
    phases = [fit(spent, PHASE_WIDTH) for spent in (*seconds, other, total)]
    return f"{' '.join(values)} | {' '.join(phases)} | {fit(row.tokens_per_second, RATE_WIDTH)}"


def fit(value: float | None, width: int) -> str:
    """`value` in `width` characters: 4 significant digits and 3 decimals at most, an exponent where that says too
    little or is too long."""
    if value is None:
        return f"{'-':>{width}}"
    if not math.isfinite(value):
        return f"{value:>{width}}"
    size = abs(value)
    decimals = max(0, 3 - math.floor(math.log10(size))) if size >= 1 else 3
    while len(text := f"{value:.{decimals}f}") > width and decimals:
        decimals -= 1
    if len(text) > width or 0 < size < 5e-4:
        text = _short(f"{value:.1e}")
        text = text if len(text) <= width else _short(f"{value:.0e}")
    return f"{text:>{width}}"


def _short(number: str) -> str:
    """1.2e-04 as 1.2e-4, 1.0e+09 as 1.0e9."""
    mantissa, _, exponent = number.partition("e")
    return f"{mantissa}e{int(exponent)}"
