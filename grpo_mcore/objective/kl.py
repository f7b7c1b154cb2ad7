"""Estimators of the KL divergence from one sampled token (Schulman, http://joschu.net/blog/kl-approx.html), and the KL
to the reference as part of the reward: of a whole sample, or from each token to the sample's end."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.base.imports import import_by_path
from grpo_mcore.objective.advantages import EQUAL_REWARDS_TOLERANCE, clip_advantages
from grpo_mcore.objective.reduce import MaskedTokens
from grpo_mcore.recipe import CustomCode, KLType


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KLType) -> Tensor:
    """Return KL(pi || reference) of each token, given log-probs of tokens sampled from pi.

    With x = reference - logprobs:  k1 = -x,  k2 = x**2 / 2,  k3 = exp(x) - 1 - x. An import path: the function there,
    of x.
    """
    return _estimate(reference - logprobs, kind)


def kl_penalty(
    logprobs: Tensor,
    reference: Tensor,
    *,
    kind: KLType,
    generation: Tensor | None = None,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Return the KL term of the loss, per token: clamp(f * k(clamp(reference - logprobs))).

    The factor f is exp(logprobs - generation) if `generation` is given (on-policy approximation: the expectation is
    then over the generating policy), else exp(logprobs - stopgrad(logprobs)), which is 1 in value. Its gradient is the
    score-function term, without which the gradient of the estimator is not that of the KL (arXiv 2506.09477). Where the
    input clamp is active, f has no gradient. A factor that is not finite counts as 0.
    """
    x = reference - logprobs
    inside = torch.ones_like(x, dtype=torch.bool)
    if input_clamp is not None:
        inside = x.abs() <= input_clamp
        x = x.clamp(-input_clamp, input_clamp)
    base = logprobs.detach() if generation is None else generation
    factor = _finite_exp(logprobs - base)
    factor = torch.where(inside, factor, factor.detach())
    penalty = factor * _estimate(x, kind)
    return penalty if output_clamp is None else penalty.clamp(-output_clamp, output_clamp)


