"""Estimators of the KL divergence from one sampled token (Schulman, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.base.imports import import_by_path
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
