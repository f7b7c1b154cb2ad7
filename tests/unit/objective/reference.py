"""The objective written once more, straight from the formulas: plain Python floats, one token at a time, and each
gradient by hand. Nothing here is shared with the package, not even automatic differentiation.

arXiv: PPO 1707.06347, dual clip 1912.09729, GRPO 2402.03300, token-level loss 2503.14476, Dr. GRPO 2503.20783,
CISPO 2506.13585, GSPO 2507.18071, SAPO 2511.20347, DPPO 2602.04879, GMPO 2507.20673, VESPO 2602.10693, DRO
2405.19107, Clip-Cov and KL-Cov 2505.22617, gradient of the KL 2506.09477, positive NLL 2504.05118.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .samples import LOGPROBS, Sample, counts


@dataclass
class Token:
    """A valid token: log-probs under current, previous, generating and reference policy, advantage, age."""

    at: int
    curr: float
    prev: float
    gen: float
    ref: float
    advantage: float
    age: int
    marked: bool
    log_ratio: float = 0.0
    """Return log(curr / prev), or its mean over the sequence."""


@dataclass
class Term:
    """Value of one token in one term of the loss, and its derivatives."""

    value: float
    by_log_ratio: float = 0.0
    """Derivative by `log_ratio`, which the sequence may share."""
    by_curr: float = 0.0
    """Derivative by this token's own log-prob, apart from the ratio."""
    moves: float = 1.0
    """Derivative of the token's part of a mean over the sequence by its log-ratio."""


Sequences = list[list[Token]]


def sequences_of(cfg: Any, samples: list[Sample]) -> Sequences:
    """Return the valid tokens of each sample, possibly none."""
    found = []
    for s in samples:
        prev, gen, ref = (s.columns[name].tolist() for name in LOGPROBS)
        curr, advantages, ages = s.curr.tolist(), s.columns["advantages"].tolist(), s.columns["ages"].tolist()
        prev = curr if cfg.force_on_policy_ratio else prev  # the previous policy is the current one
        marks = (s.columns["covariance_marks"] > 0).tolist()
        tokens = [Token(t, curr[t], prev[t], gen[t], ref[t], advantages[t], ages[t], marks[t]) for t in s.trained]
        for token in tokens:
            token.log_ratio = token.curr - token.prev
        if cfg.sequence_level_importance_ratios and tokens:
            mean = math.fsum(t.log_ratio for t in tokens) / len(tokens)
            for token in tokens:
                token.log_ratio = mean
        found.append(tokens)
    return found


def reference_loss(cfg: Any, samples: list[Sample]) -> tuple[dict[str, float], list[Tensor]]:
    """Return the loss and its terms by name, and its gradient by each sample's log-probs, over all samples at once."""
    valid_seqs, valid_toks = (max(count, 1) for count in counts(samples))
    sequences = sequences_of(cfg, samples)
    grads = [[0.0] * len(s.curr) for s in samples]

    def total(terms: list[list[Term]], factor: float, coefficient: Any) -> float:
        """Return the sum of coefficient(length) * value, and add factor times its gradient to `grads`."""
        values = []
        for grad, tokens, row in zip(grads, sequences, terms, strict=True):
            weight = coefficient(len(tokens)) if tokens else 0.0
            values += [weight * term.value for term in row]
            shared = math.fsum(term.by_log_ratio for term in row)
            for token, term in zip(tokens, row, strict=True):
                if cfg.sequence_level_importance_ratios or cfg.policy_term == "gmpo":
                    slope = shared / len(tokens) * term.moves + term.by_curr  # the mean moves by 1/n with each token
                else:
                    slope = term.by_log_ratio + term.by_curr
                grad[token.at] += factor * weight * slope
        return math.fsum(values)

    def mean(length: int) -> float:
        if cfg.token_level_loss:
            return 1 / valid_toks
        return 1 / (valid_seqs * (cfg.sequence_length_normalizer or length))

    policy = total([policy_terms(cfg, tokens) for tokens in sequences], 1.0, mean)
    losses = {"policy_loss": policy, "loss": policy}
    beta, mu, eta = cfg.reference_policy_kl_penalty, cfg.positive_example_nll_weight, cfg.entropy_coeff
    if beta and not cfg.use_kl_in_reward:
        losses["kl_penalty"] = total([[kl_term(cfg, t) for t in tokens] for tokens in sequences], beta, mean)
        losses["loss"] += beta * losses["kl_penalty"]
    if mu:
        nll = [
            [Term(-t.curr, by_curr=-1.0) if s.reward > 0 else Term(0.0) for t in tokens]
            for s, tokens in zip(samples, sequences, strict=True)
        ]
        losses["positive_nll_loss"] = total(nll, mu, lambda length: 1 / valid_toks)
        losses["loss"] += mu * losses["positive_nll_loss"]
    if eta is not None:
        entropies = [
            [s.columns["entropies"].tolist()[t.at] for t in tokens]
            for s, tokens in zip(samples, sequences, strict=True)
        ]
        losses["entropy"] = math.fsum(map(math.fsum, entropies)) / valid_toks
        bonus = [[Term(value) for value in row] for row in entropies]  # of the distribution, not of one log-prob
        losses["loss"] -= eta * total(bonus, 0.0, mean)
    return losses, [torch.tensor(grad, dtype=torch.float64) for grad in grads]


