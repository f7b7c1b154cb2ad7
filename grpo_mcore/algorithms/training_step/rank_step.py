"""What the driver tells the policy's ranks about a step: first which samples, later what to learn from them.

Samples are named by their index in the step, so that values of all of them travel as one tensor each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RankStep:
    """The samples of one data-parallel rank."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Sample indices in bins, for every optimizer step."""
    trajectories: Mapping[int, Any]
    """Sample index -> its trajectory's place in the object store."""


@dataclass(frozen=True)
class TrainTargets:
    """What every rank trains towards. Tensors are float64 [samples of the step], by sample index."""

    weights: Tensor
    """1 where the sample counts in the loss, 0 where it is masked."""
    valid_seqs: tuple[int, ...]
    """Samples that count, over all ranks, one number an optimizer step."""
    valid_toks: tuple[int, ...]
    """Their trained tokens."""
    advantages: Tensor | None = None
    kl_weight: float = 0.0
    """Token t trains with its sample's advantage minus this weight times the KL from t to the end of the sample."""
    clip: tuple[float | None, float | None] = (None, None)
    """Bounds of a token's advantage."""
    rewards: Tensor | None = None
    """As the environment gave them, for terms of the loss that ask for them."""


def counts(batches: tuple[tuple[int, ...], ...], weights: Tensor, tokens: Tensor) -> tuple[list[int], list[int]]:
    """(samples, trained tokens) that count in each optimizer step, exact.

    `batches`: sample indices of each optimizer step over all ranks; `weights` 0 or 1, `tokens` int64, both [samples].
    """
    seqs, toks = [], []
    for indices in batches:
        index = torch.tensor(indices, dtype=torch.int64)
        counting = weights[index] > 0
        seqs.append(int(counting.sum()))
        toks.append(int(tokens[index][counting].sum()))
    return seqs, toks
