"""Divergence between a teacher's distribution and the policy's at each token, from the hidden states of both, over a
vocabulary split across tensor-parallel ranks.

Only `chunk` tokens have logits at a time, of either model, and of these only a tile of the vocabulary. The backward
pass computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_gather

from grpo_mcore.objective import LOG_ZERO, Divergence
from grpo_mcore.parallel.logprobs import LOWEST, in_tile, logits_of, reduce, slices


def divergences(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    targets: Tensor,
    *,
    divergence: Divergence,
    group: ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
    chunk: int,
    tile: int,
) -> Tensor:
    """Return float32 [3, N]: the policy's log-prob of the target, the divergence, the teacher's log-prob of the target.
    Only the divergence has a gradient, and only for the policy.

    Both distributions are softmax(hidden @ weight.T / temperature) over the first `vocab_size` tokens, which both
    models have; the log-probs of the targets are of the whole of them, also with a top k.

    hidden [N, H] and teacher_hidden [N, H'], the same on every rank of `group`; weight [rows, H] and teacher_weight
    [rows, H'], this rank's rows of the output layers, the first of which is token `vocab_start` in both; targets int64
    [N]. `chunk` tokens and `tile` rows have logits at a time. The gradient of `hidden` is this rank's part: the
    caller's region function sums it over the group.
    """
    rows = max(0, min(weight.size(0), vocab_size - vocab_start))
    if teacher_weight.size(0) < rows:
        raise ValueError(f"the teacher's output layer has {teacher_weight.size(0)} rows here, the policy's {rows}")
    teacher = teacher_hidden.detach(), teacher_weight.detach()
    where = _Where(group, vocab_start, rows, temperature, chunk, tile)
    floor = None if divergence.top_k is None else _lowest_of_top(*teacher, divergence.top_k, vocab_size, where)
    return _Divergence.apply(hidden, weight, *teacher, targets, floor, divergence, where)


class _Where(NamedTuple):
    """This rank's part of the vocabulary, and how much of it has logits at a time."""

    group: ProcessGroup | None
    start: int
    rows: int
    temperature: float
    chunk: int
    tile: int


def _lowest_of_top(hidden: Tensor, weight: Tensor, k: int, vocab_size: int, where: _Where) -> Tensor:
    """Return the k-th largest logit of each token over the whole vocabulary, float32 [N]."""
    k = min(k, vocab_size)
    floor = torch.empty(hidden.size(0), dtype=torch.float32, device=hidden.device)
    for part in slices(hidden.size(0), where.chunk):
        best = torch.full((len(floor[part]), k), LOWEST, dtype=torch.float32, device=hidden.device)
        for span in slices(where.rows, where.tile):
            logits = logits_of(hidden[part], weight[span], where.temperature)
            best = torch.cat([best, logits], -1).topk(k).values
        if where.group is not None and where.group.size() > 1:
            shares = [torch.empty_like(best) for _ in range(where.group.size())]
            all_gather(shares, best.contiguous(), group=where.group)
            best = torch.cat(shares, -1).topk(k).values
        floor[part] = best[:, -1]
    return floor


class _Online:
    """Sums of e = exp(logit) and of e times some terms over the vocabulary, for N tokens, tile by tile."""

    def __init__(self, like: Tensor, terms: int) -> None:
        self.largest = torch.full((like.size(0),), LOWEST, dtype=torch.float32, device=like.device)
        self.sums = torch.zeros(terms + 1, like.size(0), dtype=torch.float32, device=like.device)

    def add(self, part: slice, logits: Tensor, *terms: Tensor) -> None:
        """Add a tile of logits [n, t] and of terms [n, t]."""
        before, most = self.largest[part], torch.maximum(self.largest[part], logits.amax(-1))
        exps = (logits - most[:, None]).exp_()
        added = torch.stack([exps.sum(-1), *(torch.linalg.vecdot(exps, term) for term in terms)])
        self.sums[:, part] = self.sums[:, part] * (before - most).exp() + added
        self.largest[part] = most

    def finish(self, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Add up the ranks' parts. Return the log normaliser [N] and the mean of each term [terms, N]."""
        most = self.largest.clone()
        reduce(most, ReduceOp.MAX, group)
        totals = self.sums * (self.largest - most).exp()
        reduce(totals, ReduceOp.SUM, group)
        return most + totals[0].log(), totals[1:] / totals[0]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        floor: Tensor | None,
        divergence: Divergence,
        where: _Where,
    ) -> Tensor:
        models, cuts = ((hidden, weight), (teacher_hidden, teacher_weight)), floor is not None
        # p and q are the distributions that are compared. With a top k the targets' log-probs are of others.
        p, q = _Online(hidden, 1 + cuts), _Online(hidden, 1)
        whole = [_Online(hidden, 0), _Online(hidden, 0)] if cuts else [p, q]
        chosen = torch.zeros(2, hidden.size(0), dtype=torch.float32, device=hidden.device)
        for part, span in _tiles(hidden, where):
            mine_of, teachers = (logits_of(states[part], head[span], where.temperature) for states, head in models)
            local, mine = in_tile(targets[part], where.start, span)
            for i, logits in enumerate((mine_of, teachers)):
                chosen[i, part] += torch.where(mine, logits.gather(1, local[:, None]).squeeze(1), 0.0)
            if floor is None:
                p.add(part, mine_of, mine_of - teachers)
                q.add(part, teachers, teachers - mine_of)
                continue
            whole[0].add(part, mine_of)
            whole[1].add(part, teachers)
            kept = teachers >= floor[part, None]
            gap = (mine_of - teachers).masked_fill_(~kept, 0.0)
            q.add(part, teachers.masked_fill(~kept, LOWEST), -gap)
            if divergence.zero_outside:
                p.add(part, mine_of, torch.where(kept, gap, mine_of - LOG_ZERO), kept.float())
            else:
                p.add(part, mine_of.masked_fill(~kept, LOWEST), gap, kept.float())
        (log_p, p_means), (log_q, q_means) = p.finish(where.group), q.finish(where.group)
        ends = [it.finish(where.group)[0] for it in whole] if cuts else [log_p, log_q]
        reduce(chosen, ReduceOp.SUM, where.group)
        inside = p_means[1] if cuts else 1.0  # probability under p of the teacher's k tokens
        reverse = p_means[0] - log_p + log_q * inside
        if (shares := divergence.shares) is not None:
            values, slope = shares[0] * (q_means[0] - log_q + log_p) + shares[1] * reverse, reverse
        else:
            values, slope = _jensen_shannon(models, floor, log_p, log_q, divergence, where)
        ctx.divergence, ctx.where = divergence, where
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, floor, log_p, log_q, slope)
        return torch.stack([chosen[0] - ends[0], values, chosen[1] - ends[1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, floor, log_p, log_q, slope = ctx.saved_tensors
        divergence, where = ctx.divergence, ctx.where
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        scale, shares = grad[1] / where.temperature, divergence.shares
        for tile in slices(where.rows, where.tile):
            used = weight[tile]
            of_tile = torch.zeros(used.shape, dtype=torch.float32, device=weight.device)
            for part in slices(hidden.size(0), where.chunk):
                mine_of = logits_of(hidden[part], used, where.temperature)
                teachers = logits_of(teacher_hidden[part], teacher_weight[tile], where.temperature)
                at = None if floor is None else floor[part]
                p_log, q_log, q = _compared(mine_of, teachers, at, log_p[part], log_q[part], divergence)
                p = p_log.exp()
                # d loss / d logit = p (d loss / d p - its mean under p) / temperature
                if shares is None:
                    ratio = _log_ratio_to_mixture(p_log, q_log, divergence.weight)
                    slopes = (1 - divergence.weight) * p * (ratio - slope[part, None])
                else:
                    slopes = shares[0] * (p - q)
                    if shares[1]:
                        slopes += shares[1] * p * (p_log - q_log - slope[part, None])
                grad_logits = slopes.mul_(scale[part, None]).to(weight.dtype)
                grad_hidden[part] += grad_logits @ used  # accumulated in float32
                if grad_weight is not None:
                    of_tile += grad_logits.t() @ hidden[part]
            if grad_weight is not None:
                grad_weight[tile] = of_tile
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 6


def _jensen_shannon(
    models: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    floor: Tensor | None,
    log_p: Tensor,
    log_q: Tensor,
    divergence: Divergence,
    where: _Where,
) -> tuple[Tensor, Tensor]:
    """Return the divergence and KL(p || m) of each token, float32 [N] each. It needs both normalisers."""
    beta = divergence.weight
    sums = torch.zeros(2, len(log_p), dtype=torch.float32, device=log_p.device)
    for part, span in _tiles(models[0][0], where):
        mine_of, teachers = (logits_of(states[part], head[span], where.temperature) for states, head in models)
        at = None if floor is None else floor[part]
        p_log, q_log, q = _compared(mine_of, teachers, at, log_p[part], log_q[part], divergence)
        sums[0, part] += torch.linalg.vecdot(p_log.exp(), _log_ratio_to_mixture(p_log, q_log, beta))
        sums[1, part] += torch.linalg.vecdot(q, _log_ratio_to_mixture(q_log, p_log, 1 - beta))
    reduce(sums, ReduceOp.SUM, where.group)
    return (1 - beta) * sums[0] + beta * sums[1], sums[0]


def _compared(
    mine_of: Tensor, teachers: Tensor, floor: Tensor | None, log_p: Tensor, log_q: Tensor, divergence: Divergence
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p, log q and q of a tile [n, t], from its logits."""
    p_log, q_log = mine_of - log_p[:, None], teachers - log_q[:, None]
    if floor is None:
        return p_log, q_log, q_log.exp()
    outside = teachers < floor[:, None]
    if not divergence.zero_outside:
        p_log.masked_fill_(outside, LOWEST)
    return p_log, q_log.masked_fill(outside, LOG_ZERO), q_log.masked_fill(outside, LOWEST).exp()


def _log_ratio_to_mixture(a_log: Tensor, b_log: Tensor, share: float) -> Tensor:
    """Return log(a / (share b + (1 - share) a)), exactly 0 where a equals b."""
    return -torch.log1p(share * torch.expm1((b_log - a_log).clamp(-80.0, 80.0)))


def _tiles(hidden: Tensor, where: _Where) -> Iterator[tuple[slice, slice]]:
    return ((part, span) for part in slices(hidden.size(0), where.chunk) for span in slices(where.rows, where.tile))
