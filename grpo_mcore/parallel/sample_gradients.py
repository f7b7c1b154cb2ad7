"""Gradients whose bits do not depend on how samples are split into micro-batches or data-parallel ranks.

Each sample is computed in a row of its own, so its numbers depend on nothing else. The gradients of a rank's samples,
which are consecutive ones, are added in a binary tree over their numbers; the ranks' sums are the next level of that
tree. So two ranks add as one does: sums of two have no order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch

if TYPE_CHECKING:
    from grpo_mcore.parallel.policy import Policy


def backward_by_sample(
    policy: Policy, batches: Sequence[PackedBatch], run: Callable[[Sequence[PackedBatch]], list[Any]]
) -> tuple[list[Any], float]:
    """Compute the gradient of `batches`, a sample each and padding at the end, clipped to policy.max_grad_norm. Return
    (what `run` returns of them, norm before clipping). `run`: forward and backward pass of some micro-batches.
    Collective."""
    from megatron.core import parallel_state

    schedule = policy.chunks[0].module.config
    buffers = [buffer for chunk in policy.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    finalize, outputs = schedule.finalize_model_grads_func, list[Any]()

    def alone(batch: PackedBatch) -> list[Tensor]:
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        outputs.extend(run([batch]))
        return [buffer.grad_data.clone() for buffer in buffers]

    def tree(few: Sequence[PackedBatch]) -> list[Tensor]:
        if len(few) == 1:
            return alone(few[0])
        left, right = tree(few[: len(few) // 2]), tree(few[len(few) // 2 :])
        return [one.add_(other) for one, other in zip(left, right, strict=True)]

    samples = [batch for batch in batches if batch.num_segments]
    schedule.finalize_model_grads_func = lambda *_, **__: None
    try:
        total = tree(samples)
        for padding in batches[len(samples) :]:  # the other ranks run as many passes
            alone(padding)
    finally:
        schedule.finalize_model_grads_func = finalize
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer, mine in zip(buffers, total, strict=True):
        torch.distributed.all_reduce(mine, group=group)
        # `finalize` adds up the ranks: one of them has the sum.
        buffer.grad_data.copy_(mine)
    norm = _norm(policy)
    limit = policy.config.max_grad_norm
    factor = limit / (norm + 1e-6) if limit and norm > limit else 1.0
    for buffer in buffers:
        buffer.grad_data.mul_(factor if torch.distributed.get_rank(group) == 0 else 0.0)
    finalize(policy.chunks)
    return outputs, norm


def _norm(policy: Policy) -> float:
    """Return the norm of the gradient, added up parameter by parameter in float64."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    square = torch.zeros((), dtype=torch.float64, device=policy.device)
    for chunk in policy.chunks:
        for param in chunk.parameters():
            if (
                hasattr(param, "main_grad")
                and param_is_not_shared(param)
                and param_is_not_tensor_parallel_duplicate(param)
            ):
                square += param.main_grad.to(torch.float64).square().sum()
    torch.distributed.all_reduce(square, group=parallel_state.get_model_parallel_group())
    return float(square.sqrt())