def policy_terms(cfg: Any, tokens: list[Token]) -> list[Term]:
    """Return the weighted policy term of each token of one sequence."""
    terms = []
    for token in tokens:
        a, r = token.advantage, math.exp(token.log_ratio)
        low, high = 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max
        clipped = min(max(r, low), high)
        if cfg.policy_term != "clip":
            term = named_term(cfg, tokens, token)[0]
        elif cfg.disable_ppo_ratio:
            term = Term(-a * token.curr, by_curr=-a)
        elif cfg.use_cispo:
            term = Term(-a * clipped * token.curr, by_curr=-a * clipped)
        else:
            # min(r A, clip(r) A) is r A, with gradient r A, up to the bound that the advantage pushes towards.
            cut = r > high if a > 0 else r < low
            term = Term(-a * clipped) if cut else Term(-a * r, by_log_ratio=-a * r)
            if cfg.ratio_clip_c is not None and a < 0 and term.value > -a * cfg.ratio_clip_c:
                term = Term(-a * cfg.ratio_clip_c)
        w = weight(cfg, tokens, token)[1] if cfg.use_importance_sampling_correction else 1.0
        terms.append(Term(w * term.value, w * term.by_log_ratio, w * term.by_curr, term.moves))
    return terms


def named_term(cfg: Any, tokens: list[Token], token: Token) -> tuple[Term, float]:
    """Return a token's term under a policy_term other than clip, without importance weight, and its clipped ratio."""
    name, options, a, x = cfg.policy_term, cfg.policy_term_options, token.advantage, token.log_ratio
    r, up, down = math.exp(x), cfg.ratio_clip_max, cfg.ratio_clip_min
    if name == "sapo":
        tau = options.get("tau_pos", 1.0) if a > 0 else options.get("tau_neg", 1.05)
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return Term(-a * 4 / tau * gate, by_log_ratio=-a * 4 * gate * (1 - gate) * r), r
    if name == "kl_cov":
        beta = options.get("beta", 1.0) * token.marked
        return Term(-a * r + beta * abs(x), by_log_ratio=-a * r + math.copysign(beta, x)), r
    if name == "clip_cov":
        clipped = min(max(r, 1 - down), 1 + up)
        cut = r > 1 + up if a > 0 else r < 1 - down
        if token.marked:
            return Term(0.0), 0.0
        return Term(-a * clipped) if cut else Term(-a * r, by_log_ratio=-a * r), clipped
    if name == "dro":
        beta = options.get("beta", 1.0)
        return Term(-a * token.curr + beta / 2 * x**2, by_curr=-a + beta * x), r
    if name == "gmpo":
        parts = [min(t.log_ratio, up) if t.advantage > 0 else max(t.log_ratio, -down) for t in tokens]
        mean = math.exp(math.fsum(parts) / len(parts))
        inside = x < up if a > 0 else x > -down
        clipped = math.exp(min(x, up) if a > 0 else max(x, -down))
        return Term(-a * mean, by_log_ratio=-a * mean, moves=float(inside)), clipped
    if name == "vespo":
        w = math.exp(max(math.fsum(t.log_ratio for t in tokens), math.log(1e-8)))
        sign = "pos" if a >= 0 else "neg"
        default_k, default_decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        k, decay = options.get(f"k_{sign}", default_k), options.get(f"lambda_{sign}", default_decay)
        factor = w**k * math.exp(decay * (1 - w))
    elif name == "flash_reinforce":
        kl = math.fsum(two_way_kl(math.exp(t.prev), math.exp(t.curr)) for t in tokens) / len(tokens)
        factor = r if kl <= options.get("max_kl", 0.005) else 0.0
    elif name == "masked":
        factor = r if 1 - down <= r <= 1 + up else 0.0
    else:
        p, q = math.exp(token.prev), math.exp(token.curr)
        distance = abs(q - p)
        if name == "dppo_kl":
            distance = two_way_kl(p, q)
        follows = q > p if a > 0 else q < p
        far = follows and distance > (up if a > 0 else down)
        factor = 0.0 if far else min(r, options.get("max_ratio", 20.0))
    return Term(-a * factor * token.curr, by_curr=-a * factor), r if name == "vespo" else factor


