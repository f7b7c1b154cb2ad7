"""ClippedPGLossFn: each term against its formula and its derivative, and the entries that a batch needs."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn, Marking, combine_metrics, step_metrics

from .cases import BY_AGE, CONFIGS, IS, TIS
from .harness import MAX_AGE, assert_same, expected, run
from .samples import all_trained, draw, packed, padded


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_term_is_its_formula(name: str, layout) -> None:
    cfg = ClippedPGLossConfig(**CONFIGS[name])
    for dtype in (torch.float32, torch.float64):
        samples = draw(seed=len(name), count=9, dtype=dtype)
        assert_same(run(cfg, samples, layout), expected(cfg, samples))


@pytest.mark.parametrize("low", [None, 0.2])
def test_the_share_of_tokens_with_high_covariance_is_marked(low: float | None) -> None:
    """Against sorting in plain Python. Losses and gradients of clip_cov (with a share of 1), kl_cov, sapo, dppo, gmpo,
    dro, cispo and gspo were compared with verl 0.9.1's functions by hand in November 2026: equal within 1e-9."""
    logprobs, advantages = torch.randn(2, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    places = torch.randperm(40, generator=torch.Generator().manual_seed(4)).double()
    mean = [math.fsum(column.tolist()) / 40 for column in (logprobs, advantages)]
    rows = zip(places.tolist(), logprobs.tolist(), advantages.tolist(), strict=True)
    covariance = {place: (logprob - mean[0]) * (advantage - mean[1]) for place, logprob, advantage in rows}
    between = {place for place, value in covariance.items() if low is not None and low < value < 1.0}
    draws = []
    for seed in range(20):
        chosen = Marking(0.11, low, 1.0 if low else math.inf).choose(places, logprobs, advantages, seed).tolist()
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))  # as another layout has them
        again = Marking(0.11, low, 1.0 if low else math.inf)
        assert sorted(again.choose(places[order], logprobs[order], advantages[order], seed).tolist()) == sorted(chosen)
        draws.append(frozenset(chosen))
        assert len(chosen) == len(set(chosen)) == 4
        if low is None:
            assert chosen == sorted(covariance, key=covariance.__getitem__)[:-5:-1]
    if low is not None:
        assert len(between) > 6 and frozenset.union(*draws) == between and len(set(draws)) > 10
        assert len(Marking(0.9, low, 1.0).choose(places, logprobs, advantages, 0)) == len(between)
    assert len(Marking(1e-9).choose(places, logprobs, advantages, 0)) == 1  # at least one
    assert not len(Marking(0.1).choose(places[:0], logprobs[:0], advantages[:0], 0))


NO_KL = {"reference_policy_kl_penalty": 0.0}
APPROXIMATION = {
    "use_on_policy_kl_approximation": True,
    "reference_policy_kl_penalty": 0.5,
    "kl_input_clamp_value": None,
}
# Terms whose gradient is the derivative of their value: no stop-gradient on something that curr is part of.
DERIVATIVES = {
    name: NO_KL | CONFIGS[name]
    for name in (
        "asymmetric; dual clip; sequence level; dr. grpo; gspo; gspo, weights; gspo, tis; gspo, icepop; gspo, product; "
        "gspo, product, tis by age; gspo, icepop by age; reinforce; weights; tis; icepop; seq-mask-tis; tis by age; "
        "icepop by age; seq-mask-tis by age; positive nll"
    ).split("; ")
} | {
    f"on-policy {kind}{', clamped' * (clamp is not None)}": {
        **APPROXIMATION,
        "reference_policy_kl_type": kind,
        "kl_output_clamp_value": clamp,
    }
    for kind in ("k1", "k2", "k3")
    for clamp in (None, 0.1)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVATIVES)
def test_gradient_is_the_derivative(name: str) -> None:
    samples = draw(seed=11, count=4, longest=6, dtype=torch.float64)
    loss_fn = ClippedPGLossFn(DERIVATIVES[name])
    for layout in (padded, packed):
        curr, batch = layout(samples)
        # gradcheck also moves the padding, which must therefore be a number.
        values = torch.nan_to_num(curr.detach()).requires_grad_()
        assert torch.autograd.gradcheck(lambda c, batch=batch: loss_fn(c, batch, 3, 9)[0], (values,))


