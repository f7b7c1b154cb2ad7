"""The advantage estimators by name. All compute one value per sample in float64 and ignore failed samples."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from grpo_mcore.objective.advantages import (
    EPS,
    EQUAL_REWARDS_TOLERANCE,
    AdvantageEstimate,
    advantage_term,
    group_stats,
    grpo_advantages,
)
from grpo_mcore.objective.kl import SampleKL, rewards_minus_kl, token_moments
from grpo_mcore.recipe import RewardWeights, weights_by_name

AdvantageEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "maxrl", "opo", "gfpo", "reinforce_plus_plus", "flash_reinforce", "remax", "gdpo"
]


def estimate_advantages(
    name: str,
    rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor | None = None,
    *,
    normalize: bool = True,
    leave_one_out: bool = True,
    std_of_others: bool = False,
    minus_baseline: bool = True,
    rewards_by_name: Mapping[str, Tensor] | None = None,
    reward_weights: RewardWeights | None = None,
    tokens: Tensor | None = None,
    lengths: Tensor | None = None,
    keep: int = 2,
    keep_by: str = "length",
    first: Tensor | None = None,
    kl: SampleKL | None = None,
    kl_penalty: float = 0.0,
) -> AdvantageEstimate:
    """Return the advantages of the samples of one step.

    rewards [N], group_ids int [N], valid bool [N] (None: all), see `group_stats`. `kl` with a `kl_penalty` above 0
    puts the KL in the reward. r is the reward, mean and std are those of the group:

    grpo (arXiv 2402.03300): `grpo_advantages` with `normalize`, `leave_one_out` and `std_of_others`.
    dr_grpo (arXiv 2503.20783): r - mean. Never divided by a std, which would weight groups by their difficulty.
    rloo (arXiv 2402.14740): r - mean of the other samples of the group. Never divided by a std.
    maxrl (arXiv 2602.02710): (r - mean) / mean, for rewards of at least 0.
    opo (arXiv 2505.23585): r - sum of length * reward of the group / sum of its lengths.
    gfpo (arXiv 2508.09726): as grpo, within the `keep` samples of each group that are shortest or, with `keep_by`
    token_efficiency, have the highest reward / length; the others have 0.
    remax (arXiv 2310.10505): `remax_advantages`, with `first`.
    flash_reinforce (FlashREINFORCE): r - mean over the samples of the step, which may be of any group.
    For these, r is the reward minus kl_penalty * KL of the whole sample, before the baseline. `lengths` [N]: number of
    generated tokens, for opo and gfpo.

    reinforce_plus_plus: `reinforce_plus_plus_advantages`, with `minus_baseline`, `tokens` and, by token, `kl`.
    gdpo: `gdpo_advantages`, with `rewards_by_name`, `reward_weights`, `normalize`, `leave_one_out`, `std_of_others`.

    Other arguments have no effect on an estimator. Raises ValueError if an input is missing or has the wrong shape, or
    if a valid reward or its KL is not finite.
    """
    if name not in get_args(AdvantageEstimator):
        raise ValueError(f"unknown estimator {name!r}; choose one of {', '.join(get_args(AdvantageEstimator))}")
    if kl_penalty and kl is None:
        raise ValueError(f"the KL in the reward has weight {kl_penalty}, but the KL of the samples is missing")
    if name == "reinforce_plus_plus":
        if tokens is None:
            raise ValueError(
                "reinforce_plus_plus standardises over tokens: pass the number of trained tokens of each sample"
            )
        return reinforce_plus_plus_advantages(
            rewards, group_ids, tokens, valid, minus_baseline=minus_baseline, kl=kl, kl_penalty=kl_penalty
        )
    if name == "gdpo":
        if kl_penalty:
            raise ValueError(
                "gdpo normalises each named reward by itself, so there is no single reward to subtract the KL from: "
                "keep the KL in the loss (use_kl_in_reward=false)"
            )
        return gdpo_advantages(
            rewards,
            rewards_by_name or {},
            group_ids,
            valid,
            reward_weights,
            normalize=normalize,
            leave_one_out=leave_one_out,
            std_of_others=std_of_others,
        )
    if kl is not None and kl_penalty:
        rewards = rewards_minus_kl(rewards, kl, kl_penalty, valid)
    if name == "maxrl":
        return maxrl_advantages(rewards, group_ids, valid)
    if name == "flash_reinforce":
        whole = group_stats(rewards, torch.zeros_like(group_ids), valid)
        term = advantage_term(rewards, whole.deviation)
        return AdvantageEstimate(whole.deviation, group_stats(rewards, group_ids, valid), terms={"": term})
    if name == "remax":
        return remax_advantages(rewards, group_ids, first, valid)
    if name in ("opo", "gfpo"):
        if lengths is None:
            raise ValueError(f"{name} weighs samples by length: pass the number of generated tokens of each sample")
        if name == "opo":
            return opo_advantages(rewards, group_ids, lengths, valid)
        scores = -lengths.to(torch.float64) if keep_by == "length" else rewards / lengths.clamp(min=1)
        valid = best_of_each_group(scores, group_ids, keep, valid)
    return grpo_advantages(
        rewards,
        group_ids,
        valid,
        normalize=normalize and name in ("grpo", "gfpo"),
        leave_one_out=leave_one_out if name in ("grpo", "gfpo") else name == "rloo",
        std_of_others=std_of_others,
    )


def maxrl_advantages(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> AdvantageEstimate:
    """(r - mean) / mean of the group, 0 where nothing was rewarded: the gradient of the log of the probability of
    success (MaxRL, arXiv 2602.02710). Raises ValueError for a negative reward."""
    groups = group_stats(rewards, group_ids, valid)
    if (rewards[groups.valid] < 0).any():
        raise ValueError("maxrl divides by the mean of the rewards, which must be at least 0: use grpo.reward_scaling")
    mean = torch.where(groups.mean > 0, groups.mean, 1.0)[groups.index]
    term = replace(advantage_term(rewards, groups.deviation), scale=mean)
    return AdvantageEstimate(groups.deviation / mean, groups, terms={"": term})


def opo_advantages(
    rewards: Tensor, group_ids: Tensor, lengths: Tensor, valid: Tensor | None = None
) -> AdvantageEstimate:
    """r - sum of length * reward of the group / sum of its lengths, 0 where all rewards are equal: the baseline of
    least variance if a gradient's norm grows with the length (OPO, arXiv 2505.23585). lengths int [N]."""
    groups = group_stats(rewards, group_ids, valid)
    weights = torch.where(groups.valid, lengths.to(torch.float64), 0.0)
    by_group = torch.zeros_like(groups.mean)
    shift = by_group.index_add(0, groups.index, weights * groups.deviation)
    shift /= by_group.index_add(0, groups.index, weights).clamp(min=1)
    advantages = torch.where(groups.valid, groups.deviation - shift[groups.index], 0.0)
    return AdvantageEstimate(advantages, groups, terms={"": advantage_term(rewards, advantages)})


