"""The data that the driver sends to the policy's ranks in a step: first the samples, later their targets.

Samples are known by their index in the step, so that each value of all samples travels as one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mcore.rollout.workers import Ref


@dataclass(frozen=True)
class RankStep:
    """The samples of one data-parallel rank."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Sample indices by optimizer step and bin."""
    trajectories: Mapping[int, Ref]
    """Sample index -> reference to its trajectory in the object store."""


@dataclass(frozen=True)
class TrainTargets:
    """Targets of a step, the same for every rank. Tensors are float64 [samples of the step], by sample index."""

    weights: Tensor
    """1 if the sample counts in the loss, 0 if it is masked."""
    valid_seqs: tuple[int, ...]
    """Samples that count, over all ranks, by optimizer step."""
    valid_toks: tuple[int, ...]
    """Trained tokens of these, by optimizer step."""
    advantages: Tensor | None = None
    kl_weight: float = 0.0
    """The advantage of token t is its sample's, minus this weight times the KL from t to the end of the sample."""
    clip: tuple[float | None, float | None] = (None, None)
    """Bounds of a token's advantage."""
    rewards: Tensor | None = None
    """Rewards of the environment, if a term of the loss needs them."""


def counts(batches: tuple[tuple[int, ...], ...], weights: Tensor, tokens: Tensor) -> tuple[list[int], list[int]]:
    """Return the exact numbers of (samples, trained tokens) that count in each optimizer step.

    `batches`: sample indices of each optimizer step over all ranks; `weights` 0 or 1, `tokens` int64, both [samples].
    """
    seqs, toks = [], []
    for indices in batches:
        index = torch.tensor(indices, dtype=torch.int64)
        counting = weights[index] > 0
        seqs.append(int(counting.sum()))
        toks.append(int(tokens[index][counting].sum()))
    return seqs, toks
