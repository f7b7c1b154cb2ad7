"""The metrics of a step implemented again from their definitions: plain Python floats, all samples together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .reference import Token, kl, named_term, sequences_of, weight
from .samples import Sample, counts


def reference_metrics(cfg: Any, samples: list[Sample], max_age: int | None) -> dict[str, float]:
    """Return the metrics of a step except its losses. Extremes, quantiles and means over nothing are left out."""
    sequences = sequences_of(cfg, samples)
    valid_seqs, valid_toks = counts(samples)
    found: dict[str, float] = {"num_valid_samples": valid_seqs}
    every = [(tokens, token) for tokens in sequences for token in tokens]

    def mean(values: Iterable[float]) -> float:
        return math.fsum(values) / max(valid_toks, 1)

    def mean_of_means(rows: Iterable[list[float]]) -> float:
        return math.fsum(math.fsum(row) / len(row) for row in rows if row) / max(valid_seqs, 1)

    ratios = [math.exp(token.log_ratio) for _, token in every]
    bounds = 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max
    clipped = ratios if cfg.disable_ppo_ratio else [min(max(r, bounds[0]), bounds[1]) for r in ratios]
    if cfg.policy_term != "clip":
        clipped = [named_term(cfg, *pair)[1] for pair in every]
    for name, values in (("probs_ratio", ratios), ("probs_ratio_clamped", clipped)):
        found[name] = mean(values)
        if values:
            found |= {f"{name}_min": min(values), f"{name}_max": max(values)}
    cuts = [cut_by(cfg, token, *bounds) for _, token in every]
    if cfg.policy_term != "clip":
        cuts = [(c != r and r < 1, c != r and r >= 1, False) for r, c in zip(ratios, clipped, strict=True)]
    found["clip_fraction_low"] = mean(low for low, _, _ in cuts)
    found["clip_fraction_high"] = mean(high for _, high, _ in cuts)
    if cfg.ratio_clip_c is not None:
        found["clip_fraction_dual"] = mean(dual for _, _, dual in cuts)

    weights = [[weight(cfg, tokens, token) for token in tokens] for tokens in sequences]
    kind = cfg.truncated_importance_sampling_type
    of_sequence = cfg.sequence_level_importance_ratios
    for name, part, by_sequence in (
        ("sampling_importance_ratio_before_truncation", 0, of_sequence),
        ("sampling_importance_ratio", 1, of_sequence),
        ("is_oob_ratio", 2, of_sequence or kind == "seq-mask-tis"),
    ):
        rows = [[float(w[part]) for w in row] for row in weights]
        found[name] = mean_of_means(rows) if by_sequence else mean(v for row in rows for v in row)
    if kind is None:
        del found["is_oob_ratio"]

    estimator = cfg.reference_policy_kl_type
    by_token = {
        "token_mult_prob_error": [math.exp(abs(t.gen - t.prev)) for _, t in every],
        "gen_kl_error": [kl(estimator, t.prev - t.gen)[0] for _, t in every],
        "sampling_importance_ratio": [w[1] for row in weights for w in row],
        "is_oob_ratio": [float(w[2]) for row in weights for w in row],
    }
    found["token_mult_prob_error"] = mean(by_token["token_mult_prob_error"])
    found["gen_kl_error"] = mean(by_token["gen_kl_error"])
    found["policy_kl_error"] = mean(kl(estimator, t.gen - t.prev)[0] for _, t in every)
    found["js_divergence_error"] = mean(jensen_shannon(t.prev, t.gen) for _, t in every)
    found["approx_entropy"] = mean(-math.exp(t.curr - t.gen) * t.curr for _, t in every)

    rows = [[math.exp(abs(t.gen - t.prev)) for t in tokens] for tokens in sequences]
    found["sequence_mult_prob_error"] = mean_of_means(rows)
    errors = [math.fsum(row) / len(row) for row in rows if row]
    if errors:
        found["sequence_mult_prob_error_max"] = max(errors)
        found["sequence_mult_prob_error_p95"] = quantile(errors, 0.95)

    found["trajectory_age_mean"] = mean(t.age for _, t in every)
    if every:
        found["trajectory_age_max"] = max(t.age for _, t in every)
    if kind is None:
        del by_token["is_oob_ratio"]
    for age in range(max_age + 1) if max_age is not None else ():
        of_age = [i for i, (_, t) in enumerate(every) if min(t.age, max_age) == age]
        found[f"token_share/age_{age}"] = len(of_age) / max(valid_toks, 1)
        if of_age:
            found |= {
                f"{name}/age_{age}": math.fsum(v[i] for i in of_age) / len(of_age) for name, v in by_token.items()
            }
    return found


def cut_by(cfg: Any, token: Token, low: float, high: float) -> tuple[bool, bool, bool]:
    """Return whether the lower bound, the upper bound and the dual clip stop this token."""
    r, a = math.exp(token.log_ratio), token.advantage
    dual = cfg.ratio_clip_c is not None and r > cfg.ratio_clip_c and a < 0
    if cfg.disable_ppo_ratio:
        return False, False, dual
    if cfg.use_cispo:
        return r < low, r > high, dual
    return r < low and a < 0, r > high and a > 0, dual


def jensen_shannon(p: float, g: float) -> float:
    """Return the mean of the k3 estimates of KL(p || m) and KL(g || m), m = mixture of both probabilities."""
    m = math.log((math.exp(p) + math.exp(g)) / 2)
    return (kl("k3", p - m)[0] + kl("k3", g - m)[0]) / 2


def quantile(values: list[float], q: float) -> float:
    """Return the quantile, interpolated linearly between its two neighbours."""
    ordered, at = sorted(values), q * (len(values) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
