"""Credit by turn: what each turn of a sample adds to the advantage of its tokens. Pure functions, float64."""

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from grpo_mcore.objective.advantages import group_index, grpo_advantages


def difference_credit(scores: Sequence[float | None], gamma: float) -> list[float]:
    """Return the credit of each turn. `scores`: of the state after each turn; None: this turn is not scored.

    What the score has increased by at turn t since the last scored turn s is spread over the turns k = s + 1 .. t, in
    proportion to gamma^(t - k). So the credits add up to the last score minus the first; turns up to the first scored
    one, and after the last one, get 0.
    """
    credits = [0.0] * len(scores)
    scored = [(turn, score) for turn, score in enumerate(scores) if score is not None]
    for (before, old), (turn, new) in pairwise(scored):
        shares = [gamma ** (turn - k) for k in range(before + 1, turn + 1)]
        for k, share in enumerate(shares, start=before + 1):
            credits[k] = (new - old) * share / math.fsum(shares)
    return credits


def gigpo_credit(
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    groups: Sequence[Hashable],
    gamma: float,
    *,
    normalize: bool,
) -> list[list[float]]:
    """Return the credit of each turn of N samples: GiGPO's step relative advantage (arXiv 2505.10978, section 4.2).

    The return of turn t is R_t = sum over k >= t of gamma^(k - t) r_k. Turns of one group that were taken in the same
    state are compared: (R_t - mean) / std over these, or without the division unless `normalize`; a turn whose state
    no other turn of the group shares gets 0. rewards, states: of each turn of each sample; groups: one for each sample.
    """
    returns: list[float] = []
    for of_sample in rewards:
        backwards = [0.0]
        for reward in reversed(of_sample):
            backwards.append(reward + gamma * backwards[-1])
        returns += backwards[:0:-1]
    keys = [(group, state) for group, of_sample in zip(groups, states, strict=True) for state in of_sample]
    values = torch.tensor(returns, dtype=torch.float64)
    compared = grpo_advantages(values, group_index(keys), normalize=normalize, leave_one_out=False).advantages
    return [part.tolist() for part in compared.split(list(map(len, rewards)))]


def credit_by_token(credits: Tensor, segments: Tensor, turns: Tensor) -> Tensor:
    """Return the credit of each token of a packed row, float64 [1, T]. credits: float64 [n, turns] of the row's
    samples; segments: int64 [T], the sample of each token, n for padding; turns: int64 [1, T], its turn."""
    return torch.cat([credits, credits.new_zeros(1, credits.shape[1])])[segments, turns[0]][None]
