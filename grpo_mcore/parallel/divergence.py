"""Divergence between a teacher's distribution and the policy's at each token, from the hidden states of both, over a
vocabulary split across tensor-parallel ranks.

Only a block of tokens has logits at a time. The gradient is computed in the forward pass, while the logits of both
models are there: four products of the size of the logits, as many as the log-prob pass takes, which computes its logits
again in the backward pass.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_gather

from grpo_mcore.families.activations import divergence_block
from grpo_mcore.objective import LOG_ZERO, Divergence
from grpo_mcore.parallel.logprobs import LOWEST, in_tile, reduce, slices


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
    [N]. A block of tokens (`families.activations.divergence_block`) has logits at a time, of both models in their
    number formats; in float32 only `tile` rows of it. The gradient of `hidden` is this rank's part: the caller's region
    function sums it over the group. All tokens must have one weight in the loss: tokens that do not count are left out.
    """
    rows = max(0, min(weight.size(0), vocab_size - vocab_start))
    if teacher_weight.size(0) < rows:
        raise ValueError(f"the teacher's output layer has {teacher_weight.size(0)} rows here, the policy's {rows}")
    teacher = teacher_hidden.detach(), teacher_weight.detach()
    block = divergence_block(chunk, hidden.element_size() + teacher_hidden.element_size())
    where = _Where(group, vocab_start, vocab_size, rows, temperature, block, tile, torch.is_grad_enabled())
    return _Divergence.apply(hidden, weight, *teacher, targets, divergence, where)


class _Where(NamedTuple):
    """This rank's part of the vocabulary, and how much of it has logits at a time."""

    group: ProcessGroup | None
    start: int
    vocab_size: int
    rows: int
    temperature: float
    block: int
    tile: int
    learns: bool  # a gradient will be asked for


