"""KL estimators, masked reductions, the supervised loss."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_mcore.objective import NLLLossFn, combine_metrics
from grpo_mcore.objective.kl import js_divergence, kl_estimate, kl_penalty
from grpo_mcore.objective.reduce import MaskedTokens

from .samples import counts, draw, packed, padded


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


def test_reductions_ignore_invalid_tokens() -> None:
    batch = {
        "token_mask": torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
    }
    tokens = MaskedTokens.from_batch(torch.Size((3, 4)), batch, 2, 2)
    values = torch.tensor([9, -2, 9, -1, 9, 9, 9, 9, 9, 9, 9, 9], dtype=torch.float64)
    assert float(tokens.sum(values)) == -3
    assert (float(tokens.minimum(values)), float(tokens.maximum(values))) == (-2, -1)
    assert tokens.maximum_by_sequence(values)[:3].tolist() == [-1, -math.inf, -math.inf]
    assert tokens.sum_by_sequence(values)[:2].tolist() == [-3, 0]
    assert tokens.mean_by_sequence(values)[:2].tolist() == [-1.5, 0]
    assert (float(tokens.mean(values)), float(tokens.mean(values, by_sequence=True))) == (-1.5, -0.75)


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
