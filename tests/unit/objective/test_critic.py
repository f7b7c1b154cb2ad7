"""Advantages and the critic's loss against float64 formulas, and sums written out by brute force."""

from __future__ import annotations

import math
import random

import pytest
import torch

from grpo_mcore.objective import (
    ClippedPGLossFn,
    ValueLossFn,
    combine_metrics,
    critic_columns,
    critic_metrics,
    gae,
    gae_moments,
    gae_stats,
    policy_lambda,
    step_metrics,
)
from grpo_mcore.objective.kl import kl_estimate
from grpo_mcore.recipe import ClippedPGLossConfig, GAEConfig, ValueLossConfig

MASKS = ((0, 0, 1, 1, 1), (0, 1, 0, 0, 1, 1, 0), (0, 1), (0, 0, 1))
"""Trained tokens of packed samples: the second has a tool result between two turns, and one after the last."""


def by_sums(values: list[float], rewards: list[float], gamma: float, lambda_: float) -> list[float]:
    """Return GAE as its definition, the sum over all later deltas with their weights."""
    ends = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, ends, values, strict=True)]
    return [
        math.fsum((gamma * lambda_) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def by_returns(values: list[float], rewards: list[float], gamma: float, lambda_: float) -> list[float]:
    """Return GAE as the lambda-weighted mean of n-step returns, minus the value."""
    found = []
    for t, value in enumerate(values):
        left, total, weight = len(values) - t, 0.0, 1.0
        for n in range(1, left + 1):
            ahead = sum(gamma**k * rewards[t + k] for k in range(n))
            ahead += gamma**n * values[t + n] if t + n < len(values) else 0.0
            share = weight if n == left else weight * (1 - lambda_)
            total, weight = total + share * ahead, weight * lambda_
        found.append(total - value)
    return found


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_gae_is_its_definition(gamma: float, lambda_: float) -> None:
    draw = random.Random(3)
    for n in (1, 2, 7):
        values, rewards = ([draw.gauss(0, 1) for _ in range(n)] for _ in range(2))
        found = gae(*(torch.tensor(x, dtype=torch.float64) for x in (values, rewards)), gamma, lambda_).tolist()
        assert found == pytest.approx(by_sums(values, rewards, gamma, lambda_), abs=1e-12)
        assert found == pytest.approx(by_returns(values, rewards, gamma, lambda_), abs=1e-12)


def packed(seed: int = 0) -> tuple[dict, list[float]]:
    """Return a packed row of MASKS with three tokens of padding, and the samples' outcomes."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([float(x) for of_sample in MASKS for x in of_sample] + [0.0] * 3)[None]
    segments = torch.tensor([i for i, of_sample in enumerate(MASKS) for _ in of_sample] + [len(MASKS)] * 3)
    names = ("values", "prev_logprobs", "reference_policy_logprobs")
    columns = {name: torch.randn(mask.shape, generator=generator) for name in names}
    outcomes = [1.0, -0.5, 0.25, 2.0]
    return columns | {
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "segments": segments,
        "num_segments": len(MASKS),
        "outcomes": torch.tensor(outcomes, dtype=torch.float64),
    }, outcomes


@pytest.mark.parametrize("kl", [None, "k1", "k3"])
def test_columns_of_a_packed_row_are_those_of_its_samples_without_what_they_did_not_generate(kl: str | None) -> None:
    batch, outcomes = packed()
    cfg = GAEConfig(gae_gamma=0.97, gae_lambda_value=1.0, gae_lambda_policy=0.8)
    columns = critic_columns(batch, cfg, kl, 0.1)  # type: ignore[arg-type]
    start, expected, returns = 0, torch.zeros(batch["token_mask"].numel()), torch.zeros(batch["token_mask"].numel())
    expected, returns = expected.double(), returns.double()
    for of_sample, outcome in zip(MASKS, outcomes, strict=True):
        places = [start + i for i, trained in enumerate(of_sample) if trained]
        values = [batch["values"][0, i].item() for i in places]
        rewards = [0.0] * len(places)
        if kl is not None:
            prev, reference = (batch[name][0].double() for name in ("prev_logprobs", "reference_policy_logprobs"))
            rewards = [-0.1 * kl_estimate(prev[i], reference[i], kl).item() for i in places]  # type: ignore[arg-type]
        rewards[-1] += outcome
        expected[places] = torch.tensor(by_sums(values, rewards, 0.97, 0.8), dtype=torch.float64)
        plus = by_sums(values, rewards, 0.97, 1.0)
        returns[places] = torch.tensor([a + v for a, v in zip(plus, values, strict=True)], dtype=torch.float64)
        start += len(of_sample)
    assert torch.allclose(columns["gae"][0], expected, atol=1e-12)
    assert torch.allclose(columns["returns"][0], returns, atol=1e-12)


def test_a_sample_alone_has_the_bits_that_it_has_in_a_row() -> None:
    batch, outcomes = packed()
    whole, start = critic_columns(batch, GAEConfig()), 0
    for i, of_sample in enumerate(MASKS):
        here = slice(start, start + len(of_sample))
        alone = {name: batch[name][:, here] for name in ("token_mask", "values")}
        alone |= {"sample_mask": torch.ones(1), "outcomes": torch.tensor([outcomes[i]], dtype=torch.float64)}
        assert torch.equal(critic_columns(alone, GAEConfig())["gae"], whole["gae"][:, here])
        start += len(of_sample)


def test_a_critic_of_0_with_lambda_1_is_reinforce_to_the_last_bit() -> None:
    batch, outcomes = packed()
    batch["values"] = torch.zeros_like(batch["values"])
    reward = torch.tensor([*outcomes, 0.0], dtype=torch.float64)[batch["segments"]][None]
    expected = torch.where(batch["token_mask"] > 0, reward, 0.0)
    columns = critic_columns(batch, GAEConfig(gae_lambda=1.0))
    assert torch.equal(columns["gae"], expected) and torch.equal(columns["returns"], expected)
    loss = ClippedPGLossFn(ClippedPGLossConfig(disable_ppo_ratio=True, reference_policy_kl_penalty=0.0))
    curr = batch["prev_logprobs"].double().requires_grad_()
    value, _ = loss(curr, batch | {"advantages": columns["gae"]}, global_valid_seqs=3, global_valid_toks=7)
    value.backward()
    counts = batch["token_mask"] * (batch["segments"] != 2)
    assert torch.equal(curr.grad, -expected * counts / 7)


def test_longer_answers_look_further_ahead() -> None:
    cfg = GAEConfig(length_adaptive_alpha=0.05)
    assert policy_lambda(cfg, 100) == 1 - 1 / 5 and policy_lambda(cfg, 10) == 0.0
    assert policy_lambda(GAEConfig(gae_lambda=0.9), 10) == 0.9
    assert policy_lambda(GAEConfig(gae_lambda_policy=0.7), 10) == 0.7


def test_moments_are_those_of_all_trained_tokens_that_count() -> None:
    batch, _ = packed()
    batch |= critic_columns(batch, GAEConfig())
    stats = gae_stats(batch)
    tokens = stats["tokens"] * batch["sample_mask"]
    counted = batch["gae"][(batch["token_mask"] > 0) & (batch["segments"] != 2)[None]]
    assert gae_moments(stats, tokens) == pytest.approx((counted.mean().item(), counted.std(correction=0).item()))


@pytest.mark.parametrize("cliprange", [None, 0.3])
def test_the_value_loss_is_its_formula(cliprange: float | None) -> None:
    batch, _ = packed()
    batch |= critic_columns(batch, GAEConfig())
    curr = torch.randn(batch["values"].shape, generator=torch.Generator().manual_seed(5), requires_grad=True)
    loss, metrics = ValueLossFn(ValueLossConfig(scale=0.5, cliprange=cliprange))(
        curr, batch, global_valid_seqs=3, global_valid_toks=7
    )
    loss.backward()
    expected, gradient = 0.0, torch.zeros_like(batch["values"])
    for t in ((batch["token_mask"] > 0) & (batch["segments"] != 2)[None])[0].nonzero().flatten().tolist():
        v, old, target = curr[0, t].item(), batch["values"][0, t].item(), batch["returns"][0, t].item()
        bounded = v if cliprange is None else min(max(v, old - cliprange), old + cliprange)
        plain, held = (v - target) ** 2, (bounded - target) ** 2
        expected += 0.5 * 0.5 * max(plain, held) / 7
        if plain >= held:  # else the bound holds the value, and its gradient is 0 unless it is within the range
            gradient[0, t] = 0.5 * (v - target) / 7
        elif bounded == v:
            gradient[0, t] = 0.5 * (v - target) / 7
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(curr.grad, gradient, atol=1e-6)
    assert metrics["loss"].item() == loss.item()


def test_the_explained_variance_is_that_of_all_tokens_however_they_are_batched() -> None:
    batch, _ = packed()
    batch |= critic_columns(batch, GAEConfig())
    loss = ValueLossFn(ValueLossConfig())
    halves = [batch | {"sample_mask": mask} for mask in (torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, 1.0, 0, 1.0]))]
    parts = [loss(batch["values"], half, global_valid_seqs=3, global_valid_toks=7)[1] for half in halves]
    found = critic_metrics(step_metrics([combine_metrics(parts)]) | {"lr": 1e-3, "grad_norm": 1.0})
    counted = (batch["token_mask"] > 0) & (batch["segments"] != 2)[None]
    values, returns = batch["values"].double()[counted], batch["returns"][counted]
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert found["critic/explained_var"] == pytest.approx(explained.item())
    assert found["critic/values_max"] == pytest.approx(values.max().item())
    assert found["critic/returns_mean"] == pytest.approx(returns.mean().item())
    assert set(found) == {
        f"critic/{name}"
        for name in ("loss", "grad_norm", "lr", "values_mean", "values_min", "values_max", "returns_mean",
                     "value_clip_fraction", "explained_var")
    }  # fmt: skip


def test_the_ratio_to_the_engine_needs_no_pass_before_the_update() -> None:
    batch, _ = packed()
    loss = ClippedPGLossFn(ClippedPGLossConfig(ratio_to_engine=True, policy_term="masked", ratio_clip_min=0.2,
                                               ratio_clip_max=0.3, reference_policy_kl_penalty=0.0))  # fmt: skip
    curr = batch.pop("prev_logprobs").double().requires_grad_()
    drift = 0.4 * torch.randn(curr.shape, generator=torch.Generator().manual_seed(1))
    batch |= {"generation_logprobs": curr.detach() + drift, "advantages": torch.full_like(curr, 2.0)}
    value, metrics = loss(curr, batch, global_valid_seqs=3, global_valid_toks=7)
    counted = (batch["token_mask"] > 0) & (batch["segments"] != 2)[None]
    ratio = torch.exp(-drift.double())
    kept = torch.where((ratio >= 0.8) & (ratio <= 1.3), ratio, 0.0)
    assert 0 < (kept[counted] == 0).sum() < counted.sum()
    value.backward()
    assert torch.allclose(curr.grad, torch.where(counted, -2.0 * kept, 0.0) / 7, atol=1e-7)
    gap = metrics["token_mult_prob_error"].item()
    assert gap == pytest.approx(torch.exp(drift.abs())[counted].sum().item() / 7, rel=1e-5)