def remax_advantages(
    rewards: Tensor, group_ids: Tensor, first: Tensor | None, valid: Tensor | None = None
) -> AdvantageEstimate:
    """r minus the reward of the group's first sample, which is decoded greedily, is no part of the loss and has 0
    (ReMax, arXiv 2310.10505). A group whose first sample failed has 0. `first` bool [N]; ValueError without it."""
    if first is None:
        raise ValueError("remax subtracts the reward of each group's first sample: pass which samples are first")
    groups = group_stats(rewards, group_ids, valid)
    counted = (first & groups.valid).to(torch.float64)
    baseline, known = (
        torch.zeros_like(groups.mean).index_add(0, groups.index, part)[groups.index]
        for part in (torch.where(counted > 0, rewards.to(torch.float64), 0.0), counted)
    )
    advantages = torch.where(groups.valid & (known > 0), rewards.to(torch.float64) - baseline, 0.0)
    return AdvantageEstimate(advantages, groups, terms={"": advantage_term(rewards, advantages)})


def best_of_each_group(scores: Tensor, group_ids: Tensor, keep: int, valid: Tensor | None = None) -> Tensor:
    """Return bool [N]: the `keep` valid samples of each group with the highest score, the first of equal ones."""
    valid = torch.ones_like(group_ids, dtype=torch.bool) if valid is None else valid.to(torch.bool)
    order = torch.argsort(torch.where(valid, scores, -torch.inf), descending=True, stable=True)
    order = order[torch.argsort(group_ids[order], stable=True)]
    ids = group_ids[order]
    rank = torch.arange(len(ids)) - torch.searchsorted(ids, ids)
    kept = torch.zeros_like(valid)
    kept[order] = rank < keep
    return kept & valid


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    tokens: Tensor,
    valid: Tensor | None = None,
    *,
    minus_baseline: bool = True,
    kl: SampleKL | None = None,
    kl_penalty: float = 0.0,
) -> AdvantageEstimate:
    """REINFORCE++ (arXiv 2501.03262): one baseline and one scale for the whole step.

    A_t = r - kl_penalty * (sum over i >= t of KL_i), where with `minus_baseline` r is the reward minus the mean of
    its group (the variant for groups), and then (A_t - mean) / (std + eps) over all trained tokens of the step.
    tokens [N]: number of trained tokens of each sample. A masked sample has 0: it counts in its group's mean but not in
    the standardisation. std: over all tokens, with n (not n - 1). The KL part of A_t is applied to tokens later: see
    `AdvantageEstimate` and `token_advantages`. If all A_t are equal, the result is exactly 0.
    """
    if tokens.shape != rewards.shape:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}, the rewards {tuple(rewards.shape)}")
    groups = group_stats(rewards, group_ids, valid)
    values = groups.deviation if minus_baseline else torch.where(groups.valid, rewards.to(torch.float64), 0.0)
    counted = torch.where(groups.valid, tokens.to(torch.float64), 0.0)
    mean, std = token_moments(values, counted, kl, kl_penalty)
    scale = torch.where(std > 0, 1 / (std + EPS), 0.0)
    differences = torch.where(groups.valid, values - mean, 0.0) if std > 0 else torch.zeros_like(values)
    term = advantage_term(rewards, differences)
    if std > 0:
        term = replace(term, scale=torch.full_like(values, float(std) + EPS))
    return AdvantageEstimate(differences * scale, groups, kl_penalty * float(scale), {"": term})