@pytest.mark.parametrize(
    ("cfg", "gradient"),
    [
        # With r = exp(-1.0 + 1.3) = 1.3499, prev -1.3, gen -1.1, ref -1.4; A = 2, then A = -2; two tokens.
        ({"use_cispo": True, "ratio_clip_max": 0.2, **NO_KL}, [-2 * 1.2 / 2, 2 * 1.2 / 2]),
        ({"force_on_policy_ratio": True, **NO_KL}, [-2 / 2, 2 / 2]),
        ({"force_on_policy_ratio": True, **NO_KL, **IS}, [-1.1051709180756 * 2 / 2, 1.1051709180756 * 2 / 2]),
        # d/dcurr of curr.detach-weighted k(x), x = -0.4: k1 = 0.4, plus 1; k2 = 0.08, minus 0.4; k3: minus x.
        ({"disable_ppo_ratio": True, "reference_policy_kl_type": "k1"}, [(-2 + 0.014) / 2, (2 + 0.014) / 2]),
        ({"disable_ppo_ratio": True, "reference_policy_kl_type": "k2"}, [(-2 + 0.0048) / 2, (2 + 0.0048) / 2]),
        ({"disable_ppo_ratio": True, "reference_policy_kl_type": "k3"}, [(-2 + 0.004) / 2, (2 + 0.004) / 2]),
        # At the input clamp the KL is constant; the bounds are on |x| = 0.4.
        ({"disable_ppo_ratio": True, "kl_input_clamp_value": 0.39}, [-2 / 2, 2 / 2]),
        ({"disable_ppo_ratio": True, "kl_input_clamp_value": 0.41}, [(-2 + 0.004) / 2, (2 + 0.004) / 2]),
    ],
)
def test_gradient_past_a_stop_gradient_by_hand(cfg, gradient: list[float]) -> None:
    def row(*values: float) -> torch.Tensor:
        return torch.tensor([[0.0, *values]], dtype=torch.float64)

    curr = row(-1.0, -1.0).requires_grad_()
    batch = {
        "prev_logprobs": row(-1.3, -1.3),
        "generation_logprobs": row(-1.1, -1.1),
        "reference_policy_logprobs": row(-1.4, -1.4),
        "advantages": row(2.0, -2.0),
        "token_mask": torch.ones(1, 3),
        "sample_mask": torch.ones(1),
    }
    ClippedPGLossFn(cfg)(curr, batch, 1, 2)[0].backward()
    assert curr.grad is not None and curr.grad[0, 1:].tolist() == pytest.approx(gradient, rel=1e-12)