class _Online:
    """Sums of e = exp(logit) and of e times some terms over the vocabulary, for N tokens, tile by tile."""

    def __init__(self, like: Tensor, terms: int) -> None:
        self.largest = torch.full((like.size(0),), LOWEST, dtype=torch.float32, device=like.device)
        self.sums = torch.zeros(terms + 1, like.size(0), dtype=torch.float32, device=like.device)

    def add(self, logits: Tensor, *terms: Tensor | None, into: Tensor | None = None) -> Tensor:
        """Add a tile of logits [n, t] and of terms [n, t]; None: of a term that nobody asks for, whose mean stays 0.
        Return the logit [n] of which the exponentials are relative; `into`: a tensor that gets these, such as the
        logits."""
        most = torch.maximum(self.largest, logits.amax(-1))
        exps = torch.sub(logits, most[:, None], out=into).exp_()
        self.sums *= (self.largest - most).exp_()
        self.sums[0] += exps.sum(-1)
        for total, term in zip(self.sums[1:], terms, strict=True):
            if term is not None:
                total += torch.linalg.vecdot(exps, term)
        self.largest = most
        return most

    def finish(self, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Add up the ranks' parts. Return the log normaliser [N] and the mean of each term [terms, N]."""
        most = self.largest.clone()
        reduce(most, ReduceOp.MAX, group)
        totals = self.sums * (self.largest - most).exp()
        reduce(totals, ReduceOp.SUM, group)
        return most + totals[0].log(), totals[1:] / totals[0]


class _Divergence(torch.autograd.Function):
    """The gradient is computed beside the values, block by block, while a block's logits of the teacher are there: with
    every token of the same weight, the backward pass only scales it, in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        divergence: Divergence,
        where: _Where,
    ) -> Tensor:
        scores = torch.empty(3, hidden.size(0), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = None
        if where.learns and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in slices(hidden.size(0), where.block):
            block = _Block(hidden[part], weight, teacher_hidden[part], teacher_weight, divergence, where)
            scores[:, part] = block.scores(targets[part])
            if where.learns:
                block.add_gradients(grad_hidden[part], grad_weight)
            del block  # before the next one has its logits
        in_format = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.gradients = grad_hidden.to(hidden.dtype), in_format
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of a divergence is there once: compute the divergence again")
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        scale = grad[1, :1]
        torch._assert_async((grad[1] == scale).all(), "the tokens of a divergence must have one weight in the loss")
        factor = scale.to(grad_hidden.dtype) if len(scale) else grad_hidden.new_zeros(1)
        return grad_hidden.mul_(factor), None if grad_weight is None else grad_weight.mul_(factor), *[None] * 5


class _Block:
    """Some tokens, with the logits of both models of all of this rank's rows, in the number formats in which they are
    computed. They are read for the values. What the gradient needs takes their place where it can, so that few passes
    go over them: of the reverse KL exp(logit) of the policy and the models' difference, of a Jensen-Shannon divergence
    p and p log(p / m). A tile of float32 logits is a view of them, of others a copy."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        divergence: Divergence,
        where: _Where,
    ) -> None:
        self.hidden, self.weight, self.divergence, self.where = hidden, weight[: where.rows], divergence, where
        # Products of one shape each: equal models give equal logits.
        self.logits = hidden @ self.weight.t()
        self.teacher_logits = teacher_hidden @ teacher_weight[: where.rows].t()
        for logits in (self.logits, self.teacher_logits):
            if logits.dtype == torch.float32 and where.temperature != 1.0:
                logits.div_(where.temperature)
        self.floor = None if divergence.top_k is None else self._lowest_of_top(divergence.top_k)
        self.exps_over: list[Tensor] = []
        """For the reverse KL, by tile: the logit [n] to which the exponentials in the place of the policy's logits are
        relative."""

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each tile of the vocabulary with the logits of policy and teacher, float32 [n, t]."""
        for span in slices(self.where.rows, self.where.tile):
            yield span, self._tile(self.logits, span), self._tile(self.teacher_logits, span)

    def _tile(self, logits: Tensor, span: slice) -> Tensor:
        if logits.dtype == torch.float32:
            return logits[:, span]
        tile = logits[:, span].float()
        return tile if self.where.temperature == 1.0 else tile.div_(self.where.temperature)

    def _lowest_of_top(self, k: int) -> Tensor:
        """Return the k-th largest logit of the teacher over the whole vocabulary, float32 [n]."""
        k, where = min(k, self.where.vocab_size), self.where
        best = self.hidden.new_full((len(self.hidden), k), LOWEST, dtype=torch.float32)
        for span in slices(where.rows, where.tile):
            best = torch.cat([best, self._tile(self.teacher_logits, span)], -1).topk(k).values
        if where.group is not None and where.group.size() > 1:
            shares = [torch.empty_like(best) for _ in range(where.group.size())]
            all_gather(shares, best.contiguous(), group=where.group)
            best = torch.cat(shares, -1).topk(k).values
        return best[:, -1]

    def scores(self, targets: Tensor) -> Tensor:
        """Return what `divergences` returns for these tokens, and keep what the gradient needs."""
        divergence, where, floor = self.divergence, self.where, self.floor
        cuts = floor is not None
        forward, reverse = divergence.shares or (0.0, 0.0)
        # p and q are the distributions that are compared. With a top k the targets' log-probs are of others.
        p, q = _Online(self.hidden, 1 + cuts), _Online(self.hidden, 1)
        whole_p = _Online(self.hidden, 0) if cuts and not divergence.zero_outside else p
        whole_q = _Online(self.hidden, 0) if cuts else q
        chosen = torch.zeros(2, len(targets), dtype=torch.float32, device=targets.device)
        for span, mine_of, teachers in self.tiles():
            local, in_span = in_tile(targets, where.start, span)
            for i, logits in enumerate((mine_of, teachers)):
                chosen[i] += torch.where(in_span, logits.gather(1, local[:, None]).squeeze(1), 0.0)
            if floor is None and reverse == 1:
                q.add(teachers, None)
                gap = torch.sub(mine_of, teachers, out=teachers)
                self.exps_over.append(p.add(mine_of, gap, into=mine_of))
                _put(mine_of, self.logits, span)
                _put(gap, self.teacher_logits, span)
                continue
            gap = mine_of - teachers if forward or reverse else None
            if floor is None:
                p.add(mine_of, gap if reverse else None)
                q.add(teachers, gap.neg_() if forward and gap is not None else None)
                continue
            kept = teachers >= floor[:, None]
            if gap is not None:
                gap.masked_fill_(~kept, 0.0)
            q.add(teachers.masked_fill(~kept, LOWEST), -gap if forward and gap is not None else None)
            whole_q.add(teachers)
            if divergence.zero_outside:
                to_nothing = torch.where(kept, gap, mine_of - LOG_ZERO) if reverse and gap is not None else None
                p.add(mine_of, to_nothing, kept.float())
            else:
                p.add(mine_of.masked_fill(~kept, LOWEST), gap if reverse else None, kept.float())
                whole_p.add(mine_of)
        (log_p, p_means), (log_q, q_means) = p.finish(where.group), q.finish(where.group)
        end_p = log_p if whole_p is p else whole_p.finish(where.group)[0]
        end_q = log_q if whole_q is q else whole_q.finish(where.group)[0]
        reduce(chosen, ReduceOp.SUM, where.group)
        inside = p_means[1] if cuts else 1.0  # probability under p of the teacher's k tokens
        kl_p = p_means[0] - log_p + log_q * inside
        self.log_p, self.log_q = log_p, log_q
        if divergence.shares is not None:
            values, self.slope = forward * (q_means[0] - log_q + log_p) + reverse * kl_p, kl_p
        else:
            values, self.slope = self._jensen_shannon()
        return torch.stack([chosen[0] - end_p, values, chosen[1] - end_q])

    def _jensen_shannon(self) -> tuple[Tensor, Tensor]:
        """Return the divergence and KL(p || m) of each token, float32 [n] each. It needs both normalisers."""
        beta = self.divergence.weight
        sums = torch.zeros(2, len(self.hidden), dtype=torch.float32, device=self.hidden.device)
        for span, mine_of, teachers in self.tiles():
            p_log, q_log, outside = self._compared(mine_of, teachers)
            q = _q(q_log, outside)
            gap = _bounded_gap(p_log, q_log)
            of_p = _log_ratio_to_mixture(gap, beta)
            p = p_log.exp_()
            sums[0] += torch.linalg.vecdot(p, of_p)
            sums[1] += torch.linalg.vecdot(q, gap.add_(of_p))  # log(q / m) = log(q / p) + log(p / m)
            _put(p, self.logits, span)
            _put(torch.mul(p, of_p, out=gap), self.teacher_logits, span)
        reduce(sums, ReduceOp.SUM, self.where.group)
        return (1 - beta) * sums[0] + beta * sums[1], sums[0]

    def add_gradients(self, grad_hidden: Tensor, grad_weight: Tensor | None) -> None:
        """Add the gradients of the sum of the divergences, float32 [n, H] and [rows, H]."""
        spans = list(slices(self.where.rows, self.where.tile))
        for number, span in enumerate(spans):
            slopes = self._slopes(number, span)
            if self.where.temperature != 1.0:
                slopes.div_(self.where.temperature)
            _put(slopes, self.logits, span)
        grad_hidden += self.logits @ self.weight
        if grad_weight is None:
            return
        if grad_weight.dtype == self.logits.dtype:
            grad_weight[: self.where.rows].addmm_(self.logits.t(), self.hidden)
            return
        for span in spans:  # accumulated in float32
            grad_weight[span] += self.logits[:, span].t() @ self.hidden

    def _slopes(self, number: int, span: slice) -> Tensor:
        """Return d loss / d logit of a tile, p (d loss / d p - its mean under p), float32 [n, t]."""
        shares, mean = self.divergence.shares, self.slope[:, None]
        if shares is None:
            p, weighted = self.logits[:, span].float(), self.teacher_logits[:, span].float()
            return torch.addcmul(weighted, p, -mean, out=p).mul_(1 - self.divergence.weight)
        forward, reverse = shares
        if self.exps_over:
            exps, gap = self.logits[:, span].float(), self.teacher_logits[:, span].float()
            scale = (self.exps_over[number] - self.log_p).exp_()[:, None]  # p = exps * scale
            offset = (self.log_p - self.log_q)[:, None] + mean
            return exps.mul_(torch.addcmul(-offset * scale, gap, scale))  # log(p / q) = gap - log_p + log_q
        p_log, q_log, outside = self._compared(self._tile(self.logits, span), self._tile(self.teacher_logits, span))
        if not reverse:
            return p_log.exp_().sub_(_q(q_log, outside))
        p = p_log.exp()
        slopes = p_log.sub_(q_log).sub_(mean).mul_(p)
        return slopes.mul_(reverse).add_(p.sub_(_q(q_log, outside)), alpha=forward) if forward else slopes

    def _compared(self, mine_of: Tensor, teachers: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log p and log q of a tile [n, t] in place of its logits, and where q is 0; None: nowhere."""
        outside = None if self.floor is None else teachers < self.floor[:, None]
        p_log, q_log = mine_of.sub_(self.log_p[:, None]), teachers.sub_(self.log_q[:, None])
        if outside is not None:
            q_log.masked_fill_(outside, LOG_ZERO)
            if not self.divergence.zero_outside:
                p_log.masked_fill_(outside, LOWEST)
        return p_log, q_log, outside


def _q(q_log: Tensor, outside: Tensor | None) -> Tensor:
    """Return q of its logarithm: exactly 0 where it is outside."""
    q = q_log.exp()
    return q if outside is None else q.masked_fill_(outside, 0.0)


def _bounded_gap(p_log: Tensor, q_log: Tensor) -> Tensor:
    """Return log(q / p) in place of log q, bounded so that its exponential is finite."""
    return q_log.sub_(p_log).clamp_(-80.0, 80.0)


def _log_ratio_to_mixture(gap: Tensor, share: float) -> Tensor:
    """Return log(p / (share q + (1 - share) p)) of gap = log(q / p), exactly 0 where p equals q."""
    return torch.expm1(gap).mul_(share).log1p_().neg_()


def _put(tile: Tensor, logits: Tensor, span: slice) -> None:
    """Put a tile in its place among the logits [n, rows], in their number format, unless it is a view of them."""
    part = logits[:, span]
    if tile.data_ptr() != part.data_ptr():
        part.copy_(tile)
