"""Log-probabilities of tokens, and entropies, from hidden states, over a vocabulary split across tensor-parallel ranks.

Only `chunk` tokens have logits at a time, and of these only a tile of the vocabulary. The backward pass computes them
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
    chunk: int,
    tile: int,
    entropy: bool = False,
) -> Tensor:
    """Return log softmax(hidden @ weight.T / temperature)[target], float32 [1, N].

    `entropy`: return [2, N], the second row being the entropy of the distribution, -sum p log p, in nats.

    hidden [N, H], the same on every rank of `group`; weight [rows, H], this rank's rows of the output layer, the first
    of which is token `vocab_start`; rows at or past `vocab_size` are padding and get no probability; targets int64 [N].
    `chunk` tokens and `tile` rows of the output layer (families.activations.TILES) have logits at a time.
    The gradient of `hidden` is this rank's part: the caller's region function sums it over the group.
    """
    return _TokenScores.apply(
        hidden, weight, targets, group, vocab_start, vocab_size, temperature, chunk, tile, entropy
    )


class _TokenScores(torch.autograd.Function):
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
        tile: int,
        entropy: bool,
    ) -> Tensor:
        rows = max(0, min(weight.size(0), vocab_size - vocab_start))
        ctx.rows, ctx.start, ctx.temperature, ctx.chunk, ctx.tile = rows, vocab_start, temperature, chunk, tile
        lowest = torch.finfo(torch.float32).min  # times 0 it is 0
        largest = torch.full((hidden.size(0),), lowest, dtype=torch.float32, device=hidden.device)
        # Of this rank's rows, e being exp(logit - largest): sum of e, the target's logit where it is one of them, and
        # for the entropy sum of e * (logit - largest).
        sums, chosen, energy = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(largest)
        for part in _slices(hidden.size(0), chunk):
            for span in _slices(rows, tile):
                logits = _logits(hidden[part], weight[span], temperature)
                local, mine = _in_tile(targets[part], vocab_start, span)
                chosen[part] += torch.where(mine, logits.gather(1, local[:, None]).squeeze(1), 0.0)
                before, most = largest[part], torch.maximum(largest[part], logits.amax(-1))
                logits.sub_(most[:, None])
                exps = logits.exp() if entropy else logits.exp_()
                if entropy:
                    energy[part] = _shifted(energy[part], sums[part], before - most) + torch.linalg.vecdot(exps, logits)
                sums[part] = sums[part] * (before - most).exp() + exps.sum(-1)
                largest[part] = most
        most = largest.clone()
        _reduce(most, ReduceOp.MAX, group)
        energy = _shifted(energy, sums, largest - most)
        totals = torch.stack([sums * (largest - most).exp(), chosen, energy])  # one collective for all
        _reduce(totals, ReduceOp.SUM, group)
        log_normalizers = most + totals[0].log()
        entropies = totals[0].log() - totals[2] / totals[0]
        ctx.save_for_backward(hidden, weight, targets, log_normalizers, entropies if entropy else None)
        logprobs = totals[1] - log_normalizers
        return torch.stack([logprobs, entropies] if entropy else [logprobs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_normalizers, entropies = ctx.saved_tensors
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        scale = grad / ctx.temperature
        for tile in _slices(ctx.rows, ctx.tile):
            used = weight[tile]
            of_tile = torch.zeros(used.shape, dtype=torch.float32, device=weight.device)
            for part in _slices(hidden.size(0), ctx.chunk):
                logits = _logits(hidden[part], used, ctx.temperature)
                local, mine = _in_tile(targets[part], ctx.start, tile)
                # With p = softmax(logits): d logprob / d logits = (onehot - p) / temperature,
                # d entropy / d logits = -p (log p + entropy) / temperature.
                factor = scale[0, part][:, None]
                all_logprobs = logits.sub_(log_normalizers[part][:, None])
                coefficient = factor
                if entropies is not None:
                    coefficient = (all_logprobs + entropies[part][:, None]).mul_(scale[1, part][:, None]).add_(factor)
                grad_logits = all_logprobs.exp_().mul_(-coefficient)
                grad_logits.scatter_add_(1, local[:, None], torch.where(mine[:, None], factor, 0.0))
                grad_logits = grad_logits.to(weight.dtype)
                grad_hidden[part] += grad_logits @ used  # accumulated in float32
                if grad_weight is not None:
                    of_tile += grad_logits.t() @ hidden[part]
            if grad_weight is not None:
                grad_weight[tile] = of_tile
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 8


def _shifted(energy: Tensor, sums: Tensor, by: Tensor) -> Tensor:
    """Return sum of e * (logit - largest) after `largest` has grown by -`by`."""
    return (energy + by * sums) * by.exp()


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, total)) for at in range(0, total, size))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _in_tile(targets: Tensor, start: int, tile: slice) -> tuple[Tensor, Tensor]:
    """Return the row of each target in a tile of this rank's rows (clamped), and whether it is in the tile."""
    local, size = targets - (start + tile.start), tile.stop - tile.start
    return local.clamp(0, size - 1), (local >= 0) & (local < size)


def _reduce(tensor: Tensor, op: Any, group: ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        all_reduce(tensor, op=op, group=group)