def two_way_kl(p: float, q: float) -> float:
    """Return the KL from p to q, the probabilities of a token, between it and all others."""
    rest = [max(1 - chance, 0.0) + 1e-8 for chance in (p, q)]
    return p * math.log(p / q) + (rest[0] - 1e-8) * math.log(rest[0] / rest[1])


def weight(cfg: Any, tokens: list[Token], token: Token) -> tuple[float, float, bool]:
    """Return pi_prev / pi_gen of a token: (raw, after truncation, out of bounds)."""
    logs = [t.prev - t.gen for t in tokens]
    geometric, product = math.exp(math.fsum(logs) / len(logs)), math.exp(math.fsum(logs))
    raw = math.exp(token.prev - token.gen)
    if cfg.sequence_level_importance_ratios:
        raw = product if cfg.sequence_importance_weight == "product" else geometric
    kind = cfg.truncated_importance_sampling_type
    if kind is None:
        return raw, raw, False
    by_age = cfg.truncated_importance_sampling_ratio_by_age
    low, high = cfg.truncated_importance_sampling_ratio_min or 0.0, cfg.truncated_importance_sampling_ratio
    of_sequence = kind == "seq-mask-tis" or cfg.sequence_level_importance_ratios
    if by_age is not None:
        age = max(t.age for t in tokens) if of_sequence else token.age
        high = by_age[age] if age < len(by_age) else by_age[-1]
    judged = geometric if kind == "seq-mask-tis" else raw
    outside = not low <= judged <= high
    if kind == "tis":
        return raw, min(max(raw, low), high), outside
    return raw, 0.0 if outside else raw, outside


def kl(kind: str, x: float) -> tuple[float, float]:
    """Return an estimate of the KL and its derivative, x = log reference - log policy."""
    if kind == "k1":
        return -x, -1.0
    if kind == "k2":
        return x * x / 2, x
    return math.expm1(x) - x, math.expm1(x)


def kl_term(cfg: Any, token: Token) -> Term:
    """Return f * k(x): f = pi / pi_gen, or 1 with the gradient of the log-prob (the score function)."""
    x, bound = token.ref - token.curr, cfg.kl_input_clamp_value
    inside = bound is None or abs(x) <= bound
    x = x if inside else math.copysign(bound, x)
    factor = math.exp(token.curr - token.gen) if cfg.use_on_policy_kl_approximation else 1.0
    k, slope = kl(cfg.reference_policy_kl_type, x)
    # f' = f, x' = -1. Beyond the bound of x both are constant.
    term = Term(factor * k, by_curr=factor * (k - slope) if inside else 0.0)
    bound = cfg.kl_output_clamp_value
    return term if bound is None or abs(term.value) <= bound else Term(math.copysign(bound, term.value))
