"""A critic's part of the objective: advantages and returns of tokens from rewards and values, and the critic's loss."""

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective.kl import SampleKL, every_sample, token_kl, token_moments
from grpo_mcore.objective.reduce import Count, MaskedTokens
from grpo_mcore.recipe import GAEConfig, KLType, ValueLossConfig


def gae(values: Tensor, rewards: Tensor, gamma: float, lambda_: float) -> Tensor:
    """Return the generalised advantage estimate (arXiv 1506.02438) of each token that a sample generated, float64 [n]:

    delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lambda A_t+1, with V and A 0 after the last one.
    values, rewards: float64 [n]. V_t is the value of what comes before token t. Tokens in between that the sample did
    not generate, such as tool results, are not among the n: neither deltas nor discounts are theirs.
    """
    later = torch.cat([values[1:], values.new_zeros(1)])
    deltas = (rewards + gamma * later - values).tolist()
    sums = list(accumulate(reversed(deltas), lambda after, delta: delta + gamma * lambda_ * after))
    return torch.tensor(sums[::-1], dtype=torch.float64)


def policy_lambda(cfg: GAEConfig, tokens: int) -> float:
    """Return the lambda of the advantages of a sample with this number of generated tokens."""
    if cfg.length_adaptive_alpha is not None:
        return max(0.0, 1 - 1 / (cfg.length_adaptive_alpha * max(tokens, 1)))
    return cfg.gae_lambda if cfg.gae_lambda_policy is None else cfg.gae_lambda_policy


def critic_columns(
    batch: Mapping[str, Any], cfg: GAEConfig, kl_kind: KLType | None = None, kl_penalty: float = 0.0
) -> dict[str, Tensor]:
    """Return the columns `gae` and `returns` of a micro-batch, float64 in the shape of its token_mask; 0 for tokens
    that are not trained on.

    batch: as for the loss, on the CPU, with `values` of each token, and `outcomes`, the reward of each sample (or of
    its first token). The outcome is the reward of the last token that a sample generated; with `kl_kind` each token's
    reward is lowered by kl_penalty x KL(prev || reference). The return of a token is its advantage under
    gae_lambda_value plus its value.
    """
    tokens = every_sample(batch)
    values = tokens.column(_needed(batch, "values").detach(), "values")
    outcomes = tokens.per_sequence(_needed(batch, "outcomes"), "outcomes").tolist()
    rewards = torch.zeros_like(values) if kl_kind is None else -kl_penalty * token_kl(batch, tokens, kl_kind)
    lambda_value = cfg.gae_lambda if cfg.gae_lambda_value is None else cfg.gae_lambda_value
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    places = tokens.valid.nonzero().flatten()
    for sequence, index in enumerate(places.split(_lengths(tokens, places))):
        if not len(index):
            continue
        rewards[index[-1]] += outcomes[sequence]
        of_sample = (values[index], rewards[index], cfg.gae_gamma)
        advantages[index] = gae(*of_sample, policy_lambda(cfg, len(index)))
        returns[index] = gae(*of_sample, lambda_value) + values[index]
    return {"gae": advantages.reshape(tokens.shape), "returns": returns.reshape(tokens.shape)}


def _lengths(tokens: MaskedTokens, places: Tensor) -> list[int]:
    return torch.bincount(tokens.segment[places], minlength=tokens.num_segments).tolist()


def gae_stats(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return statistics of each sample over its trained tokens, float64 [samples]: `tokens`, their number; `gae_sum`,
    the sum of their advantages; `gae_square`, that of the squared deviations from the sample's mean."""
    tokens = every_sample(batch)
    values = batch["gae"].reshape(-1)
    deviation = values - tokens.expand(tokens.mean_by_sequence(values))
    stats = {
        "tokens": tokens.tokens_by_sequence,
        "gae_sum": tokens.sum_by_sequence(values),
        "gae_square": tokens.sum_by_sequence(deviation.square()),
    }
    return {name: of_sample[: tokens.num_segments] for name, of_sample in stats.items()}


def gae_moments(stats: Mapping[str, Tensor], tokens: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of the advantages over all trained tokens of the step. stats: `gae_stats` of
    all samples; tokens: those that count of each, float64 [samples]. The deviation is 0 if all are equal."""
    zeros = torch.zeros_like(stats["gae_sum"])
    mean, std = token_moments(zeros, tokens, SampleKL(zeros, stats["gae_sum"], stats["gae_square"]), -1.0)
    return float(mean), float(std)


class ValueLossFn:
    """scale x 0.5 x mean(max((V - R)^2, (clip(V, V_old +- cliprange) - R)^2)) over all tokens (PPO2's value loss)."""

    def __init__(self, cfg: ValueLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, values: Tensor, batch: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the loss, and metrics for `combine_metrics`. Shapes, masks and counts as
        for `ClippedPGLossFn`, with values in place of log-probs; the batch needs `values`, those before the step, and
        `returns`."""
        tokens = MaskedTokens.from_batch(values.shape, batch, global_valid_seqs, global_valid_toks)
        curr = tokens.column(values, "values")
        old, returns = (tokens.column(_needed(batch, name).detach(), name) for name in ("values", "returns"))
        error = (curr - returns).square()
        clipped = torch.zeros_like(error)
        if self.cfg.cliprange is not None:
            bounded = (old + (curr - old).clamp(-self.cfg.cliprange, self.cfg.cliprange) - returns).square()
            clipped = (bounded > error).to(torch.float64)
            error = torch.maximum(error, bounded)
        loss = self.cfg.scale * 0.5 * tokens.mean(error)
        gap = returns - old
        return loss, {
            "loss": loss.detach(),
            "values_mean": tokens.mean(old),
            "values_min": tokens.minimum(old),
            "values_max": tokens.maximum(old),
            "returns_mean": tokens.mean(returns),
            "returns_square": tokens.mean(returns.square()),
            "value_error_mean": tokens.mean(gap),
            "value_error_square": tokens.mean(gap.square()),
            "value_clip_fraction": tokens.mean(clipped),
        }


def critic_metrics(step: Mapping[str, float]) -> dict[str, float]:
    """Return a critic's metrics of a step under `critic/`. explained_var: 1 - Var(returns - values) / Var(returns) of
    the values before the step's update; left out where all returns are equal."""
    variance = step["returns_square"] - step["returns_mean"] ** 2
    rest = step["value_error_square"] - step["value_error_mean"] ** 2
    squares = ("returns_square", "value_error_square", "value_error_mean")
    metrics = {name: value for name, value in step.items() if name not in squares}
    if variance > 1e-12 * max(1.0, step["returns_square"]) and math.isfinite(rest):
        metrics["explained_var"] = 1 - rest / variance
    return {f"critic/{name}": value for name, value in metrics.items()}


def _needed(batch: Mapping[str, Any], name: str) -> Tensor:
    if batch.get(name) is None:
        raise ValueError(f"a critic needs {name!r}, which is not in the batch; it has: {', '.join(sorted(batch))}")
    return batch[name]
