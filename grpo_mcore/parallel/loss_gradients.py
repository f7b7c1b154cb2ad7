"""Compare the gradients that several losses give on the same data, on any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch
from grpo_mcore.objective import combine_metrics
from grpo_mcore.objective.combine import CombinedMetrics
from grpo_mcore.parallel.memory import free_gradients

if TYPE_CHECKING:
    from grpo_mcore.parallel.policy import LossFn, Policy


def gradient_products(
    policy: Policy,
    batches: Sequence[PackedBatch],
    losses: Sequence[LossFn],
    parts: Sequence[LossFn],
    *,
    global_valid_seqs: int,
    global_valid_toks: int,
) -> tuple[Tensor, list[CombinedMetrics]]:
    """Return (products, metrics of each part). products: float64 [losses + parts, losses], the inner product of each
    gradient with that of each loss, over all parameters and ranks. No weight changes. Collective; metrics are this
    data-parallel rank's share, empty but on the last stage.
    """

    def gradient_of(loss_fn: LossFn) -> tuple[list[list[Tensor]], list[Mapping[str, Any]]]:
        outputs = policy.backward(
            batches, loss_fn, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks
        )
        policy.optimizer.prepare_grads()
        gradients = [
            [gradient.detach().to(torch.float32, copy=True) for gradient in optimizer.get_main_grads_for_grad_norm()]
            for optimizer in optimizers
        ]
        free_gradients(policy.optimizer)
        return gradients, outputs

    def product(one: list[list[Tensor]], other: list[list[Tensor]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=policy.device)
        for optimizer, mine, its in zip(optimizers, one, other, strict=True):
            local = torch.zeros_like(total)
            for a, b in zip(mine, its, strict=True):
                local += torch.dot(a.reshape(-1).to(torch.float64), b.reshape(-1).to(torch.float64))
            torch.distributed.all_reduce(local, group=optimizer.get_grad_stats_parallel_group())
            total += local
        return total

    optimizers = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    wholes = [gradient_of(loss)[0] for loss in losses]
    rows = [torch.stack([product(one, whole) for whole in wholes]) for one in wholes]
    metrics = []
    for part in parts:
        gradient, outputs = gradient_of(part)
        rows.append(torch.stack([product(gradient, whole) for whole in wholes]))
        metrics.append(combine_metrics(outputs) if outputs else {})
    return torch.stack(rows).cpu(), metrics
