"""Compares a packed loss with a loop over its sequences: forward, backward and all metrics of one packed row.

    python benchmarks/loss.py [--tokens 32768] [--sequences 256] [--device cpu] [--json FILE]

Three ways to compute the same numbers. Their results are compared before they are timed:

packed       ClippedPGLossFn on the whole row, float64; one copy brings the metrics to the host.
sequences    the same loss function, called for each sequence on a slice of the row with the global counts, as in
             systems whose loss takes one padded sequence; metrics as above.
by hand      the same formulas for each sequence, written out in float32 with the minimum a loop needs: no checks, no
             choice of terms, no separate reads of metrics.

The loss has an asymmetric clip, the k3 KL to the reference, truncated importance sampling and a token-level mean.
Lengths are uneven, and the first fifth of a sequence is its prompt. Times are medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective import ClippedPGLossFn, combine_metrics, step_metrics, valid_counts

BETA, LOW, HIGH, BOUND = 0.01, 0.2, 0.28, 2.0
LOSS = ClippedPGLossFn(
    {
        "ratio_clip_min": LOW,
        "ratio_clip_max": HIGH,
        "reference_policy_kl_penalty": BETA,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": BOUND,
    }
)
COLUMNS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages", "token_mask")


class Row:
    """A packed row with random contents, and the counts that normalise it."""

    def __init__(self, tokens: int, sequences: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        cuts = (torch.randperm(tokens - 1, generator=generator)[: sequences - 1] + 1).sort().values.tolist()
        self.spans = list(zip([0, *cuts], [*cuts, tokens], strict=True))
        lengths = torch.tensor([end - start for start, end in self.spans])
        segments = torch.repeat_interleave(torch.arange(sequences), lengths)
        position = torch.arange(tokens) - torch.tensor([0, *cuts])[segments]

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(1, tokens, generator=generator)

        curr = -noise(1.0).abs()
        batch: dict[str, Any] = {
            "prev_logprobs": curr + noise(0.1),
            "generation_logprobs": curr + noise(0.1),
            "reference_policy_logprobs": curr + noise(0.3),
            "advantages": torch.randn(sequences, generator=generator)[segments][None],
            "token_mask": (position >= lengths[segments] // 5).float()[None],
            "sample_mask": torch.ones(sequences),
            "segments": segments,
        }
        self.curr = curr.to(device)
        self.batch = {name: value.to(device) for name, value in batch.items()} | {"num_segments": sequences}
        seqs, toks = valid_counts(self.batch)
        self.seqs, self.toks = int(seqs), int(toks)


def packed(row: Row, curr: Tensor) -> tuple[Tensor, dict[str, float]]:
    loss, metrics = LOSS(curr, row.batch, row.seqs, row.toks)
    loss.backward()
    return loss.detach(), step_metrics([combine_metrics([metrics])])


def by_sequence(row: Row, curr: Tensor) -> tuple[Tensor, dict[str, float]]:
    total, parts = torch.zeros((), dtype=torch.float64, device=curr.device), []
    for i, (start, end) in enumerate(row.spans):
        batch = {name: row.batch[name][:, start:end] for name in COLUMNS}
        batch["sample_mask"] = row.batch["sample_mask"][i : i + 1]
        loss, metrics = LOSS(curr[:, start:end], batch, row.seqs, row.toks)
        total = total + loss
        parts.append(metrics)
    total.backward()
    return total.detach(), step_metrics([combine_metrics(parts)])


SUMS = (
    "policy_loss", "kl_penalty", "probs_ratio", "probs_ratio_clamped", "clip_fraction_low", "clip_fraction_high",
    "sampling_importance_ratio", "sampling_importance_ratio_before_truncation", "is_oob_ratio",
    "token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "approx_entropy",
)  # fmt: skip


def by_hand(row: Row, curr: Tensor) -> tuple[Tensor, dict[str, float]]:
    total, sums, lows, highs, errors = torch.zeros((), device=curr.device), [], [], [], []
    for start, end in row.spans:
        if end - start < 2:
            continue
        c = curr[0, start + 1 : end]
        p, g, ref, a, mask = (row.batch[name][0, start + 1 : end] for name in COLUMNS)
        ratio = torch.exp(c - p)
        clipped = ratio.clamp(1 - LOW, 1 + HIGH)
        raw = torch.exp(p - g)
        weight = raw.clamp(0, BOUND)
        policy = (torch.maximum(-a * ratio, -a * clipped) * weight * mask).sum() / row.toks
        x = ref - c
        kl = (torch.exp(c - c.detach()) * (torch.exp(x) - 1 - x) * mask).sum() / row.toks
        total = total + policy + BETA * kl
        with torch.no_grad():
            d = p - g
            m = torch.logaddexp(p, g) - math.log(2)
            error = torch.exp(d.abs())
            js = (torch.exp(p - m) - 1 - (p - m) + torch.exp(g - m) - 1 - (g - m)) / 2
            by_token = torch.stack(
                [
                    ratio, clipped, ((ratio < 1 - LOW) & (a < 0)).float(), ((ratio > 1 + HIGH) & (a > 0)).float(),
                    weight, raw, (raw > BOUND).float(), error, torch.exp(d) - 1 - d, torch.exp(-d) - 1 + d, js,
                    -torch.exp(c - g) * c,
                ]
            )  # fmt: skip
            trained = mask > 0
            sums.append(torch.cat([torch.stack([policy, kl]), by_token @ mask / row.toks]))
            lows.append(torch.where(trained, by_token[:2], torch.inf).amin(1))
            highs.append(torch.where(trained, by_token[:2], -torch.inf).amax(1))
            errors.append(torch.stack([(error * mask).sum(), mask.sum()]))
    total.backward()
    mean, low, high = torch.stack(sums).sum(0), torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    error, tokens = torch.stack(errors).unbind(1)
    error = error[tokens > 0] / tokens[tokens > 0]
    of_sequences = torch.stack([error.sum() / row.seqs, error.quantile(0.95), error.max()])
    names = ("sequence_mult_prob_error", "sequence_mult_prob_error_p95", "sequence_mult_prob_error_max")
    extremes = [f"{name}_{end}" for end in ("min", "max") for name in ("probs_ratio", "probs_ratio_clamped")]
    values = torch.cat([mean, low, high, of_sequences]).tolist()
    found = dict(zip((*SUMS, *extremes, *names), values, strict=True))
    return total.detach(), found | {"loss": float(total.detach()), "num_valid_samples": float(row.seqs)}


def check(row: Row, ways: dict[str, Callable[..., Any]]) -> None:
    """Exit unless all ways give the same loss, gradient and metrics within their precision. Also warms them up."""
    found = {}
    for name, way in ways.items():
        curr = row.curr.clone().requires_grad_()
        loss, metrics = way(row, curr)
        assert curr.grad is not None
        found[name] = float(loss), curr.grad, metrics
    loss, grad, metrics = found["packed"]
    for name, (other_loss, other_grad, other_metrics) in found.items():
        close = math.isclose(loss, other_loss, rel_tol=1e-4) and torch.allclose(grad, other_grad, rtol=1e-3, atol=1e-8)
        odd = [m for m in metrics if not math.isclose(metrics[m], other_metrics.get(m, math.nan), rel_tol=1e-3)]
        if not close or odd:
            raise SystemExit(f"{name} differs from packed: loss {other_loss} and {loss}, metrics {odd}")


def milliseconds(row: Row, ways: dict[str, Callable[..., Any]], repeats: int) -> dict[str, float]:
    """Return the median times of forward, backward and metrics. The ways alternate, so that other load is shared."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            curr = row.curr.clone().requires_grad_()
            if curr.is_cuda:
                torch.cuda.synchronize(curr.device)
            start = time.perf_counter()
            way(row, curr)
            if curr.is_cuda:
                torch.cuda.synchronize(curr.device)
            spent[name].append(1000 * (time.perf_counter() - start))
    return {name: median(times) for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="number of tokens of the row")
    parser.add_argument("--sequences", type=int, default=256, help="number of its sequences")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: torch's)")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each way")
    parser.add_argument(
        "--json",
        nargs="?",
        const=Path("/dev/stdout"),
        type=Path,
        help="write results to stdout, or to FILE",
    )
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    row = Row(args.tokens, args.sequences, torch.device(args.device))
    ways: dict[str, Callable[..., Any]] = {"packed": packed, "sequences": by_sequence, "by hand": by_hand}
    check(row, ways)
    found = milliseconds(row, ways, args.repeats)
    ratios = {name: spent / found["packed"] for name, spent in found.items() if name != "packed"}
    gpu = row.curr.is_cuda
    where = torch.cuda.get_device_name(row.curr.device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    shortest, longest = (f(end - start for start, end in row.spans) for f in (min, max))
    print(f"{args.tokens:,} tokens, {args.sequences} sequences of {shortest} to {longest}, on {where}")
    for name, spent in found.items():
        print(f"{name:>10} {spent:>9.2f} ms" + (f"   {ratios[name]:>5.1f} x packed" if name in ratios else ""))
    if args.json:
        result = {
            "tokens": args.tokens, "sequences": args.sequences, "device": where, "torch": torch.__version__,
            "milliseconds": found, "times_packed": ratios,
        }  # fmt: skip
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
