"""The objective written once more, straight from the formulas: one sequence at a time, float64, plain loops.

Nothing here is shared with the package. Also the layouts the tests feed to it: padded, packed, in
micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

COLUMNS = (
    "prev_logprobs",
    "generation_logprobs",
    "reference_policy_logprobs",
    "advantages",
    "token_mask",
)


@dataclass
class Sample:
    """One sequence: per-token tensors [length] and what holds for the whole of it."""

    curr: Tensor
    columns: dict[str, Tensor]
    sample_mask: float
    reward: float

    @property
    def trained(self) -> list[int]:
        mask = self.columns["token_mask"]
        return [t for t in range(1, len(mask)) if mask[t] > 0] if self.sample_mask else []


def draw(seed: int, count: int, longest: int = 12, spread: float = 0.5, dtype=torch.float32) -> list[Sample]:
    """Random samples: some masked, some with little or nothing to train, ratios on both sides of usual
    bounds.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    samples = []
    for _ in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        curr = -normal(length).abs() - 0.05
        columns = {
            "prev_logprobs": curr + spread * normal(length),
            "generation_logprobs": curr + spread * normal(length),
            "reference_policy_logprobs": curr + spread * normal(length),
            "advantages": normal(1).expand(length).clone() + 0.1 * normal(length),
            "token_mask": (torch.rand(length, generator=generator) < 0.8).double(),
        }
        samples.append(
            Sample(
                curr=curr.to(dtype),
                columns={name: value.to(dtype) for name, value in columns.items()},
                sample_mask=float(torch.rand(1, generator=generator) < 0.85),
                reward=float(normal(1)),
            )
        )
    return samples


def counts(samples: list[Sample]) -> tuple[int, int]:
    """(sequences, tokens) that count."""
    return sum(s.sample_mask > 0 for s in samples), sum(len(s.trained) for s in samples)


