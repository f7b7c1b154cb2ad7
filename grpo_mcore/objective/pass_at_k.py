"""pass@k: the chance that at least one of k samples of a prompt is right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

CORRECT = 1.0
"""A sample is right from this reward on."""


def pass_at_k(results: Iterable[Sequence[bool]], k: int) -> float | None:
    """Mean over prompts of 1 - C(n - c, k) / C(n, k), for n scored samples of which c are right.

    The unbiased estimate of arXiv 2107.03374, equation 1. `results`: for each prompt, of every scored sample whether it
    is right; the numbers may differ. Prompts with fewer than k are left out; None where none is left.
    """
    estimates = [
        1.0 - math.comb(len(result) - sum(result), k) / math.comb(len(result), k)
        for result in results
        if len(result) >= k
    ]
    return math.fsum(estimates) / len(estimates) if estimates else None


def pass_numbers(samples: int) -> list[int]:
    """The numbers k worth a metric: 1, 2, 4, ... and `samples`, those of one prompt."""
    powers = [2**exponent for exponent in range(samples.bit_length())]
    return powers if powers[-1] == samples else [*powers, samples]
