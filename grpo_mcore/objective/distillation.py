"""Distillation: the teacher's advantage of sampled tokens with its metrics, and the loss over the whole vocabulary,
whose divergences parallel/divergence.py computes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_mcore.objective.kl import every_sample
from grpo_mcore.objective.reduce import Count, MaskedTokens
from grpo_mcore.recipe import DivergenceConfig, DivergenceKind

LOG_ZERO = -100.0
"""Log-prob of the teacher for tokens outside its top k, where they count (NeMo RL's zero_outside_topk)."""


class Divergence(NamedTuple):
    """A divergence of the teacher's distribution q and the policy's p over the vocabulary.

    forward: KL(q || p). reverse: KL(p || q). mixed: weight * forward + (1 - weight) * reverse.
    jsd: with beta = `weight` and m = beta q + (1 - beta) p, beta KL(q || m) + (1 - beta) KL(p || m), the generalised
    Jensen-Shannon divergence (arXiv 2306.13649); by definition forward for beta 0 and reverse for beta 1.
    `top_k`: q is the softmax over the teacher's k most likely tokens, and so is p; with `zero_outside` p is over the
    whole vocabulary, and log q is LOG_ZERO outside the k.
    """

    kind: DivergenceKind = "forward"
    weight: float = 0.5
    top_k: int | None = None
    zero_outside: bool = False

    @property
    def shares(self) -> tuple[float, float] | None:
        """Weights of the forward and of the reverse KL; None for a Jensen-Shannon divergence between them."""
        if self.kind == "jsd" and 0 < self.weight < 1:
            return None
        forward = {"forward": 1.0, "reverse": 0.0, "mixed": self.weight, "jsd": 1.0 - self.weight}[self.kind]
        return forward, 1.0 - forward


GAP_METRIC = "on_policy_distillation/teacher_student_logprob_gap_mean"
"""Mean of the teacher's log-prob minus the policy's over sampled tokens."""


class DistillationLossFn:
    """loss = mean over trained tokens of the divergence between teacher and policy. `cfg`: the recipe's
    on_policy_distillation.divergence."""

    def __init__(self, cfg: DivergenceConfig) -> None:
        weight = cfg.jsd_beta if cfg.kl_type == "jsd" else cfg.mixed_kl_weight
        self.divergence = Divergence(cfg.kl_type, weight, cfg.topk_logits_k, cfg.zero_outside_topk)
        self.temperature = cfg.temperature

    def __call__(
        self, curr_logprobs: Tensor, batch: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the loss, and its metrics. All are float64 scalars.

        Shapes, masks and counts as for `ClippedPGLossFn`; the batch needs token_mask, sample_mask, divergences (with
        their gradient) and teacher_logprobs, both as curr_logprobs.
        """
        tokens = MaskedTokens.from_batch(curr_logprobs.shape, batch, global_valid_seqs, global_valid_toks)
        loss = tokens.mean(tokens.column(batch["divergences"], "divergences"))
        gap = batch["teacher_logprobs"].detach() - curr_logprobs.detach()
        metrics = {
            "loss": loss.detach(),
            GAP_METRIC: tokens.mean(tokens.column(gap, "teacher_logprobs")),
            "num_valid_samples": tokens.num_samples,
        }
        return loss, metrics


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