def padded(samples: list[Sample], extra: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """curr [B, S] (a leaf) and the batch; what stands in the padding is NaN, to see that nobody reads it."""
    width = max(len(s.curr) for s in samples) + extra

    def rows(values: list[Tensor], fill: float) -> Tensor:
        out = values[0].new_full((len(values), width), fill)
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = value
        return out

    batch: dict[str, Any] = {
        name: rows([s.columns[name] for s in samples], 0.0 if name == "token_mask" else math.nan)
        for name in COLUMNS
    }
    batch["sample_mask"] = torch.tensor([s.sample_mask for s in samples])
    batch["rewards"] = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    return rows([s.curr for s in samples], math.nan).requires_grad_(), batch


def packed(samples: list[Sample], padding: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """curr [1, T] (a leaf) and the batch with segments; padding is one more segment, filled with NaN."""

    def row(values: list[Tensor], fill: float) -> Tensor:
        return torch.cat([*values, values[0].new_full((padding,), fill)])[None]

    batch: dict[str, Any] = {
        name: row([s.columns[name] for s in samples], 0.0 if name == "token_mask" else math.nan)
        for name in COLUMNS
    }
    lengths = [len(s.curr) for s in samples] + [padding]
    batch["segments"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    batch["num_segments"] = len(samples)
    batch["sample_mask"] = torch.tensor([s.sample_mask for s in samples])
    batch["rewards"] = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    return row([s.curr for s in samples], math.nan).requires_grad_(), batch


def gradients(samples: list[Sample], curr: Tensor) -> list[Tensor]:
    """The gradient of each sample's log-probs, from either layout."""
    grad = curr.grad
    assert grad is not None
    if grad.shape[0] == len(samples) and (len(samples) > 1 or grad.shape[1] == len(samples[0].curr)):
        return [g[: len(s.curr)] for s, g in zip(samples, grad, strict=True)]
    flat = grad[0, : sum(len(s.curr) for s in samples)]
    return list(torch.split(flat, [len(s.curr) for s in samples]))


def reference_loss(cfg: Any, samples: list[Sample]) -> tuple[float, list[Tensor], dict[str, float]]:
    """Loss, gradient of each sample's log-probs, metrics: over all samples at once."""
    valid_seqs, valid_toks = counts(samples)
    curr = [s.curr.detach().double().requires_grad_() for s in samples]
    policy, penalty, nll = [], [], []  # per sequence: lists of per-token values
    seen = SimpleNamespace(ratio=[], clipped=[], low=[], high=[], dual=[])
    for s, c in zip(samples, curr, strict=True):
        old, gen, ref, adv, _ = (s.columns[name].double() for name in COLUMNS)
        use = s.trained
        terms, kls = [], []
        for t in use:
            before = c[t].detach() if cfg.force_on_policy_ratio else old[t]
            log_r = c[t] - before
            if cfg.sequence_level_importance_ratios:
                olds = c.detach() if cfg.force_on_policy_ratio else old
                log_r = sum(c[u] - olds[u] for u in use) / len(use)
            r = torch.exp(log_r)
            clip = torch.clamp(r, 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
            a = adv[t]
            if cfg.disable_ppo_ratio:
                clip = r
                term = -a * c[t]
            elif cfg.use_cispo:
                term = -a * clip.detach() * c[t]
            else:
                term = torch.max(-a * r, -a * clip)
                if cfg.ratio_clip_c is not None and a < 0:
                    term = torch.min(term, -a * cfg.ratio_clip_c)
            terms.append(term * _weight(cfg, s, t, old, gen)[1])
            kls.append(_kl_term(cfg, c[t], ref[t], gen[t]))
            seen.ratio.append(float(r.detach()))
            seen.clipped.append(float(clip.detach()))
            cuts = 0 if cfg.disable_ppo_ratio else 1
            down, up = r < 1 - cfg.ratio_clip_min, r > 1 + cfg.ratio_clip_max
            if not cfg.use_cispo:
                down, up = down and a < 0, up and a > 0
            seen.low.append(cuts * bool(down))
            seen.high.append(cuts * bool(up))
            seen.dual.append(bool(cfg.ratio_clip_c is not None and r > cfg.ratio_clip_c and a < 0))
        policy.append(terms)
        penalty.append(kls)
        nll.append([-c[t] for t in use] if s.reward > 0 else [])

    def reduce(by_sequence: list[list[Tensor]]) -> Tensor:
        if cfg.token_level_loss:
            return sum((sum(v) for v in by_sequence), torch.zeros(())) / max(valid_toks, 1)
        return sum((sum(v) / len(v) for v in by_sequence if v), torch.zeros(())) / max(valid_seqs, 1)

    policy_loss = reduce(policy)
    loss = policy_loss
    metrics = {"policy_loss": policy_loss}
    if cfg.reference_policy_kl_penalty and not cfg.use_kl_in_reward:
        metrics["kl_penalty"] = reduce(penalty)
        loss = loss + cfg.reference_policy_kl_penalty * metrics["kl_penalty"]
    if cfg.positive_example_nll_weight:
        metrics["positive_nll_loss"] = sum((sum(v) for v in nll), torch.zeros(())) / max(valid_toks, 1)
        loss = loss + cfg.positive_example_nll_weight * metrics["positive_nll_loss"]
    if loss.requires_grad:
        loss.backward()
    metrics["loss"] = loss
    metrics["num_valid_samples"] = valid_seqs
    for name, values in (("probs_ratio", seen.ratio), ("probs_ratio_clamped", seen.clipped)):
        metrics[name] = sum(values) / max(valid_toks, 1)
        metrics[f"{name}_min"] = min(values, default=math.inf)
        metrics[f"{name}_max"] = max(values, default=-math.inf)
    metrics["clip_fraction_low"] = sum(seen.low) / max(valid_toks, 1)
    metrics["clip_fraction_high"] = sum(seen.high) / max(valid_toks, 1)
    if cfg.ratio_clip_c is not None:
        metrics["clip_fraction_dual"] = sum(seen.dual) / max(valid_toks, 1)
    metrics |= _mismatch(cfg, samples, valid_seqs, valid_toks)
    grads = [torch.zeros_like(c) if c.grad is None else c.grad for c in curr]
    return (
        float(loss.detach()),
        grads,
        {name: float(torch.as_tensor(v).detach()) for name, v in metrics.items()},
    )


def _weight(cfg: Any, s: Sample, t: int, old: Tensor, gen: Tensor) -> tuple[float, float, bool]:
    """(raw weight, weight in the loss, outside the bounds) of token t."""
    geometric = math.exp(sum(float(old[u] - gen[u]) for u in s.trained) / len(s.trained))
    raw = geometric if cfg.sequence_level_importance_ratios else math.exp(float(old[t] - gen[t]))
    kind, high = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    weight, outside = raw, False
    if kind == "tis":
        weight, outside = min(max(raw, low), high), not low <= raw <= high
    elif kind == "icepop":
        outside = not low <= raw <= high
        weight = 0.0 if outside else raw
    elif kind == "seq-mask-tis":
        outside = not low <= geometric <= high
        weight = 0.0 if outside else raw
    return raw, weight if cfg.use_importance_sampling_correction else 1.0, outside


def _kl(kind: str, x: Any, exp: Any = torch.exp) -> Any:
    return {"k1": lambda: -x, "k2": lambda: x * x / 2, "k3": lambda: exp(x) - 1 - x}[kind]()


def _kl_term(cfg: Any, c: Tensor, ref: Tensor, gen: Tensor) -> Tensor:
    x = ref - c
    bound = cfg.kl_input_clamp_value
    factor = torch.exp(c - (gen if cfg.use_on_policy_kl_approximation else c.detach()))
    if bound is not None:
        if abs(x) > bound:
            factor = factor.detach()
        x = torch.clamp(x, -bound, bound)
    value = factor * _kl(cfg.reference_policy_kl_type, x)
    bound = cfg.kl_output_clamp_value
    return value if bound is None else torch.clamp(value, -bound, bound)


def _mismatch(cfg: Any, samples: list[Sample], valid_seqs: int, valid_toks: int) -> dict[str, float]:
    kind = cfg.reference_policy_kl_type
    sums = dict.fromkeys(
        (
            "token_mult_prob_error",
            "gen_kl_error",
            "policy_kl_error",
            "js_divergence_error",
            "approx_entropy",
            "sequence_mult_prob_error",
        ),
        0.0,
    )
    weights = {"raw": [], "used": [], "outside": []}  # lists by sequence
    errors = []
    for s in samples:
        if not s.trained:
            continue
        old, gen = s.columns["prev_logprobs"].double(), s.columns["generation_logprobs"].double()
        row = {"raw": [], "used": [], "outside": []}
        sequence_error = 0.0
        for t in s.trained:
            p, g, c = float(old[t]), float(gen[t]), float(s.curr[t])
            m = math.log(0.5 * math.exp(p) + 0.5 * math.exp(g))
            sequence_error += math.exp(abs(g - p))
            sums["gen_kl_error"] += _kl(kind, p - g, math.exp)
            sums["policy_kl_error"] += _kl(kind, g - p, math.exp)
            sums["js_divergence_error"] += 0.5 * (_kl("k3", p - m, math.exp) + _kl("k3", g - m, math.exp))
            sums["approx_entropy"] -= math.exp(c - g) * c
            raw, _, outside = _weight(cfg, s, t, old, gen)
            forced = SimpleNamespace(**{**vars(cfg), "use_importance_sampling_correction": True})
            row["raw"].append(raw)
            row["used"].append(_weight(forced, s, t, old, gen)[1])
            row["outside"].append(outside)
        sums["token_mult_prob_error"] += sequence_error
        errors.append(sequence_error / len(s.trained))
        for name, values in row.items():
            weights[name].append(values)
    sums["sequence_mult_prob_error"] = sum(errors)
    metrics = {
        name: value / max(valid_seqs if name.startswith("sequence") else valid_toks, 1)
        for name, value in sums.items()
    }
    metrics["sequence_mult_prob_error_max"] = max(errors, default=-math.inf)

    def mean(name: str, by_sequence: bool) -> float:
        if by_sequence:
            return sum(sum(v) / len(v) for v in weights[name]) / max(valid_seqs, 1)
        return sum(sum(v) for v in weights[name]) / max(valid_toks, 1)

    by_sequence = cfg.sequence_level_importance_ratios
    metrics["sampling_importance_ratio"] = mean("used", by_sequence)
    metrics["sampling_importance_ratio_before_truncation"] = mean("raw", by_sequence)
    kind = cfg.truncated_importance_sampling_type
    if kind:
        metrics["is_oob_ratio"] = mean("outside", by_sequence or kind == "seq-mask-tis")
    return metrics
