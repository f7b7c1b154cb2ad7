"""Passes of the policy that tools ask for: each layer's output by two numbers a token, enough to find the first layer
in which two computations of a step differ; and inner products of the gradients of several losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch
from grpo_mcore.objective import combine_metrics
from grpo_mcore.objective.combine import CombinedMetrics
from grpo_mcore.parallel.memory import free_gradients

if TYPE_CHECKING:
    from grpo_mcore.parallel.model import PolicyModel
    from grpo_mcore.parallel.policy import LossFn, Policy


def fixed_direction(hidden_size: int) -> Tensor:
    """Return the vector with which hidden states are multiplied, float64 [hidden size], of norm 1."""
    direction = torch.randn(hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return direction / direction.norm()


def trace_layers(policy: Policy, batches: Sequence[PackedBatch]) -> list[dict[int, Tensor]]:
    """Return, for each micro-batch, layer number (from 1) -> float64 [2, tokens of its samples]: the norm of the hidden
    state after the layer, and its product with a fixed random direction. Only of this rank's layers. Collective.
    """
    traces: dict[int, list[Tensor]] = defaultdict(list)
    direction = fixed_direction(policy.shape.hidden_size).to(policy.device)

    def keep(network: PolicyModel, layer: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if policy.layout.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(hidden)
        hidden = hidden[:, 0].to(torch.float64)
        traces[layer.layer_number].append(network.by_token(torch.stack([hidden.norm(dim=1), hidden @ direction])).cpu())

    networks = [chunk.module for chunk in policy.chunks]
    hooks = [
        layer.register_forward_hook(partial(keep, network)) for network in networks for layer in network.decoder.layers
    ]
    try:
        policy.logprobs([replace(batch, shared=None) for batch in batches])
    finally:
        for hook in hooks:
            hook.remove()
    return [
        {number: rows[index][:, : sum(batch.lengths)] for number, rows in sorted(traces.items())}
        for index, batch in enumerate(batches)
    ]


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

    def product(first: list[list[Tensor]], second: list[list[Tensor]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=policy.device)
        for optimizer, parameters, others in zip(optimizers, first, second, strict=True):
            local = torch.zeros_like(total)
            for a, b in zip(parameters, others, strict=True):
                local += torch.dot(a.reshape(-1).to(torch.float64), b.reshape(-1).to(torch.float64))
            torch.distributed.all_reduce(local, group=optimizer.get_grad_stats_parallel_group())
            total += local
        return total

    optimizers = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    wholes = [gradient_of(loss)[0] for loss in losses]
    rows = [torch.stack([product(other, whole) for whole in wholes]) for other in wholes]
    metrics = []
    for part in parts:
        gradient, outputs = gradient_of(part)
        rows.append(torch.stack([product(gradient, whole) for whole in wholes]))
        metrics.append(combine_metrics(outputs) if outputs else {})
    return torch.stack(rows).cpu(), metrics
