"""Gradients whose bits do not depend on how samples are split into micro-batches or data-parallel ranks.

Each sample is computed in a row of its own, so its numbers depend on nothing else. The gradients of a rank's samples,
which are consecutive ones, are added in a binary tree over their numbers; the ranks' sums are the next level of that
tree. So two ranks add as one does: sums of two have no order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch


def backward_by_sample(
    chunks: Sequence[Any],
    batches: Sequence[PackedBatch],
    run: Callable[[Sequence[PackedBatch]], list[Any]],
    max_grad_norm: float | None,
) -> tuple[list[Any], float]:
    """Compute the gradient of `batches`, a sample each and padding at the end, clipped to `max_grad_norm`. Return
    (what `run` returns of them, norm before clipping). `chunks`: the rank's parts of the model. `run`: computes the
    forward and backward pass of some micro-batches. Collective."""
    from megatron.core import parallel_state

    schedule = chunks[0].module.config
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    finalize, outputs = schedule.finalize_model_grads_func, list[Any]()

    def alone(batch: PackedBatch) -> list[Tensor]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        outputs.extend(run([batch]))
        return [buffer.grad_data.clone() for buffer in buffers]

    def tree(few: Sequence[PackedBatch]) -> list[Tensor]:
        if len(few) == 1:
            return alone(few[0])
        left, right = tree(few[: len(few) // 2]), tree(few[len(few) // 2 :])
        return [first.add_(second) for first, second in zip(left, right, strict=True)]

    samples = [batch for batch in batches if batch.num_segments]
    schedule.finalize_model_grads_func = lambda *_, **__: None
    try:
        total = tree(samples)
        for padding in batches[len(samples) :]:  # the other ranks run as many passes
            alone(padding)
    finally:
        schedule.finalize_model_grads_func = finalize
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer, gradient in zip(buffers, total, strict=True):
        torch.distributed.all_reduce(gradient, group=group)
        # `finalize` adds up the ranks: one of them has the sum.
        buffer.grad_data.copy_(gradient)
    norm = _norm(chunks, buffers[0].grad_data.device)
    factor = max_grad_norm / (norm + 1e-6) if max_grad_norm and norm > max_grad_norm else 1.0
    for buffer in buffers:
        buffer.grad_data.mul_(factor if torch.distributed.get_rank(group) == 0 else 0.0)
    finalize(chunks)
    return outputs, norm


def _norm(chunks: Sequence[Any], device: torch.device) -> float:
    """Return the norm of the gradient, added up parameter by parameter in float64."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    square = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        for param in chunk.parameters():
            if (
                hasattr(param, "main_grad")
                and param_is_not_shared(param)
                and param_is_not_tensor_parallel_duplicate(param)
            ):
                square += param.main_grad.to(torch.float64).square().sum()
    torch.distributed.all_reduce(square, group=parallel_state.get_model_parallel_group())
    return float(square.sqrt())