def gdpo_advantages(
    rewards: Tensor,
    rewards_by_name: Mapping[str, Tensor],
    group_ids: Tensor,
    valid: Tensor | None = None,
    weights: RewardWeights | None = None,
    *,
    normalize: bool = True,
    leave_one_out: bool = True,
    std_of_others: bool = False,
) -> AdvantageEstimate:
    """GDPO (arXiv 2601.05242): 0 for failed samples. `rewards` [N]: of all names together, for the statistics.

    A_k = (r_k - mean) / std of the group, for each named reward by itself (`grpo_advantages`), over the samples to
    which it applies: for the others r_k is NaN and A_k is 0; A = sum of w_k A_k;
    then A / (std(A) + eps) over all valid samples of the step (std with n - 1). The mean is 0 in every group, so over
    the step too; it is not subtracted, so that a group in which every named reward is equal stays exactly 0.
    weights: by name, or in the order of the sorted names; None: 1 each. Raises ValueError if there are fewer than two
    names or the weights do not match them.
    """
    names = sorted(rewards_by_name)
    if max(len(names), len(weights or ())) < 2:
        raise ValueError(
            f"gdpo needs at least two named rewards, not {len(names)} ({', '.join(names) or 'none'}); "
            "with one reward use the estimator grpo"
        )
    weight_of = weights_by_name(names, weights)
    parts, terms = [], {}
    # No eps within a group: where named rewards cancel out, it would leave a remainder that the step's std amplifies.
    compared = partial(
        grpo_advantages, normalize=normalize, leave_one_out=leave_one_out, std_of_others=std_of_others, eps=0.0
    )
    for name in names:
        try:
            of_name = rewards_by_name[name]
            of_name = of_name if valid is None else of_name.masked_fill(~valid, torch.nan)
            estimate = compared(of_name, group_ids, ~of_name.isnan())
        except ValueError as error:
            raise ValueError(f"named reward {name!r}: {error}") from error
        parts.append(weight_of[name] * estimate.advantages)
        terms[name] = replace(estimate.terms[""], weight=weight_of[name])
    total = torch.stack(parts).sum(0)
    count = total.numel() if valid is None else int(valid.sum())
    std = (total.square().sum() / max(count - 1, 1)).sqrt()
    rounding = EQUAL_REWARDS_TOLERANCE * torch.stack(parts).abs().sum(0)
    groups = group_stats(rewards, group_ids, valid)
    if not (std > rounding).all():
        return AdvantageEstimate(torch.zeros_like(total), groups)
    return AdvantageEstimate(total / (std + EPS), groups, terms=terms, scale=float(std) + EPS)
