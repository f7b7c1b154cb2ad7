"""The policy term of each token, by the name in `loss_fn.policy_term`, as pure functions.

r = exp(curr - prev), the ratio of a token; A its advantage. The bounds of a term are 1 - ratio_clip_min and
1 + ratio_clip_max unless it says otherwise. A clipped ratio is the bounded one, 0 where a term drops the token, and r
where it bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_mcore.objective.importance import binary_kl, log_ratio
from grpo_mcore.objective.reduce import MaskedTokens
from grpo_mcore.recipe import ClippedPGLossConfig, policy_term_options

_LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyTerm:
    """The policy term of each token and its ratios, float64 [N]."""

    loss: Tensor
    ratio: Tensor
    clipped_ratio: Tensor
    marked: Tensor | None = None
    """The term of tokens that `Marking` chose, in place of `loss`; 0 where it drops them. None: no token is marked."""

    def with_marks(self, marks: Tensor) -> PolicyTerm:
        """Return the term with `marked` where `marks`, bool [N]."""
        assert self.marked is not None
        clipped = torch.where(marks & (self.marked == 0), 0.0, self.clipped_ratio)
        return PolicyTerm(torch.where(marks, self.marked, self.loss), self.ratio, clipped)


class Marking(NamedTuple):
    """Which tokens of an optimizer step stand out by their covariance, (log p - mean log p) (A - mean A) with means
    over all its tokens (arXiv 2505.22617, equation 10; log p is before the step's first update, so the choice is the
    same on every layout): a `share` of all tokens, at least one. kl_cov takes the highest (equation 13), clip_cov draws
    among those between `low` and `high` (equation 11)."""

    share: float
    low: float | None = None
    high: float = math.inf

    @classmethod
    def of(cls, loss: Any) -> Marking | None:
        """Return how a loss marks tokens; None if it marks none."""
        cfg = getattr(loss, "cfg", None)
        if not isinstance(cfg, ClippedPGLossConfig) or cfg.policy_term not in ("clip_cov", "kl_cov"):
            return None
        options = policy_term_options(cfg)
        return cls(options["share"], options.get("low"), options.get("high", math.inf))

    def choose(self, places: Tensor, logprobs: Tensor, advantages: Tensor, seed: int) -> Tensor:
        """Return the chosen among `places`, a number for each token. All float64 [N], in any order."""
        order = places.argsort()
        score = ((logprobs - logprobs.mean()) * (advantages - advantages.mean()))[order]
        if self.low is not None:
            drawn = torch.rand(len(score), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            score = torch.where((score > self.low) & (score < self.high), drawn, -torch.inf)
        top = score.topk(min(max(1, int(self.share * len(score))), len(score))).indices
        return places[order][top[score[top] > -torch.inf]]


@dataclass(frozen=True)
class TermInputs:
    """Inputs of a policy term. Tensors are float64 [N], flat: log-probs under the policy and before the step's
    first update, and the advantages. `options`: those of the term, by `policy_term_options`."""

    curr: Tensor
    prev: Tensor
    advantages: Tensor
    tokens: MaskedTokens
    cfg: ClippedPGLossConfig
    options: Mapping[str, float]

    @property
    def log_ratio(self) -> Tensor:
        return (self.curr - self.prev).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.log_ratio)

    def weighted(self, weight: Tensor) -> PolicyTerm:
        """Return -A stopgrad(weight) curr, with the weight as the clipped ratio."""
        weight = weight.detach()
        return PolicyTerm(-self.advantages * weight * self.curr, self.ratio, weight)


def policy_term(
    curr: Tensor, prev: Tensor, advantages: Tensor, tokens: MaskedTokens, cfg: ClippedPGLossConfig
) -> PolicyTerm:
    """Return the policy term of each token under `cfg`. Arguments as in TermInputs. With force_on_policy_ratio the
    caller gives prev = stopgrad(curr)."""
    options = policy_term_options(cfg)
    return POLICY_TERMS[cfg.policy_term](TermInputs(curr, prev, advantages, tokens, cfg, options))


def clip(x: TermInputs) -> PolicyTerm:
    """With c(r) = clamp(r, 1 - ratio_clip_min, 1 + ratio_clip_max):

    default: max(-A r, -A c(r)); with ratio_clip_c at most -A ratio_clip_c where A < 0 (arXiv 1912.09729).
    sequence_level_importance_ratios: r is the geometric mean of the sequence (GSPO, arXiv 2507.18071).
    disable_ppo_ratio: -A curr (REINFORCE). use_cispo: -A stopgrad(c(r)) curr (arXiv 2506.13585).
    """
    cfg, advantages = x.cfg, x.advantages
    ratio = torch.exp(log_ratio(x.curr, x.prev, x.tokens, by_sequence=cfg.sequence_level_importance_ratios))
    if cfg.disable_ppo_ratio:
        return PolicyTerm(-advantages * x.curr, ratio, ratio)
    clipped = ratio.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
    if cfg.use_cispo:
        return PolicyTerm(-advantages * clipped.detach() * x.curr, ratio, clipped)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if cfg.ratio_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * cfg.ratio_clip_c), loss)
    return PolicyTerm(loss, ratio, clipped)


def masked(x: TermInputs) -> PolicyTerm:
    """-A stopgrad(r) curr where r lies within the bounds, else 0, whatever the sign of A: double-sided importance
    masking (SAO, arXiv 2607.07508)."""
    inside = (x.ratio >= 1 - x.cfg.ratio_clip_min) & (x.ratio <= 1 + x.cfg.ratio_clip_max)
    return x.weighted(torch.where(inside, x.ratio, 0.0))


def flash_reinforce(x: TermInputs) -> PolicyTerm:
    """-A stopgrad(r) curr, and 0 for all tokens of a sequence whose mean `binary_kl` from prev to curr is above max_kl
    (FlashREINFORCE, NVIDIA 2026, "sequence trust region"; r is to the engine by ratio_to_engine)."""
    kl = x.tokens.expand(x.tokens.mean_by_sequence(binary_kl(x.prev, x.curr)))
    return x.weighted(torch.where(kl <= x.options["max_kl"], x.ratio, 0.0))


def sapo(x: TermInputs) -> PolicyTerm:
    """-A (4 / tau) sigmoid(tau (r - 1)), a soft gate in place of a clip; tau is tau_pos where A > 0, else tau_neg
    (SAPO, arXiv 2511.20347)."""
    tau = torch.where(x.advantages > 0, x.options["tau_pos"], x.options["tau_neg"])
    return PolicyTerm(-x.advantages * torch.sigmoid(tau * (x.ratio - 1)) * 4 / tau, x.ratio, x.ratio)


def dppo_tv(x: TermInputs) -> PolicyTerm:
    """-A stopgrad(min(r, max_ratio)) curr, and 0 where the token's probability has moved too far in the direction of A:
    up by more than ratio_clip_max, or down by more than ratio_clip_min (DPPO, binary total variation, arXiv
    2602.04879)."""
    moved = x.curr.exp() - x.prev.exp()
    inside = torch.where(x.advantages > 0, moved <= x.cfg.ratio_clip_max, moved >= -x.cfg.ratio_clip_min)
    return x.weighted(torch.where(inside, x.ratio.clamp(max=x.options["max_ratio"]), 0.0))


def dppo_kl(x: TermInputs) -> PolicyTerm:
    """As dppo_tv, but the distance is the KL from prev to curr between this token and all others, with the same bounds
    (DPPO, binary KL, arXiv 2602.04879)."""
    kl = binary_kl(x.prev, x.curr)
    followed = torch.where(x.advantages > 0, x.curr > x.prev, x.curr < x.prev)
    bound = torch.where(x.advantages > 0, x.cfg.ratio_clip_max, x.cfg.ratio_clip_min)
    return x.weighted(torch.where(followed & (kl > bound), 0.0, x.ratio.clamp(max=x.options["max_ratio"])))


def gmpo(x: TermInputs) -> PolicyTerm:
    """-A times the geometric mean of the sequence's ratios, each with its logarithm clipped to [-ratio_clip_min,
    ratio_clip_max] on the side to which A pushes (GMPO, arXiv 2507.20673)."""
    log_ratios, low, high = x.curr - x.prev, -x.cfg.ratio_clip_min, x.cfg.ratio_clip_max
    bounded = torch.where(x.advantages > 0, log_ratios.clamp(max=high), log_ratios.clamp(min=low))
    mean = torch.exp(x.tokens.expand(x.tokens.mean_by_sequence(bounded)))
    return PolicyTerm(-x.advantages * mean, torch.exp(log_ratios), torch.exp(bounded))


def vespo(x: TermInputs) -> PolicyTerm:
    """-A stopgrad(w^k exp(lambda (1 - w))) curr, with w the product of the sequence's ratios; k and lambda by the sign
    of A (VESPO, arXiv 2602.10693)."""
    log_w = x.tokens.expand(x.tokens.sum_by_sequence(x.log_ratio)).clamp(math.log(1e-8), _LARGEST_LOG_RATIO)
    good = x.advantages >= 0
    k = torch.where(good, x.options["k_pos"], x.options["k_neg"])
    decay = torch.where(good, x.options["lambda_pos"], x.options["lambda_neg"])
    weight = torch.exp(k * log_w + decay * (1 - log_w.exp())).detach()
    return PolicyTerm(-x.advantages * weight * x.curr, x.ratio, x.ratio)


def dro(x: TermInputs) -> PolicyTerm:
    """-(A curr - beta / 2 (curr - prev)^2): a quadratic penalty in place of a clip (DRO, arXiv 2405.19107)."""
    penalty = x.options["beta"] / 2 * (x.curr - x.prev).square()
    return PolicyTerm(penalty - x.advantages * x.curr, x.ratio, x.ratio)


def clip_cov(x: TermInputs) -> PolicyTerm:
    """As the default clip, and 0 for marked tokens, whose high covariance of log-prob and advantage takes most entropy
    from the policy (Clip-Cov, arXiv 2505.22617, equation 12)."""
    term = clip(x)
    return replace(term, marked=torch.zeros_like(term.loss))


def kl_cov(x: TermInputs) -> PolicyTerm:
    """-A r, and -A r + beta |log r| for marked tokens (KL-Cov, arXiv 2505.22617, equation 14)."""
    loss = -x.advantages * x.ratio
    return PolicyTerm(loss, x.ratio, x.ratio, marked=loss + x.options["beta"] * (x.curr - x.prev).abs())


POLICY_TERMS = {
    "clip": clip,
    "masked": masked,
    "flash_reinforce": flash_reinforce,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gmpo": gmpo,
    "vespo": vespo,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
