"""Take a loss apart by its tokens: the gradient that reaches each token's log-prob, and the part of a loss that comes
from some tokens. So losses can be compared on the same data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective.importance import importance_weights
from grpo_mcore.objective.loss import ClippedPGLossFn
from grpo_mcore.objective.reduce import Count, MaskedTokens

Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
Batch = Mapping[str, Any]

SIGNS = ("positive advantage", "negative advantage", "advantage 0")
INSIDE, BOUNDED, STOPPED = range(3)
"""Regions of a loss: its gradient passes as it is; a bound of the ratio or the weight changes it; none passes."""


def token_gradient(loss_fn: Loss, logprobs: Tensor, batch: Batch, seqs: Count, toks: Count) -> Tensor:
    """Return the derivative of a micro-batch's loss by each token's log-prob, in the shape and dtype of `logprobs`. The
    entropy term has no gradient through the log-probs, so it adds nothing."""
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        loss, _ = loss_fn(leaf, batch, global_valid_seqs=seqs, global_valid_toks=toks)
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


def signs(batch: Batch) -> Tensor:
    """Return the number in SIGNS of each token, int64 in the shape of the advantages."""
    advantages = batch["advantages"]
    return torch.where(advantages > 0, 0, torch.where(advantages < 0, 1, 2))


def regions(loss_fn: Loss, logprobs: Tensor, batch: Batch, seqs: Count, toks: Count) -> Tensor:
    """Return the region of each token under a loss, int64 in the shape of `logprobs`. A custom loss has none that is
    BOUNDED: its bounds are not known."""
    stopped = token_gradient(loss_fn, logprobs, batch, seqs, toks) == 0
    bounded = torch.zeros_like(stopped)
    if isinstance(loss_fn, ClippedPGLossFn):
        cfg, curr = loss_fn.cfg, logprobs.detach()
        tokens = MaskedTokens.from_batch(curr.shape, batch, seqs, toks)
        advantages = tokens.column(batch["advantages"], "advantages")
        prev = loss_fn.prev_column(tokens.column(curr, "curr_logprobs"), batch, tokens)
        before = loss_fn.before_column(prev, batch, tokens)
        term = loss_fn.policy_term(tokens.column(curr, "curr_logprobs"), before, advantages, tokens)
        bounded = (term.ratio != term.clipped_ratio).reshape(curr.shape)
        if cfg.use_importance_sampling_correction:
            generation = tokens.column(batch["generation_logprobs"], "generation_logprobs")
            ages = loss_fn.ages_column(batch, tokens)
            outside = importance_weights(prev, generation, tokens, cfg, ages).outside
            bounded = bounded if outside is None else bounded | outside.reshape(curr.shape)
    return torch.where(stopped, STOPPED, torch.where(bounded, BOUNDED, INSIDE))


@dataclass(frozen=True)
class LossPart:
    """The part of a loss that comes from some tokens, as a loss: its gradient is that of the loss with all other tokens
    held fixed. Its metric `num_valid_tokens` is their number.

    `by` is "signs", "ages", "regions", or a column of integers: tokens with the value `value` are selected, with
    `and_above` also those above it. `of` is the loss whose regions select the tokens; None: this one.
    """

    loss: Loss
    by: str
    value: int
    and_above: bool = False
    of: Loss | None = None

    def __call__(
        self, curr_logprobs: Tensor, batch: Batch, global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, Tensor]]:
        counts = global_valid_seqs, global_valid_toks
        gradient = token_gradient(self.loss, curr_logprobs, batch, *counts)
        if self.by == "signs":
            numbers = signs(batch)
        elif self.by == "regions":
            numbers = regions(self.of or self.loss, curr_logprobs, batch, *counts)
        else:
            numbers = batch[self.by].reshape(curr_logprobs.shape)
        selected = numbers >= self.value if self.and_above else numbers == self.value
        valid = MaskedTokens.from_batch(curr_logprobs.shape, batch, *counts).valid.reshape(selected.shape)
        part = torch.where(selected & valid, gradient, 0.0)
        return (part.to(torch.float64) * curr_logprobs).sum(), {
            "num_valid_tokens": (selected & valid).sum().to(torch.float64)
        }
