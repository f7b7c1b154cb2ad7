"""Ratios between two policies, by token or by sequence, and the bounded importance-sampling weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mcore.objective.config import ClippedPGLossConfig
from grpo_mcore.objective.reduce import MaskedTokens


@dataclass(frozen=True)
class ImportanceWeights:
    """pi_prev / pi_generation of each token, float64 [N], without gradient."""

    weight: Tensor
    """After truncation: what the policy term is multiplied by."""
    raw: Tensor
    """Before truncation."""
    outside: Tensor | None
    """bool [N]: outside the bounds; None without a truncation type."""
    by_sequence: bool
    """The weight is one a sequence."""
    outside_by_sequence: bool
    """The bound is on a value that is one a sequence."""


def log_ratio(numerator: Tensor, denominator: Tensor, tokens: MaskedTokens, *, by_sequence: bool) -> Tensor:
    """log(pi_numerator / pi_denominator) of each token, [N].

    by_sequence: the mean over the sequence, given to each of its tokens. Its exponential is the geometric
    mean of the token ratios (GSPO, arXiv 2507.18071), which does not shrink or grow with the length as their
    product does.
    """
    difference = numerator - denominator
    return tokens.expand(tokens.mean_by_sequence(difference)) if by_sequence else difference


def importance_weights(
    prev: Tensor, generation: Tensor, tokens: MaskedTokens, cfg: ClippedPGLossConfig
) -> ImportanceWeights:
    """w = exp(prev - generation), by token or (sequence_level_importance_ratios) by sequence; not finite
    counts as 0.

    tis: w clamped to [low, high]. icepop: w where it lies inside, else 0. seq-mask-tis: token weights, 0 for
    all tokens of a sequence whose geometric mean lies outside.
    """
    by_sequence = cfg.sequence_level_importance_ratios
    prev, generation = prev.detach(), generation.detach()
    raw = _weight(log_ratio(prev, generation, tokens, by_sequence=by_sequence))
    kind = cfg.truncated_importance_sampling_type
    if kind is None:
        return ImportanceWeights(raw, raw, None, by_sequence, by_sequence)
    high = cfg.truncated_importance_sampling_ratio
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    masks_sequences = kind == "seq-mask-tis"
    bounded = _weight(log_ratio(prev, generation, tokens, by_sequence=True)) if masks_sequences else raw
    outside = (bounded < low) | (bounded > high)
    weight = raw.clamp(low, high) if kind == "tis" else torch.where(outside, 0.0, raw)
    return ImportanceWeights(weight, raw, outside, by_sequence, by_sequence or masks_sequences)


def _weight(log_weight: Tensor) -> Tensor:
    return torch.exp(log_weight).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
