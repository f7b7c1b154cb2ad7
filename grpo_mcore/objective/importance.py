"""Ratios between two policies, by token or by sequence, and bounded importance-sampling weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mcore.objective.reduce import MaskedTokens
from grpo_mcore.recipe import ClippedPGLossConfig

_LARGEST_LOG = 700.0  # exp of it is still a float64


@dataclass(frozen=True)
class ImportanceWeights:
    """pi_prev / pi_generation of each token, float64 [N], without gradient."""

    weight: Tensor
    """After truncation: the factor of the policy term."""
    raw: Tensor
    """Before truncation."""
    outside: Tensor | None
    """bool [N]: outside of the bounds; None without a truncation type."""
    by_sequence: bool
    """All tokens of a sequence have the same weight."""
    outside_by_sequence: bool
    """The bounded value is the same for all tokens of a sequence."""


def log_ratio(numerator: Tensor, denominator: Tensor, tokens: MaskedTokens, *, by_sequence: bool) -> Tensor:
    """Return log(pi_numerator / pi_denominator) of each token, [N].

    by_sequence: the mean over the sequence, for each of its tokens. Its exponential is the geometric mean of the token
    ratios (GSPO, arXiv 2507.18071). Unlike their product it does not shrink or grow with the length.
    """
    difference = numerator - denominator
    return tokens.expand(tokens.mean_by_sequence(difference)) if by_sequence else difference


def importance_weights(
    prev: Tensor, generation: Tensor, tokens: MaskedTokens, cfg: ClippedPGLossConfig, ages: Tensor | None = None
) -> ImportanceWeights:
    """Return w = exp(prev - generation) by token or, with sequence_level_importance_ratios, by sequence: the geometric
    mean of the sequence's token weights, or with sequence_importance_weight=product their product.

    tis: w clamped to [low, high]. icepop: w if it is within the bounds, else 0. seq-mask-tis: token weights, but 0 for
    all tokens of a sequence whose geometric mean is out of bounds. A log-weight that is not finite gives weight 0.

    ages: float64 [N], trajectory age of each token; needed for truncated_importance_sampling_ratio_by_age.
    """
    by_sequence = cfg.sequence_level_importance_ratios
    prev, generation = prev.detach(), generation.detach()
    if cfg.sequence_importance_weight == "product":
        log_weight = tokens.expand(tokens.sum_by_sequence(prev - generation))
    else:
        log_weight = log_ratio(prev, generation, tokens, by_sequence=by_sequence)
    raw = _weight(log_weight)
    kind = cfg.truncated_importance_sampling_type
    if kind is None:
        return ImportanceWeights(raw, raw, None, by_sequence, by_sequence)
    masks_sequences = kind == "seq-mask-tis"
    bounds_sequences = by_sequence or masks_sequences
    high = upper_bound(tokens, cfg, ages, by_sequence=bounds_sequences)
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    bounded = _weight(log_ratio(prev, generation, tokens, by_sequence=True)) if masks_sequences else raw
    outside = (bounded < low) | (bounded > high)
    weight = raw.clamp(min=low).clamp(max=high) if kind == "tis" else torch.where(outside, 0.0, raw)
    return ImportanceWeights(weight, raw, outside, by_sequence, bounds_sequences)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the KL from p to q between the token and all others, [N], by the token's log-probs under both."""
    others = (1 - log_p.exp()).clamp(min=0)
    return log_p.exp() * (log_p - log_q) + others * torch.log((others + 1e-8) / ((1 - log_q.exp()).clamp(min=0) + 1e-8))


def upper_bound(
    tokens: MaskedTokens, cfg: ClippedPGLossConfig, ages: Tensor | None, *, by_sequence: bool
) -> float | Tensor:
    """Return the upper bound of the weights: one number or, with bounds by age, one per token, float64 [N].

    Age a has the bound at entry min(a, last). by_sequence: the age is that of the sequence's oldest valid token.
    """
    by_age = cfg.truncated_importance_sampling_ratio_by_age
    if by_age is None:
        assert cfg.truncated_importance_sampling_ratio is not None  # checked_loss made sure
        return cfg.truncated_importance_sampling_ratio
    assert ages is not None  # the loss checked the batch
    if by_sequence:
        ages = tokens.expand(tokens.maximum_by_sequence(ages))
    # A lookup table would need a copy to the device in every micro-batch.
    bound = torch.full_like(ages, by_age[0])
    for age, value in enumerate(by_age[1:], start=1):
        bound = torch.where(ages >= age, value, bound)
    return bound


def _weight(log_weight: Tensor) -> Tensor:
    return torch.where(torch.isfinite(log_weight), torch.exp(log_weight.clamp(max=_LARGEST_LOG)), 0.0)
