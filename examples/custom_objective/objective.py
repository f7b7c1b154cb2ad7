"""An objective of your own: estimator, reward shaping, KL estimator and loss, each named in a recipe by import path.

recipe.yaml beside this file names all of them. Each replaces one built-in part and leaves the others as they are; take
the one that you need. docs/extending.md has the signatures.

What it is not: a recommendation. The parts are here because they are short, not because they are better together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn, MaskedTokens, PolicyTerm, StepSamples


def rank_advantages(samples: StepSamples, *, scale: float = 1.0) -> Tensor:
    """Return the advantage of each sample by its rank in its group, from -scale for the worst to scale for the best.

    Ranks do not care how far the best reward is from the others. Equal rewards share their mean rank, so a group with
    equal rewards gets 0. float64 [N].
    """
    advantages = torch.zeros_like(samples.rewards)
    for group in samples.group_ids.unique():
        chosen = (samples.group_ids == group) & samples.valid
        rewards = samples.rewards[chosen]
        above = (rewards[:, None] > rewards[None, :]).sum(1) - (rewards[:, None] < rewards[None, :]).sum(1)
        advantages[chosen] = scale * above.double() / max(len(rewards) - 1, 1)
    return advantages


def brevity(samples: StepSamples, *, penalty: float = 0.01) -> Tensor:
    """Take `penalty` from a reward above 0 for each token more than the shortest such answer of its group has."""
    rewards = samples.rewards.clone()
    for group in samples.group_ids.unique():
        good = (samples.group_ids == group) & samples.valid & (samples.rewards > 0)
        lengths = samples.generated_lengths[good].double()
        if len(lengths):
            rewards[good] -= penalty * (lengths - lengths.min())
    return rewards


def hellinger(log_ratio: Tensor) -> Tensor:
    """Return an estimate of twice the squared Hellinger distance, sum of (sqrt p - sqrt q)^2, from each sampled token.

    `log_ratio`: log-prob under the reference minus that under the policy. 2 (1 - exp(x / 2))^2 is never negative, 0
    where both agree, and for small x equal to k2.
    """
    return 2 * torch.expm1(log_ratio / 2).square()


class SoftGateLoss(ClippedPGLossFn):
    """A smooth gate in place of the clip: the term is -A (4 / t) sigmoid(t (r - 1)), as in SAPO (arXiv 2511.20347).

    At r = 1 its slope is that of -A r; away from 1 it fades with the temperature t, `up` where the advantage is
    positive, `down` where it is negative. Importance weights, KL, entropy and metrics are those of the base class.
    """

    def __init__(
        self,
        cfg: ClippedPGLossConfig,
        *,
        prev_equals_curr: bool = False,
        max_age: int | None = None,
        up: float = 1.0,
        down: float = 1.05,
    ) -> None:
        super().__init__(cfg, prev_equals_curr=prev_equals_curr, max_age=max_age)
        self.up, self.down = up, down

    def policy_term(self, curr: Tensor, prev: Tensor, advantages: Tensor, tokens: MaskedTokens) -> PolicyTerm:
        ratio = torch.exp(curr - prev)
        temperature = self.down + (self.up - self.down) * (advantages > 0).to(ratio.dtype)
        gate = 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
        return PolicyTerm(-advantages * gate, ratio, ratio)


def reinforce(
    curr_logprobs: Tensor,
    batch: Mapping[str, Any],
    global_valid_seqs: int,
    global_valid_toks: int,
    *,
    weight: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the REINFORCE loss: mean of -A log p over all trained tokens. A loss as a function, without a class."""
    tokens = MaskedTokens.from_batch(curr_logprobs.shape, batch, global_valid_seqs, global_valid_toks)
    curr = tokens.column(curr_logprobs, "curr_logprobs")
    advantages = tokens.column(batch["advantages"], "advantages")
    loss = weight * tokens.mean(-advantages * curr)
    return loss, {"nll": tokens.mean(-curr.detach())}
