"""What the loss reports of one micro-batch: each metric is its part, already divided by its own global count.

So parts add up over micro-batches and data-parallel ranks; the exceptions are declared in combine.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_mcore.objective.config import ClippedPGLossConfig, KLType
from grpo_mcore.objective.importance import ImportanceWeights
from grpo_mcore.objective.kl import js_divergence, kl_estimate
from grpo_mcore.objective.reduce import MaskedTokens


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


def mismatch_by_token(prev: Tensor, generation: Tensor, weights: ImportanceWeights, kind: KLType) -> dict[str, Tensor]:
    """How far the engine's log-probs g of the sampled tokens are from the policy's p (prev), for each token, [N].

    token_mult_prob_error: exp|g - p|. gen_kl_error: KL(gen || policy) with the configured estimator.
    sampling_importance_ratio: the weight after truncation. is_oob_ratio: 1 where it was outside its bounds.
    """
    columns = {
        "token_mult_prob_error": torch.exp((generation - prev).abs()),
        "gen_kl_error": kl_estimate(generation, prev, kind),
        "sampling_importance_ratio": weights.weight,
    }
    if weights.outside is not None:
        columns["is_oob_ratio"] = weights.outside.to(torch.float64)
    return columns


def mismatch_metrics(
    curr: Tensor,
    prev: Tensor,
    generation: Tensor,
    weights: ImportanceWeights,
    by_token: Mapping[str, Tensor],
    tokens: MaskedTokens,
    kind: KLType,
) -> dict[str, Tensor]:
    """Means of the mismatch of engine and policy; `by_token` is that of `mismatch_by_token`.

    policy_kl_error: gen_kl_error with the roles swapped. js_divergence_error: Jensen-Shannon. approx_entropy:
    -exp(curr - g) * curr. sequence_mult_prob_error: the mean of exp|g - p| of a sequence, as mean over sequences,
    as maximum, and for the p95 as one value a sequence, float64 [num_segments]. Importance weights and their share
    out of bounds are means over tokens, or over sequences where the weight (or its bound) is one a sequence.
    """
    error = by_token["token_mult_prob_error"]
    counts = (tokens.sample_weight > 0) & (tokens.tokens_by_sequence > 0)
    by_sequence = torch.where(counts, tokens.mean_by_sequence(error), -torch.inf)
    metrics = {
        "sampling_importance_ratio": tokens.mean(weights.weight, by_sequence=weights.by_sequence),
        "sampling_importance_ratio_before_truncation": tokens.mean(weights.raw, by_sequence=weights.by_sequence),
    }
    if weights.outside is not None:
        outside = by_token["is_oob_ratio"]
        metrics["is_oob_ratio"] = tokens.mean(outside, by_sequence=weights.outside_by_sequence)
    return metrics | {
        "token_mult_prob_error": tokens.mean(error),
        "sequence_mult_prob_error": tokens.mean(error, by_sequence=True),
        "sequence_mult_prob_error_p95": by_sequence[: tokens.num_segments],
        "sequence_mult_prob_error_max": by_sequence.amax(),
        "gen_kl_error": tokens.mean(by_token["gen_kl_error"]),
        "policy_kl_error": tokens.mean(kl_estimate(prev, generation, kind)),
        "js_divergence_error": tokens.mean(js_divergence(prev, generation)),
        "approx_entropy": tokens.mean(-torch.exp(curr - generation) * curr),
    }


def age_metrics(
    ages: Tensor, by_token: Mapping[str, Tensor], tokens: MaskedTokens, max_age: int | None
) -> dict[str, Tensor]:
    """Mean and greatest trajectory age of the tokens and, for the ages 0 .. max_age, how they differ.

    ages: float64 [N]. Older tokens count as max_age, so that the names do not depend on the data.
    token_share/age_a: share of the tokens that have this age. Each column of `by_token`: its sum over these tokens /
    global_valid_toks; divided by the share (`step_metrics`) it is their mean.
    """
    metrics = {"trajectory_age_mean": tokens.mean(ages), "trajectory_age_max": tokens.maximum(ages)}
    if max_age is None:
        return metrics
    columns = torch.stack([torch.ones_like(ages), *by_token.values()]) * tokens.weight
    bucket = ages.clamp(0, max_age).to(torch.int64).expand_as(columns)
    sums = columns.new_zeros(len(columns), max_age + 1).scatter_add(1, bucket, columns) / tokens.global_toks
    for name, of_name in zip(("token_share", *by_token), sums, strict=True):
        metrics |= {f"{name}/age_{age}": value for age, value in enumerate(of_name)}
    return metrics
