"""Log-probabilities of tokens from hidden states, over a vocabulary split across tensor-parallel ranks.

Only `chunk` tokens have logits at a time, forward and backward: [chunk, vocabulary / TP] float32 is all that exists.
The backward pass computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
    chunk: int,
) -> Tensor:
    """log softmax(hidden @ weight.T / temperature)[target], float32 [N].

    hidden [N, H], the same on every rank of `group`; weight [rows, H], this rank's rows of the output layer, the first
    of which is token `vocab_start`; rows at or past `vocab_size` are padding and get no probability; targets int64 [N].
    The gradient of `hidden` is this rank's part: the caller's region function sums it over the group.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, group, vocab_start, vocab_size, temperature, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: ProcessGroup | None,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        ctx.rows = max(0, min(weight.size(0), vocab_size - vocab_start))
        ctx.start, ctx.temperature, ctx.chunk = vocab_start, temperature, chunk
        logprobs = torch.empty(hidden.size(0), dtype=torch.float32, device=hidden.device)
        log_normalizers = torch.empty_like(logprobs)
        for at in range(0, hidden.size(0), chunk):
            part = slice(at, at + chunk)
            logits = _logits(hidden[part], weight[: ctx.rows], temperature)
            largest = logits.amax(-1) if ctx.rows else torch.full_like(logprobs[part], -torch.inf)
            _reduce(largest, ReduceOp.MAX, group)
            local, mine = _local_targets(targets[part], vocab_start, ctx.rows)
            # One collective for both sums: exp(logit - max) over the vocabulary, and the target's own logit.
            sums = torch.zeros(2, largest.size(0), dtype=torch.float32, device=hidden.device)
            if ctx.rows:
                target_logits = logits.gather(1, local[:, None]).squeeze(1) - largest
                sums[1] = torch.where(mine, target_logits, 0.0)
                sums[0] = logits.sub_(largest[:, None]).exp_().sum(-1)
            _reduce(sums, ReduceOp.SUM, group)
            log_sum = sums[0].log()
            logprobs[part] = sums[1] - log_sum
            log_normalizers[part] = largest + log_sum
        ctx.save_for_backward(hidden, weight, targets, log_normalizers)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_normalizers = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        used = weight[: ctx.rows]
        for at in range(0, hidden.size(0), ctx.chunk) if ctx.rows else ():
            part = slice(at, at + ctx.chunk)
            logits = _logits(hidden[part], used, ctx.temperature)
            local, mine = _local_targets(targets[part], ctx.start, ctx.rows)
            # d logprob / d logits = (onehot - softmax) / temperature
            scale = (grad[part] / ctx.temperature)[:, None]
            grad_logits = logits.sub_(log_normalizers[part][:, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(1, local[:, None], torch.where(mine[:, None], scale, 0.0))
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, used, out=grad_hidden[part])
            if weight.dtype == torch.float32:
                grad_weight[: ctx.rows].addmm_(grad_logits.t(), hidden[part])
            else:  # accumulated in float32
                grad_weight[: ctx.rows] += grad_logits.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _local_targets(targets: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each target on this rank (clamped), and whether it is on this rank."""
    local = targets - start
    return local.clamp(0, max(rows - 1, 0)), (local >= 0) & (local < rows)


def _reduce(tensor: Tensor, op: Any, group: ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        all_reduce(tensor, op=op, group=group)
