"""Log-probabilities of tokens, and entropies, from hidden states, over a vocabulary split across tensor-parallel ranks.

Only `chunk` tokens have logits at a time, and of these only a tile of the vocabulary. The backward pass computes them
again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_gather, all_reduce

LOWEST = -1e30
"""The logit of a token that cannot be drawn. Its exponential is 0; sums of it are finite, so 0 times them is 0."""


class Cut(NamedTuple):
    """Top-k and top-p sampling: tokens are drawn from the `top_k` most likely ones (None: all), and of these from the
    fewest that have `top_p` of their probability together. After the temperature and in this order, as in vLLM."""

    top_k: int | None = None
    top_p: float = 1.0


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
    cut: Cut | None = None,
) -> Tensor:
    """Return log softmax(hidden @ weight.T / temperature)[target], float32 [1, N].

    `entropy`: return [2, N], the second row being the entropy of the distribution, -sum p log p, in nats.
    `cut`: of the distribution over the tokens that it leaves, and the target, which an engine with other weights or
    another rounding may have drawn. What is left counts as constant: gradients flow through the kept logits.

    hidden [N, H], the same on every rank of `group`; weight [rows, H], this rank's rows of the output layer, the first
    of which is token `vocab_start`; rows at or past `vocab_size` are padding and get no probability; targets int64 [N].
    `chunk` tokens and `tile` rows of the output layer (families.activations.TILES) have logits at a time; a cut needs
    the logits of `chunk` tokens over the whole vocabulary.
    The gradient of `hidden` is this rank's part: the caller's region function sums it over the group.
    """
    rows = max(0, min(weight.size(0), vocab_size - vocab_start))
    floor = None
    if cut is not None:
        floor = _lowest_kept(hidden.detach(), weight.detach(), rows, group, temperature, chunk, tile, cut)
    return _TokenScores.apply(
        hidden, weight, targets, floor, group, vocab_start, rows, temperature, chunk, tile, entropy
    )


def _lowest_kept(
    hidden: Tensor,
    weight: Tensor,
    rows: int,
    group: ProcessGroup | None,
    temperature: float,
    chunk: int,
    tile: int,
    cut: Cut,
) -> Tensor:
    """Return the lowest logit that each token's cut keeps, float32 [N]."""
    floor = torch.empty(hidden.size(0), dtype=torch.float32, device=hidden.device)
    for part in slices(hidden.size(0), chunk):
        logits = torch.full((len(floor[part]), weight.size(0)), LOWEST, dtype=torch.float32, device=hidden.device)
        for span in slices(rows, tile):
            logits[:, span] = logits_of(hidden[part], weight[span], temperature)
        if group is not None and group.size() > 1:
            shares = [torch.empty_like(logits) for _ in range(group.size())]
            all_gather(shares, logits, group=group)
            logits = torch.cat(shares, -1)
        likeliest = logits.topk(min(cut.top_k or logits.size(-1), logits.size(-1))).values
        probabilities = likeliest.softmax(-1)
        kept = probabilities.cumsum(-1) - probabilities < cut.top_p
        floor[part] = likeliest.masked_fill(~kept, torch.inf).amin(-1)
    return floor


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        floor: Tensor | None,
        group: ProcessGroup | None,
        vocab_start: int,
        rows: int,
        temperature: float,
        chunk: int,
        tile: int,
        entropy: bool,
    ) -> Tensor:
        ctx.rows, ctx.start, ctx.temperature, ctx.chunk, ctx.tile = rows, vocab_start, temperature, chunk, tile
        largest = torch.full((hidden.size(0),), LOWEST, dtype=torch.float32, device=hidden.device)
        # Of this rank's rows, e being exp(logit - largest): sum of e, the target's logit where it is one of them, and
        # for the entropy sum of e * (logit - largest).
        sums, chosen, energy = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(largest)
        for part in slices(hidden.size(0), chunk):
            for span in slices(rows, tile):
                logits = logits_of(hidden[part], weight[span], temperature)
                local, in_span = in_tile(targets[part], vocab_start, span)
                chosen[part] += torch.where(in_span, logits.gather(1, local[:, None]).squeeze(1), 0.0)
                if floor is not None:
                    _drop_below(logits, floor[part], local, in_span)
                before, most = largest[part], torch.maximum(largest[part], logits.amax(-1))
                logits.sub_(most[:, None])
                exps = logits.exp() if entropy else logits.exp_()
                if entropy:
                    energy[part] = _shifted(energy[part], sums[part], before - most) + torch.linalg.vecdot(exps, logits)
                sums[part] = sums[part] * (before - most).exp() + exps.sum(-1)
                largest[part] = most
        most = largest.clone()
        reduce(most, ReduceOp.MAX, group)
        energy = _shifted(energy, sums, largest - most)
        totals = torch.stack([sums * (largest - most).exp(), chosen, energy])  # one collective for all
        reduce(totals, ReduceOp.SUM, group)
        log_normalizers = most + totals[0].log()
        entropies = totals[0].log() - totals[2] / totals[0]
        ctx.save_for_backward(hidden, weight, targets, floor, log_normalizers, entropies if entropy else None)
        logprobs = totals[1] - log_normalizers
        return torch.stack([logprobs, entropies] if entropy else [logprobs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, floor, log_normalizers, entropies = ctx.saved_tensors
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        scale = grad / ctx.temperature
        # The gradient of a tile of rows: one buffer for all.
        sums = torch.empty(min(ctx.tile, ctx.rows), weight.size(1), dtype=torch.float32, device=weight.device)
        for tile in slices(ctx.rows, ctx.tile):
            used = weight[tile]
            of_tile = sums[: len(used)].zero_()
            for part in slices(hidden.size(0), ctx.chunk):
                logits = logits_of(hidden[part], used, ctx.temperature)
                local, in_span = in_tile(targets[part], ctx.start, tile)
                if floor is not None:
                    _drop_below(logits, floor[part], local, in_span)
                # With p = softmax(logits): d logprob / d logits = (onehot - p) / temperature,
                # d entropy / d logits = -p (log p + entropy) / temperature.
                factor = scale[0, part][:, None]
                all_logprobs = logits.sub_(log_normalizers[part][:, None])
                coefficient = factor
                if entropies is not None:
                    coefficient = (all_logprobs + entropies[part][:, None]).mul_(scale[1, part][:, None]).add_(factor)
                grad_logits = all_logprobs.exp_().mul_(-coefficient)
                grad_logits.scatter_add_(1, local[:, None], torch.where(in_span[:, None], factor, 0.0))
                grad_logits = grad_logits.to(weight.dtype)
                grad_hidden[part] += grad_logits @ used  # accumulated in float32
                if grad_weight is not None:
                    of_tile += grad_logits.t() @ hidden[part]
            if grad_weight is not None:
                grad_weight[tile] = of_tile
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 9


def _shifted(energy: Tensor, sums: Tensor, by: Tensor) -> Tensor:
    """Return sum of e * (logit - largest) after `largest` has grown by -`by`."""
    return (energy + by * sums) * by.exp()


def slices(total: int, size: int) -> Iterator[slice]:
    """Yield the slices of `size` that cover `total`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def logits_of(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return hidden @ weight.T / temperature in float32."""
    logits = (hidden @ weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _drop_below(logits: Tensor, floor: Tensor, local: Tensor, in_span: Tensor) -> None:
    """Set logits [n, rows] below `floor` [n] to LOWEST, but not those of the targets."""
    kept = logits >= floor[:, None]
    target = local[:, None]
    kept.scatter_(1, target, kept.gather(1, target) | in_span[:, None])
    logits.masked_fill_(~kept, LOWEST)


def in_tile(targets: Tensor, start: int, tile: slice) -> tuple[Tensor, Tensor]:
    """Return the row of each target in a tile of this rank's rows (clamped), and whether it is in the tile."""
    local, size = targets - (start + tile.start), tile.stop - tile.start
    return local.clamp(0, size - 1), (local >= 0) & (local < size)


def reduce(tensor: Tensor, op: Any, group: ProcessGroup | None) -> None:
    """Reduce in place over the ranks of the group, if there are several."""
    if group is not None and group.size() > 1:
        all_reduce(tensor, op=op, group=group)