def js_divergence(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of each token: the mean of k3 from p and from q to (p + q) / 2."""
    mixture = torch.logaddexp(logprobs, other) - math.log(2.0)
    return 0.5 * (_estimate(logprobs - mixture, "k3") + _estimate(other - mixture, "k3"))


def _estimate(x: Tensor, kind: KLType) -> Tensor:
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3":
        return torch.expm1(x) - x
    if isinstance(kind, CustomCode):
        return custom_kl_estimate(kind.path)(x, **kind.options)
    raise ValueError(f"unknown KL estimator {kind!r}; choose k1, k2 or k3")


@cache
def custom_kl_estimate(path: str) -> Callable[[Tensor], Any]:
    """Return the custom estimator at an import path: a function of x = reference - logprobs, token by token."""
    return import_by_path(path, "code of loss_fn.reference_policy_kl_type", ValueError)


def _finite_exp(x: Tensor) -> Tensor:
    # The inner `where` keeps inf * 0 = NaN out of the gradient.
    finite = torch.isfinite(torch.exp(x.detach()))
    return torch.where(finite, torch.exp(torch.where(finite, x, 0.0)), 0.0)


@dataclass(frozen=True)
class SampleKL:
    """Sums over the KL of N samples, float64 [N] each, for the advantage estimators.

    KL_t is the estimate at token t, g_t = sum over i >= t of KL_i, over the n trained tokens of a sample.
    """

    sum: Tensor
    """Sum of KL_t."""
    to_go_sum: Tensor
    """Sum of g_t."""
    to_go_square: Tensor
    """Sum of (g_t - mean of g)**2, around the sample's own mean, so that no digits cancel."""


def rewards_minus_kl(rewards: Tensor, kl: SampleKL, penalty: float, valid: Tensor | None = None) -> Tensor:
    """Return r_i - penalty * (sum of KL_t of sample i), float64 [N]. Failed samples keep their value.

    This is the reward of a whole answer in RLHF, as in RLOO (arXiv 2402.14740). Raises ValueError, naming the samples,
    if the KL of a valid sample is not finite.
    """
    _check_finite(kl.sum, rewards, valid)
    rewards = rewards.to(torch.float64)
    return rewards - penalty * (kl.sum if valid is None else torch.where(valid, kl.sum, 0.0))


def token_moments(values: Tensor, tokens: Tensor, kl: SampleKL | None, penalty: float) -> tuple[Tensor, Tensor]:
    """Return mean and std, over all tokens of the step, of x_t = value of the sample - penalty * g_t. Scalars, float64.

    values [N]; tokens [N] float64: number of valid tokens of each sample, may be 0. The variance is the one within
    samples plus that of their means, each from squares of deviations. The std is exactly 0 if it is below the share
    EQUAL_REWARDS_TOLERANCE of the largest mean.
    """
    counted, total = tokens > 0, tokens.sum().clamp(min=1)
    means, within = torch.where(counted, values, 0.0), values.new_zeros(())
    if kl is not None and penalty:
        _check_finite(kl.to_go_sum + kl.to_go_square, values, counted)
        means = torch.where(counted, values - penalty * kl.to_go_sum / tokens.clamp(min=1), 0.0)
        within = penalty**2 * torch.where(counted, kl.to_go_square, 0.0).sum()
    mean = (tokens * means).sum() / total
    mean = mean + (tokens * (means - mean)).sum() / total  # the second pass removes the rounding error of the first
    std = ((within + (tokens * (means - mean).square()).sum()) / total).sqrt()
    largest = torch.cat([means.abs(), means.new_zeros(1)]).amax()
    return mean, torch.where(std > EQUAL_REWARDS_TOLERANCE * largest, std, 0.0)


def token_kl(batch: Mapping[str, Any], tokens: MaskedTokens, kind: KLType) -> Tensor:
    """Return KL(prev || reference) of each valid token, 0 elsewhere, float64 [N] (flat).

    Raises ValueError if prev_logprobs or reference_policy_logprobs is missing.
    """
    prev, reference = (
        tokens.column(_needed(batch, name).detach(), name) for name in ("prev_logprobs", "reference_policy_logprobs")
    )
    return kl_estimate(prev, reference, kind)


def kl_to_go(batch: Mapping[str, Any], kind: KLType) -> Tensor:
    """Return g_t = sum over i >= t of KL_i within the sequence of token t, float64, in the shape of the log-probs.

    batch: as for the loss, [B, S], or [1, T] with segments; needs prev_logprobs, reference_policy_logprobs and
    token_mask. Tokens that are not trained on add nothing. sample_mask is ignored.
    """
    tokens = every_sample(batch)
    return suffix_sums(token_kl(batch, tokens, kind), tokens).reshape(tokens.shape)


def suffix_sums(values: Tensor, tokens: MaskedTokens) -> Tensor:
    """Return the sum from each token to the end of its sequence, [N] -> [N].

    Uses doubling distances instead of a running sum over the row: the result of a sequence is then bit-identical
    whatever its neighbours are, and a value that is not finite stays in its sequence.
    """
    distance = 1
    while distance < tokens.shape[1]:
        same = tokens.segment[distance:] == tokens.segment[:-distance]
        ahead = torch.where(same, values[distance:], 0.0)
        values = torch.cat([values[:-distance] + ahead, values[-distance:]])
        distance *= 2
    return values


def token_advantages(
    advantages: Tensor, to_go: Tensor | None, kl_weight: float, low: float | None = None, high: float | None = None
) -> Tensor:
    """Return clip(advantages - kl_weight * g_t, low, high) of each token, float64.

    advantages: for each token that of its sample, in the shape of the log-probs. to_go: `kl_to_go`, may be None if
    kl_weight is 0. Raises ValueError if it is missing or low > high.
    """
    advantages = advantages.to(torch.float64)
    if kl_weight:
        if to_go is None:
            raise ValueError(f"kl_weight is {kl_weight}, but to_go is missing: compute it with kl_to_go")
        advantages = advantages - kl_weight * to_go
    return clip_advantages(advantages, low, high)


def every_sample(batch: Mapping[str, Any]) -> MaskedTokens:
    """Return the batch's tokens as if sample_mask were 1: a sample's statistics do not depend on its mask."""
    shape = _needed(batch, "token_mask").shape
    count = shape[0] if batch.get("segments") is None else batch["num_segments"]
    ones = torch.ones(count, dtype=torch.float64, device=batch["token_mask"].device)
    return MaskedTokens.from_batch(shape, {**batch, "sample_mask": ones}, 1, 1)


def _check_finite(sums: Tensor, like: Tensor, valid: Tensor | None) -> None:
    if sums.shape != like.shape:
        raise ValueError(f"the KL has shape {tuple(sums.shape)}, the rewards {tuple(like.shape)}")
    bad = ~torch.isfinite(sums) if valid is None else ~torch.isfinite(sums) & valid
    if bad.any():
        raise ValueError(
            f"the KL of samples {bad.nonzero().reshape(-1)[:8].tolist()} is not finite; "
            "check their log-probs, or leave them out"
        )


def _needed(batch: Mapping[str, Any], name: str) -> Tensor:
    value = batch.get(name)
    if value is None:
        raise ValueError(
            f"the KL in the reward needs {name!r}, which is not in the batch; it has: {', '.join(sorted(batch))}"
        )
    return value
