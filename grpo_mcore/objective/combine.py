"""Combines the metrics of micro-batches, ranks and optimizer steps into those of a step.

Each part is a share of a global mean, already divided by the global count, so most parts are summed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Reduction = Literal["sum", "min", "max", "values"]
CombinedMetrics: TypeAlias = dict[str, float | list[float]]

METRIC_REDUCTIONS: dict[str, Reduction] = {
    "loss": "sum",
    "policy_loss": "sum",
    "kl_penalty": "sum",
    "positive_nll_loss": "sum",
    "preference_loss": "sum",
    "sft_loss": "sum",
    "accuracy": "sum",
    "rewards_chosen_mean": "sum",
    "rewards_rejected_mean": "sum",
    "rewards_margin_mean": "sum",
    "rewards_mean": "sum",
    "reward_error_mean": "sum",
    "on_policy_distillation/teacher_student_logprob_gap_mean": "sum",
    "num_valid_samples": "sum",
    "num_valid_tokens": "sum",
    "num_sampled_image_tokens": "sum",
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
    "sequence_mult_prob_error_p95": "values",
    "sequence_mult_prob_error_max": "max",
    "gen_kl_error": "sum",
    "policy_kl_error": "sum",
    "js_divergence_error": "sum",
    "approx_entropy": "sum",
    "entropy": "sum",
    "trajectory_age_mean": "sum",
    "trajectory_age_max": "max",
    "token_share": "sum",
    "values_mean": "sum",
    "values_min": "min",
    "values_max": "max",
    "returns_mean": "sum",
    "returns_square": "sum",
    "value_error_mean": "sum",
    "value_error_square": "sum",
    "value_clip_fraction": "sum",
}
"""How the parts of each metric are combined; `name/age_a` is combined as `name`. A quantile needs all values: a part
holds one per sequence, -inf for a sequence without any."""

CUSTOM = "custom/"
"""Prefix of the metrics of a custom loss. They are shares of a mean, and summed; those that begin with `custom/min_`
and `custom/max_` are minima and maxima."""

_EMPTY = {"min": math.inf, "max": -math.inf}


def combine_metrics(parts: Sequence[Mapping[str, Any]]) -> CombinedMetrics:
    """Return the parts of micro-batches (tensors) or of ranks (floats, lists of floats) combined into one part.

    Costs a single copy from the device. Empty parts are skipped. Without a valid token a minimum is +inf and a maximum
    -inf, which change nothing when combined further. Raises ValueError if names differ or are not in METRIC_REDUCTIONS.
    """
    parts = [part for part in parts if part]
    if not parts:
        return {}
    names = list(parts[0])
    for part in parts:
        if set(part) != set(names):
            raise ValueError(f"metrics of two parts differ in: {', '.join(sorted(set(part) ^ set(names)))}")
    scalars = [name for name in names if _reduction(name) != "values"]
    lists = [name for name in names if _reduction(name) == "values"]
    count = len(parts) * len(scalars)
    values = [[_column(part[name]) for part in parts] for name in lists]
    if values or any(isinstance(part[name], Tensor) for part in parts for name in scalars):
        columns = [_column(part[name]) for part in parts for name in scalars]
        host = torch.cat([*columns, *(column for of_name in values for column in of_name)]).cpu()
    else:
        host = torch.tensor([part[name] for part in parts for name in scalars], dtype=torch.float64)

    table = host[:count].reshape(len(parts), len(scalars))
    reduced = {"sum": table.sum(0).tolist(), "min": table.amin(0).tolist(), "max": table.amax(0).tolist()}
    combined: CombinedMetrics = {name: reduced[_reduction(name)][i] for i, name in enumerate(scalars)}
    rest = host[count:].split([sum(column.numel() for column in of_name) for of_name in values])
    kept = {name: [v for v in row.tolist() if v != -math.inf] for name, row in zip(lists, rest, strict=True)}
    return {name: kept[name] if name in kept else combined[name] for name in names}


def step_metrics(by_optimizer_step: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a step from the combined metrics of each of its optimizer steps.

    Means are averaged over the optimizer steps, num_* are summed, minima and maxima are those of all steps, and the p95
    is over all sequences. A mean by age is over the tokens of this age: their sum divided by the token share. Minima,
    maxima, quantiles and means over nothing are left out.
    """
    count = sum(1 for metrics in by_optimizer_step if metrics)
    combined = combine_metrics(by_optimizer_step)
    step: dict[str, float] = {}
    for name, value in combined.items():
        reduction = _reduction(name)
        base, _, age = name.partition("/age_")
        if isinstance(value, list):
            if value:
                step[name] = float(torch.tensor(value, dtype=torch.float64).quantile(0.95))
        elif reduction != "sum":
            if value != _EMPTY[reduction]:
                step[name] = value
        elif age and base != "token_share" and not name.startswith(CUSTOM):
            share = combined[f"token_share/age_{age}"]
            assert isinstance(share, float)
            if share > 0:
                step[name] = value / share
        else:
            step[name] = value if name.removeprefix(CUSTOM).startswith("num_") else value / count
    return step


def _reduction(name: str) -> Reduction:
    base = name.partition("/age_")[0]
    if name.startswith(CUSTOM):
        return {"min_": "min", "max_": "max"}.get(name[len(CUSTOM) :][:4], "sum")  # type: ignore[return-value]
    if base not in METRIC_REDUCTIONS:
        raise ValueError(f"metric {name!r} has no reduction; declare one in METRIC_REDUCTIONS")
    return METRIC_REDUCTIONS[base]


def _column(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).reshape(-1)
