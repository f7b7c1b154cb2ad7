"""KL estimators, supervised loss, non-finite samples, reductions of metrics, rewards."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_mcore.objective import (
    METRIC_REDUCTIONS,
    NLLLossFn,
    combine_metrics,
    nonfinite_samples,
    overlong_filter,
    scale_reward_values,
    without_empty_extremes,
)
from grpo_mcore.objective.kl import js_divergence, kl_estimate, kl_penalty

from .reference import counts, draw, packed, padded


def test_kl_estimates_average_to_the_kl() -> None:
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), kind)).sum(), exact)
    assert (kl_estimate(p.log(), q.log(), "k2") == (q.log() - p.log()) ** 2 / 2).all()
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(p, q, "k5")  # type: ignore[arg-type]


def test_k3_keeps_its_digits_for_close_policies() -> None:
    x = 1e-6
    value = kl_estimate(torch.tensor(0.0, dtype=torch.float64), torch.tensor(x, dtype=torch.float64), "k3")
    assert float(value) == pytest.approx(x * x / 2, rel=1e-3)


def test_js_divergence_is_symmetric_and_bounded_by_the_likelier_side() -> None:
    # The example of the NeMo RL guide: an engine far more confident than the policy.
    gen, policy = torch.tensor(-5.0, dtype=torch.float64), torch.tensor(-15.0, dtype=torch.float64)
    assert float(js_divergence(gen, policy)) == float(js_divergence(policy, gen))
    assert float(kl_estimate(gen, policy, "k3")) == pytest.approx(9, abs=0.01)
    assert float(kl_estimate(policy, gen, "k3")) == pytest.approx(22015, abs=1)


def test_kl_penalty_outside_the_input_clamp_has_no_gradient() -> None:
    curr = torch.tensor([-1.0, -30.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -1.0], dtype=torch.float64)
    penalty = kl_penalty(curr, reference, kind="k1", input_clamp=20.0)
    assert penalty.tolist() == [1.0, -20.0]
    penalty.sum().backward()
    assert curr.grad is not None and curr.grad.tolist() == [
        2.0,
        0.0,
    ]  # (score * k1 = 1) + (d k1 = 1), nothing


def test_kl_penalty_ignores_a_factor_that_is_not_finite() -> None:
    curr = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    generation = torch.tensor([-math.inf, -1.0], dtype=torch.float64)
    penalty = kl_penalty(curr, torch.tensor([-2.0, -2.0]).double(), kind="k1", generation=generation)
    penalty.sum().backward()
    assert penalty.tolist() == [0.0, 1.0]
    assert curr.grad is not None and curr.grad.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("layout", [padded, packed])
def test_supervised_loss_is_the_mean_over_all_tokens(layout) -> None:
    samples = draw(seed=8, count=12)
    seqs, toks = counts(samples)
    expected = -sum(float(s.curr[t]) for s in samples for t in s.trained) / toks
    loss_fn = NLLLossFn()
    parts = [loss_fn(*layout(part), seqs, toks) for part in (samples[:5], samples[5:6], samples[6:])]
    assert sum(float(loss.detach()) for loss, _ in parts) == pytest.approx(expected, rel=1e-9)
    metrics = combine_metrics([m for _, m in parts])
    assert metrics["loss"] == pytest.approx(expected, rel=1e-9)
    assert (metrics["num_valid_samples"], metrics["num_valid_tokens"]) == (seqs, toks)


def test_supervised_loss_without_tokens_is_zero() -> None:
    curr, batch = padded(draw(seed=8, count=2))
    batch["token_mask"].zero_()
    loss, _ = NLLLossFn()(curr, batch, 0, 0)
    loss.backward()
    assert float(loss.detach()) == 0 and curr.grad is not None and not curr.grad.any()


@pytest.mark.parametrize("layout", [padded, packed])
def test_nonfinite_samples_are_named_only_where_they_count(layout) -> None:
    samples = draw(seed=9, count=8)
    for s in samples:
        s.sample_mask = 1.0
        s.columns["token_mask"].fill_(1)
    bad = [i for i, s in enumerate(samples) if len(s.curr) > 2][:2]
    samples[bad[0]].curr[1] = math.nan
    samples[bad[1]].curr[2] = -math.inf
    harmless = next(i for i, s in enumerate(samples) if i not in bad and len(s.curr) > 1)
    samples[harmless].curr[0] = math.nan  # the first token is never trained
    curr, batch = layout(samples)
    assert nonfinite_samples(curr, batch).nonzero().reshape(-1).tolist() == bad
    batch["sample_mask"][bad[0]] = 0
    assert nonfinite_samples(curr, batch).nonzero().reshape(-1).tolist() == bad[1:]


def test_combine_metrics_by_declared_reduction() -> None:
    first = {"loss": 1.0, "probs_ratio_min": math.inf, "probs_ratio_max": -math.inf}
    second = {"loss": 0.5, "probs_ratio_min": 0.9, "probs_ratio_max": 1.2}
    assert combine_metrics([first, second]) == {"loss": 1.5, "probs_ratio_min": 0.9, "probs_ratio_max": 1.2}
    assert combine_metrics([]) == {}
    assert without_empty_extremes(first) == {"loss": 1.0}
    assert without_empty_extremes(second) == second
    with pytest.raises(ValueError, match="probs_ratio"):
        combine_metrics([first, {"loss": 1.0}])
    with pytest.raises(ValueError, match="METRIC_REDUCTIONS"):
        combine_metrics([{"surprise": 1.0}])
    nan = combine_metrics([second, {**second, "probs_ratio_min": math.nan}])
    assert math.isnan(nan["probs_ratio_min"])


def test_extremes_are_named_and_reduced_alike() -> None:
    for name, reduction in METRIC_REDUCTIONS.items():
        assert reduction == next((r for r in ("min", "max") if name.endswith(f"_{r}")), "sum")


def test_scaled_rewards_are_clamped_and_hit_the_ends() -> None:
    rewards = torch.tensor([-3.0, 0.0, 0.25, 1.0, 7.0, math.nan])
    scaled = scale_reward_values(rewards, target_min=-1.0, target_max=0.1)
    assert scaled.dtype == rewards.dtype
    torch.testing.assert_close(scaled[:5], torch.tensor([-1.0, -1.0, -0.725, 0.1, 0.1]), rtol=0, atol=1e-7)
    assert scaled[4] == torch.tensor(0.1) and scaled[5].isnan()
    with pytest.raises(ValueError, match="source_max"):
        scale_reward_values(rewards, source_min=1.0, source_max=1.0)


def test_overlong_filter_masks_truncated_samples() -> None:
    mask = torch.tensor([1.0, 1.0, 0.0])
    assert overlong_filter(mask, torch.tensor([True, False, False])).tolist() == [0.0, 1.0, 0.0]
    assert mask.tolist() == [1.0, 1.0, 0.0]