def test_kl_gradient_is_the_gradient_of_the_kl() -> None:
    """Compare expectations over tokens drawn from the policy: exact sums over a vocabulary."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(torch.linspace(-1, 1, 7, dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    for kind in ("k1", "k3"):
        # Each token, weighted by its probability, is a sequence: the mean over tokens is the expectation.
        weight = logprobs.detach().exp()[:, None]
        zeros = torch.zeros(7, 1, dtype=torch.float64)
        batch = {
            "prev_logprobs": torch.cat([zeros, logprobs.detach()[:, None]], 1),
            "reference_policy_logprobs": torch.cat([zeros, reference[:, None]], 1),
            "advantages": torch.zeros(7, 2, dtype=torch.float64),
            "token_mask": torch.cat([zeros, weight], 1),
            "sample_mask": torch.ones(7),
        }
        loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": kind})
        loss, _ = loss_fn(torch.cat([zeros, logprobs[:, None]], 1), batch, 7, 1)
        (actual,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(actual, wanted)


def test_a_product_that_overflows_is_a_large_weight() -> None:
    """exp(800) is not a float64: tis clamps it to its upper bound, icepop drops it."""
    (sample,) = all_trained(draw(seed=0, count=1, longest=1, dtype=torch.float64))
    sample.curr = torch.full((9,), -1.0, dtype=torch.float64)
    sample.columns = {name: column.expand(9).clone() for name, column in sample.columns.items()}
    sample.columns |= {"prev_logprobs": sample.curr.clone(), "generation_logprobs": sample.curr - 100}
    settings = {**CONFIGS["gspo, product"], "truncated_importance_sampling_ratio": 3.0, **NO_KL}
    for kind, low, wanted in (("tis", None, 3.0), ("icepop", 0.5, 0.0)):
        cut = {"truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio_min": low}
        metrics = run(settings | cut, [sample]).metrics
        assert metrics["sampling_importance_ratio"] == wanted
        assert 1e300 < metrics["sampling_importance_ratio_before_truncation"] < math.inf


def test_sample_mask_and_rewards_may_be_given_by_token() -> None:
    samples = draw(seed=5, count=6)
    loss_fn = ClippedPGLossFn({"positive_example_nll_weight": 1.0})
    for layout in (padded, packed):
        curr, batch = layout(samples)
        wanted, _ = loss_fn(curr, batch, 3, 17)
        rows = torch.arange(6)[:, None].expand(6, curr.shape[1])
        segments = batch["segments"][None] if "segments" in batch else rows
        spread = {name: batch[name].double()[segments] for name in ("sample_mask", "rewards")}
        actual, _ = loss_fn(curr, batch | spread, 3, 17)
        assert float(actual.detach()) == float(wanted.detach())


def test_ages_of_a_packed_row_have_the_shape_of_segments_or_of_logprobs() -> None:
    curr, batch = packed(draw(seed=5, count=6), padding=2)
    loss_fn = ClippedPGLossFn(BY_AGE, max_age=1)
    flat, row = (
        combine_metrics([loss_fn(curr, batch | {"ages": a}, 3, 9)[1]]) for a in (batch["ages"], batch["ages"][None])
    )
    assert flat == row


def test_metrics_by_age_have_names_that_do_not_depend_on_the_data() -> None:
    young, old = draw(seed=5, count=6), draw(seed=6, count=6)
    for s in young:
        s.columns["ages"].zero_()
    reports = [ClippedPGLossFn(TIS, max_age=5)(*packed(samples), 5, 30)[1] for samples in (young, old)]
    assert set(reports[0]) == set(reports[1])
    assert {f"is_oob_ratio/age_{age}" for age in range(6)} <= set(reports[0])
    assert "token_share/age_6" not in reports[0]
    names = {name for name in ClippedPGLossFn(TIS)(*packed(old), 5, 30)[1] if "age" in name}
    assert names == {"trajectory_age_mean", "trajectory_age_max"}
    with pytest.raises(ValueError, match="max_age is -1"):
        ClippedPGLossFn({}, max_age=-1)


def test_prev_may_be_missing_only_where_it_is_the_current_policy() -> None:
    curr, batch = padded(draw(seed=6, count=4))
    wanted, wanted_metrics = ClippedPGLossFn({})(curr, batch | {"prev_logprobs": curr.detach()}, 4, 20)
    without = {name: value for name, value in batch.items() if name != "prev_logprobs"}
    for loss_fn in (ClippedPGLossFn({}, prev_equals_curr=True), ClippedPGLossFn({"force_on_policy_ratio": True})):
        loss, metrics = loss_fn(curr, without, 4, 20)
        assert float(loss.detach()) == float(wanted.detach())
        assert combine_metrics([metrics]) == combine_metrics([wanted_metrics])


@pytest.mark.parametrize(
    ("cfg", "entry", "key"),
    [
        ({}, "prev_logprobs", "force_on_policy_ratio"),
        ({}, "reference_policy_logprobs", "loss_fn.reference_policy_kl_penalty"),
        ({}, "advantages", "policy term"),
        ({}, "token_mask", "token_mask"),
        ({}, "sample_mask", "sample_mask"),
        (IS, "generation_logprobs", "loss_fn.use_importance_sampling_correction"),
        ({"use_on_policy_kl_approximation": True}, "generation_logprobs", "loss_fn.use_on_policy_kl_approximation"),
        ({"positive_example_nll_weight": 1.0}, "rewards", "loss_fn.positive_example_nll_weight"),
        ({"entropy_coeff": 0.0}, "entropies", "loss_fn.entropy_coeff"),
        (BY_AGE, "ages", "loss_fn.truncated_importance_sampling_ratio_by_age"),
    ],
)
def test_a_missing_input_is_named_with_the_key_that_needs_it(cfg, entry: str, key: str) -> None:
    curr, batch = padded(draw(seed=1, count=2))
    for lacking in ({name: value for name, value in batch.items() if name != entry}, batch | {entry: None}):
        with pytest.raises(ValueError, match=f"{entry}") as error:
            ClippedPGLossFn(cfg)(curr, lacking, 2, 5)
        assert key in str(error.value)


def test_metrics_need_their_entries_in_the_batch() -> None:
    curr, batch = padded(draw(seed=1, count=2))
    del batch["generation_logprobs"]
    _, metrics = ClippedPGLossFn({}, max_age=1)(curr, batch, 2, 5)
    assert "gen_kl_error" not in metrics and "probs_ratio" in metrics
    assert "token_share/age_1" in metrics and "gen_kl_error/age_1" not in metrics
    del batch["ages"]
    assert not [name for name in ClippedPGLossFn({}, max_age=1)(curr, batch, 2, 5)[1] if "age" in name]


def test_wrong_shapes_are_named() -> None:
    curr, batch = packed(draw(seed=1, count=2))
    for change, message in (
        ({"advantages": torch.zeros(3)}, "advantages"),
        ({"ages": torch.zeros(3)}, "ages"),
        ({"sample_mask": torch.zeros(7)}, "sample_mask"),
        ({"num_segments": torch.tensor(2)}, "num_segments"),
        ({"segments": torch.zeros(1, dtype=torch.int64)}, "segments"),
    ):
        with pytest.raises(ValueError, match=message):
            ClippedPGLossFn({})(curr, batch | change, 2, 5)


def test_the_loss_of_one_batch_is_the_loss_it_reports() -> None:
    curr, batch = packed(draw(seed=1, count=5))
    loss, metrics = ClippedPGLossFn({}, max_age=MAX_AGE)(curr, batch, 4, 20)
    assert loss.dtype == torch.float64 and loss.shape == ()
    assert step_metrics([combine_metrics([metrics])])["loss"] == float(loss.detach())


@pytest.mark.parametrize("layout", [padded, packed])
def test_the_entropy_of_each_token_has_equal_weight(layout) -> None:
    samples = draw(seed=3, count=7)
    curr, batch = layout(samples)
    batch["entropies"].requires_grad_()
    toks = sum(len(s.trained) for s in samples)
    loss, metrics = ClippedPGLossFn(NO_KL | {"entropy_coeff": 0.25})(curr, batch, 7, toks)
    loss.backward()
    slopes = batch["entropies"].grad
    assert metrics["entropy"].item() > 0 and not metrics["entropy"].requires_grad
    assert int((slopes != 0).sum()) == toks
    torch.testing.assert_close(slopes[slopes != 0], torch.full((toks,), -0.25 / toks))


@pytest.mark.parametrize("layout", [padded, packed])
def test_the_nll_of_positive_samples_may_be_divided_by_their_tokens_in_each_micro_batch(layout) -> None:
    samples = draw(seed=3, count=6)
    cfg = NO_KL | {"positive_example_nll_weight": 0.5, "positive_example_nll_divisor": "micro_batch"}
    without = run(NO_KL, samples, layout, [[[0, 1, 2], [3]], [[4, 5]]]).loss
    added = run(cfg, samples, layout, [[[0, 1, 2], [3]], [[4, 5]]]).loss - without
    expected_sum = 0.0
    for part in ([0, 1, 2], [3], [4, 5]):
        positive = [samples[i] for i in part if samples[i].reward > 0]
        curr, batch = layout(positive) if positive else (None, None)
        if positive:
            toks = sum(len(s.trained) for s in positive)
            cfg_all = NO_KL | {"positive_example_nll_weight": 1.0}
            _, metrics = ClippedPGLossFn(cfg_all)(curr, batch, len(positive), toks)
            expected_sum += 0.5 * metrics["positive_nll_loss"].item()
    assert expected_sum > 0 and added == pytest.approx(expected_sum, rel=1e-12)
