"""On-policy distillation from log-probs of sampled tokens: the teacher's advantage, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective.kl_in_reward import every_sample


def teacher_gap(batch: Mapping[str, Any]) -> Tensor:
    """Return log pi_T(y_t) - log pi_S(y_t) of each trained token, 0 elsewhere, float64 in the shape of the log-probs.

    This is the advantage of on-policy distillation (MOPD, arXiv 2601.02780, equation 8), a constant in the loss: pi_S
    is the policy before the step's first update. Its mean over sampled tokens estimates -KL(pi_S || pi_T).
    batch: needs teacher_logprobs, prev_logprobs and token_mask; sample_mask is ignored. Raises ValueError if one is
    missing.
    """
    tokens = every_sample(batch)
    columns = []
    for name in ("teacher_logprobs", "prev_logprobs"):
        if batch.get(name) is None:
            raise ValueError(f"the teacher's advantage needs {name!r}; the batch has: {', '.join(sorted(batch))}")
        columns.append(tokens.column(batch[name].detach(), name))
    return (columns[0] - columns[1]).reshape(tokens.shape)


def distillation_metrics(
    gap_sum: Tensor, gap_square: Tensor, tokens: Tensor, advantages: Tensor, weight: float
) -> dict[str, float]:
    """Return teacher_student_logprob_gap_mean, and mean and standard deviation (adv_mean, adv_std) of the advantage
    a_i + weight * gap_t before its bounds, over all trained tokens of a step.

    float64 [samples] each: `gap_sum` and `gap_square` as in `sample_stats`, `tokens` the number of trained tokens, 0
    for samples that do not count, `advantages` a_i. The variance is the one within samples plus that of their means.
    """
    counted, total = tokens > 0, tokens.sum().clamp(min=1)
    means = torch.where(counted, advantages + weight * gap_sum / tokens.clamp(min=1), 0.0)
    mean = (tokens * means).sum() / total
    within = weight**2 * torch.where(counted, gap_square, 0.0).sum()
    variance = (within + (tokens * (means - mean).square()).sum()) / total
    return {
        "teacher_student_logprob_gap_mean": float(torch.where(counted, gap_sum, 0.0).sum() / total),
        "adv_mean": float(mean),
        "adv_std": float(variance.sqrt()),
    }
