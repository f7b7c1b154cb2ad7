"""What the loss reports: each metric is this batch's part, already divided by its own global count.

So parts add up over micro-batches and data-parallel ranks; the exceptions are declared in METRIC_REDUCTIONS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from grpo_mcore.objective.config import ClippedPGLossConfig, KLType
from grpo_mcore.objective.importance import ImportanceWeights
from grpo_mcore.objective.kl import js_divergence, kl_estimate
from grpo_mcore.objective.reduce import MaskedTokens

Reduction = Literal["sum", "min", "max"]

METRIC_REDUCTIONS: dict[str, Reduction] = {
    "loss": "sum",
    "policy_loss": "sum",
    "kl_penalty": "sum",
    "positive_nll_loss": "sum",
    "num_valid_samples": "sum",
    "num_valid_tokens": "sum",
    "probs_ratio": "sum",
    "probs_ratio_min": "min",
    "probs_ratio_max": "max",
    "probs_ratio_clamped": "sum",
    "probs_ratio_clamped_min": "min",
    "probs_ratio_clamped_max": "max",
    "clip_fraction_low": "sum",
    "clip_fraction_high": "sum",
    "clip_fraction_dual": "sum",
    "sampling_importance_ratio": "sum",
    "sampling_importance_ratio_before_truncation": "sum",
    "is_oob_ratio": "sum",
    "token_mult_prob_error": "sum",
    "sequence_mult_prob_error": "sum",
    "sequence_mult_prob_error_max": "max",
    "gen_kl_error": "sum",
    "policy_kl_error": "sum",
    "js_divergence_error": "sum",
    "approx_entropy": "sum",
}
"""How the parts of each metric are combined over micro-batches and ranks."""


def ratio_metrics(
    ratio: Tensor, clipped: Tensor, advantages: Tensor, tokens: MaskedTokens, cfg: ClippedPGLossConfig
) -> dict[str, Tensor]:
    """Mean and extremes of the policy ratio, and the shares of tokens that a bound cuts.

    With the clipped surrogate a bound cuts where it stops the gradient: the lower one for negative
    advantages, the upper one for positive ones. CISPO cuts on both sides whatever the sign.
    """
    low = high = torch.zeros_like(ratio)
    if not cfg.disable_ppo_ratio:
        low = (ratio < 1 - cfg.ratio_clip_min).to(torch.float64)
        high = (ratio > 1 + cfg.ratio_clip_max).to(torch.float64)
        if not cfg.use_cispo:
            low, high = low * (advantages < 0), high * (advantages > 0)
    metrics = {
        "probs_ratio": tokens.mean(ratio),
        "probs_ratio_min": tokens.minimum(ratio),
        "probs_ratio_max": tokens.maximum(ratio),
        "probs_ratio_clamped": tokens.mean(clipped),
        "probs_ratio_clamped_min": tokens.minimum(clipped),
        "probs_ratio_clamped_max": tokens.maximum(clipped),
        "clip_fraction_low": tokens.mean(low),
        "clip_fraction_high": tokens.mean(high),
    }
    if cfg.ratio_clip_c is not None:
        cut = (ratio > cfg.ratio_clip_c) & (advantages < 0)
        metrics["clip_fraction_dual"] = tokens.mean(cut.to(torch.float64))
    return metrics


def weight_metrics(weights: ImportanceWeights, tokens: MaskedTokens) -> dict[str, Tensor]:
    """Mean importance-sampling weight before and after truncation, and the share outside its bounds.

    By tokens, or by sequences where the weight (or its bound) is one a sequence.
    """
    metrics = {
        "sampling_importance_ratio": tokens.mean(weights.weight, by_sequence=weights.by_sequence),
        "sampling_importance_ratio_before_truncation": tokens.mean(
            weights.raw, by_sequence=weights.by_sequence
        ),
    }
    if weights.outside is not None:
        outside = weights.outside.to(torch.float64)
        metrics["is_oob_ratio"] = tokens.mean(outside, by_sequence=weights.outside_by_sequence)
    return metrics


def mismatch_metrics(
    curr: Tensor, prev: Tensor, generation: Tensor, tokens: MaskedTokens, kind: KLType
) -> dict[str, Tensor]:
    """How far the engine's log-probs g of the sampled tokens are from the policy's p (prev). Means over
    tokens.

    token_mult_prob_error: exp|g - p|. gen_kl_error: KL(gen || policy) with the configured estimator.
    policy_kl_error: roles swapped. js_divergence_error: Jensen-Shannon. approx_entropy: -exp(curr - g) *
    curr. sequence_mult_prob_error: the mean of exp|g - p| of a sequence, as mean over sequences and as
    maximum.
    """
    error = torch.exp((generation - prev).abs())
    by_sequence = tokens.mean_by_sequence(error)
    counts = (tokens.sample_weight > 0) & (tokens.tokens_by_sequence > 0)
    return {
        "token_mult_prob_error": tokens.mean(error),
        "sequence_mult_prob_error": tokens.mean_over_sequences(by_sequence),
        "sequence_mult_prob_error_max": torch.where(counts, by_sequence, -torch.inf).amax(),
        "gen_kl_error": tokens.mean(kl_estimate(generation, prev, kind)),
        "policy_kl_error": tokens.mean(kl_estimate(prev, generation, kind)),
        "js_divergence_error": tokens.mean(js_divergence(prev, generation)),
        "approx_entropy": tokens.mean(-torch.exp(curr - generation) * curr),
    }


def combine_metrics(parts: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """The parts of micro-batches (tensors) or of ranks (floats) as one dict of floats.

    Costs one copy from the device, however many parts and metrics there are. Empty parts are skipped. The
    result is a part again. Without a valid token a minimum is +inf and a maximum -inf, which change nothing
    when combined further. Raises ValueError if names differ or are not in METRIC_REDUCTIONS.
    """
    parts = [part for part in parts if part]
    if not parts:
        return {}
    names = list(parts[0])
    for part in parts:
        if set(part) != set(names):
            raise ValueError(f"metrics of two parts differ in: {', '.join(sorted(set(part) ^ set(names)))}")
    unknown = [name for name in names if name not in METRIC_REDUCTIONS]
    if unknown:
        raise ValueError(f"metric {unknown[0]!r} has no reduction; declare one in METRIC_REDUCTIONS")
    values = [torch.as_tensor(part[name], dtype=torch.float64) for part in parts for name in names]
    table = torch.stack(values).cpu().reshape(len(parts), len(names))
    reduced = {"sum": table.sum(0).tolist(), "min": table.amin(0).tolist(), "max": table.amax(0).tolist()}
    return {name: reduced[METRIC_REDUCTIONS[name]][i] for i, name in enumerate(names)}


def without_empty_extremes(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without minima and maxima over nothing, for logs, after the last combine_metrics."""
    nothing = {"min": math.inf, "max": -math.inf}
    return {
        name: value
        for name, value in metrics.items()
        if value != nothing.get(METRIC_REDUCTIONS.get(name, "sum"))
    }
