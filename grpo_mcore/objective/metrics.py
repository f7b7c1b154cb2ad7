"""Metrics of the loss for one micro-batch, and scores of samples: pass@k, majority votes, means with 95 % intervals.

Each metric of the loss is a part of a global mean, already divided by its global count, so that parts are summed over
micro-batches and data-parallel ranks. combine.py declares the exceptions.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from grpo_mcore.objective.importance import ImportanceWeights
from grpo_mcore.objective.kl import js_divergence, kl_estimate
from grpo_mcore.objective.reduce import MaskedTokens
from grpo_mcore.recipe import ClippedPGLossConfig, KLType

CORRECT = 1.0
"""Reward from which a sample counts as correct."""


def ratio_metrics(
    ratio: Tensor, clipped: Tensor, advantages: Tensor, tokens: MaskedTokens, cfg: ClippedPGLossConfig
) -> dict[str, Tensor]:
    """Return mean, minimum and maximum of the policy ratio, and the shares of clipped tokens.

    With the clipped surrogate a token is clipped where a bound stops its gradient: the lower bound for negative
    advantages, the upper bound for positive ones. With CISPO both bounds apply whatever the sign. Under another
    policy_term a token is clipped where its clipped ratio differs: low below a ratio of 1, high above.
    """
    low = high = torch.zeros_like(ratio)
    if cfg.policy_term != "clip":
        bounded = (clipped != ratio).to(torch.float64)
        low, high = bounded * (ratio < 1), bounded * (ratio >= 1)
    elif not cfg.disable_ppo_ratio:
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
    """Return how far the engine's log-probs g of sampled tokens are from the policy's p (prev), for each token, [N].

    token_mult_prob_error: exp|g - p|. gen_kl_error: KL(gen || policy) with the configured estimator.
    sampling_importance_ratio: the weight after truncation. is_oob_ratio: 1 where the weight was out of bounds.
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
    """Return means of the mismatch between engine and policy. `by_token` comes from `mismatch_by_token`.

    policy_kl_error: gen_kl_error with the roles swapped. js_divergence_error: Jensen-Shannon. approx_entropy:
    -exp(curr - g) * curr. sequence_mult_prob_error: the mean of exp|g - p| of a sequence, as mean over sequences,
    as maximum and, for the p95, as one value per sequence, float64 [num_segments]. Importance weights and their share
    out of bounds are means over tokens, or over sequences if the weight (or its bound) is one per sequence.
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
    """Return mean and maximum trajectory age of the tokens and, for each age from 0 to max_age, their metrics.

    ages: float64 [N]. Older tokens count as max_age, so that the names do not depend on the data. token_share/age_a:
    share of the tokens with this age. For each column of `by_token`: its sum over these tokens / global_valid_toks,
    which `step_metrics` divides by the share to get their mean.
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


def pass_at_k(results: Iterable[Sequence[bool]], k: int) -> float | None:
    """Return the probability that at least one of k samples of a prompt is correct: the mean over prompts of
    1 - C(n - c, k) / C(n, k), for n scored samples of which c are correct.

    This is the unbiased estimate of arXiv 2107.03374, equation 1. `results`: for each prompt, whether each of its
    scored samples is correct. Prompts with fewer than k are left out; None if none is left.
    """
    estimates = [
        1.0 - math.comb(len(result) - sum(result), k) / math.comb(len(result), k)
        for result in results
        if len(result) >= k
    ]
    return math.fsum(estimates) / len(estimates) if estimates else None


def pass_numbers(samples: int) -> list[int]:
    """Return the numbers k for which pass@k is reported: 1, 2, 4, ... and `samples`, the number of one prompt."""
    powers = [2**exponent for exponent in range(samples.bit_length())]
    return powers if powers[-1] == samples else [*powers, samples]


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
