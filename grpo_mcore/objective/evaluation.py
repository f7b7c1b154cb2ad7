"""Scores of an evaluation: majority votes, and the mean of a score with its 95 % interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

Z = 1.959963984540054
"""Quantile of the normal distribution for 95 %."""


def majority_at_k(votes: Iterable[Sequence[tuple[str | None, bool]]], k: int) -> float | None:
    """Return the share of majority votes that are correct. `votes`: for each prompt, (answer, is it correct) of its
    scored samples, in order.

    Each prompt's samples are cut into groups of k, which vote; a rest of fewer does not. Samples without an answer
    have no vote, and a tie goes to the answer given first. Every prompt counts the same. None if no prompt has k
    samples, or no sample an answer: its environment names none.
    """
    votes, shares = list(votes), []
    if not any(answer is not None for samples in votes for answer, _ in samples):
        return None
    for samples in votes:
        groups = [samples[start : start + k] for start in range(0, len(samples) - k + 1, k)]
        if groups:
            shares.append(sum(map(_majority_is_correct, groups)) / len(groups))
    return math.fsum(shares) / len(shares) if shares else None


def _majority_is_correct(group: Sequence[tuple[str | None, bool]]) -> bool:
    """Right answers are one answer, however they are written: 1/2, 0.5 and \\frac{1}{2} are all equal to the truth."""
    counts = Counter(_RIGHT if correct else "".join(answer.split()) for answer, correct in group if answer is not None)
    if not counts:
        return False
    winner, _ = counts.most_common(1)[0]  # equal counts keep the order of first appearance
    return winner is _RIGHT


_RIGHT = object()


def mean_interval(scores: Iterable[Sequence[float]]) -> tuple[float, float, float] | None:
    """Return the mean of a score from 0 to 1, and the lower and upper end of its 95 % interval. `scores`: for each
    prompt, the scores of its samples; prompts without one are left out, and None is returned if none is left.

    The samples of a prompt are not independent, so the standard error is that of the prompts' means (arXiv 2411.00640,
    section 2.2). It gives the effective number of prompts n = mean (1 - mean) / error^2, and Wilson's interval for n is
    returned: unlike mean +- 1.96 error it is no point where all prompts agree.
    """
    means = [math.fsum(values) / len(values) for values in scores if values]
    if not means:
        return None
    count = len(means)
    mean = math.fsum(means) / count
    error2 = math.fsum((value - mean) ** 2 for value in means) / (count * (count - 1)) if count > 1 else 0.0
    effective = mean * (1 - mean) / error2 if error2 > 0 and 0 < mean < 1 else float(count)
    z2 = Z * Z / effective
    centre = (mean + z2 / 2) / (1 + z2)
    half = Z / (1 + z2) * math.sqrt(mean * (1 - mean) / effective + z2 / (4 * effective))
    return mean, max(0.0, centre - half), min(1.0, centre + half)
