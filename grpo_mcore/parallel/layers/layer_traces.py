"""Traces each layer's output by two numbers a token: enough to find the first layer in which two computations of a step
differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch

if TYPE_CHECKING:
    from grpo_mcore.parallel.model import PolicyModel
    from grpo_mcore.parallel.policy import Policy


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
