"""ClippedPGLossFn against the formulas, over layouts, on degenerate input."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_mcore.objective import (
    METRIC_REDUCTIONS,
    ClippedPGLossConfig,
    ClippedPGLossFn,
    combine_metrics,
    valid_counts,
)

from .cases import CONFIGS, GSPO, IS
from .reference import Sample, counts, draw, gradients, packed, padded, reference_loss


def random_config(rng: random.Random) -> ClippedPGLossConfig:
    """Any allowed combination: drawn until none of the rules refuses it."""
    while True:
        kind = rng.choice([None, None, "tis", "icepop", "seq-mask-tis"])
        by_sequence = rng.random() < 0.3
        try:
            return ClippedPGLossConfig(
                disable_ppo_ratio=rng.random() < 0.2,
                token_level_loss=not by_sequence and rng.random() < 0.6,
                sequence_level_importance_ratios=by_sequence,
                ratio_clip_min=rng.choice([0.05, 0.2, 1.0]),
                ratio_clip_max=rng.choice([0.05, 0.28, 4.0]),
                ratio_clip_c=rng.choice([None, None, 1.2, 3.0]),
                reference_policy_kl_penalty=rng.choice([0.0, 0.02, 1.0]),
                reference_policy_kl_type=rng.choice(["k1", "k2", "k3"]),
                kl_input_clamp_value=rng.choice([None, 0.3, 20.0]),
                kl_output_clamp_value=rng.choice([None, 0.1, 10.0]),
                use_importance_sampling_correction=kind is not None or rng.random() < 0.5,
                truncated_importance_sampling_type=kind,
                truncated_importance_sampling_ratio=kind and rng.choice([1.0, 1.2, 5.0]),
                truncated_importance_sampling_ratio_min=kind and rng.choice([0.5, 0.95]),
                use_on_policy_kl_approximation=rng.random() < 0.4,
                force_on_policy_ratio=rng.random() < 0.2,
                use_cispo=rng.random() < 0.3,
                positive_example_nll_weight=rng.choice([0.0, 0.5]),
            )
        except ValueError:
            continue


def close(actual: float, expected: float, rel: float = 1e-6) -> bool:
    return actual == pytest.approx(expected, rel=rel, abs=1e-12)


def assert_same_metrics(actual: dict[str, float], expected: dict[str, float], rel: float = 1e-6) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert close(actual[name], value, rel), (name, actual[name], value)


def assert_same_gradients(actual: list[torch.Tensor], expected: list[torch.Tensor], rel: float) -> None:
    scale = max((float(g.abs().max()) for g in expected), default=0.0)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=rel, atol=rel * scale)


def run(cfg, samples: list[Sample], layouts) -> tuple[float, list[torch.Tensor], dict[str, float]]:
    """Loss, gradients and metrics over micro-batches, each (its samples' numbers, curr, batch)."""
    seqs, toks = counts(samples)
    loss_fn = ClippedPGLossFn(cfg)
    total, grads, parts = 0.0, [torch.empty(0)] * len(samples), []
    for numbers, curr, batch in layouts:
        loss, metrics = loss_fn(curr, batch, global_valid_seqs=seqs, global_valid_toks=toks)
        loss.backward()
        total += float(loss.detach())
        parts.append(metrics)
        for number, grad in zip(numbers, gradients([samples[i] for i in numbers], curr), strict=True):
            grads[number] = grad
    return total, grads, combine_metrics(parts)


def one_batch(samples: list[Sample], layout=padded):
    return [(range(len(samples)), *layout(samples))]


def in_parts(samples: list[Sample], numbers: list[list[int]], layout):
    return [(part, *layout([samples[i] for i in part])) for part in numbers]


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_term_is_its_formula(name: str, layout) -> None:
    cfg = ClippedPGLossConfig(**CONFIGS[name])
    samples = draw(seed=len(name), count=9)
    loss, grads, metrics = run(cfg, samples, one_batch(samples, layout))
    expected_loss, expected_grads, expected_metrics = reference_loss(cfg, samples)
    assert close(loss, expected_loss)
    assert_same_gradients(grads, expected_grads, 1e-5)
    assert_same_metrics(metrics, expected_metrics)
    assert set(metrics) <= set(METRIC_REDUCTIONS)


@settings(deadline=None, max_examples=120)
@given(rng=st.randoms(use_true_random=True))
def test_every_allowed_combination_is_the_formula(rng: random.Random) -> None:
    cfg = random_config(rng)
    samples = draw(rng.getrandbits(32), rng.randint(1, 5), longest=7, spread=rng.choice([1e-3, 0.3, 2.0]))
    loss, grads, metrics = run(cfg, samples, one_batch(samples, rng.choice([packed, padded])))
    expected_loss, expected_grads, expected_metrics = reference_loss(cfg, samples)
    assert close(loss, expected_loss)
    assert_same_gradients(grads, expected_grads, 1e-5)
    assert_same_metrics(metrics, expected_metrics)


@pytest.mark.parametrize("name", ["dual clip", "gspo, icepop", "seq-mask-tis, sequence level"])
def test_the_layout_does_not_show(name: str) -> None:
    cfg = ClippedPGLossConfig(**CONFIGS[name])
    samples = draw(seed=7, count=64, longest=24)
    whole = list(range(64))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    loss, grads, metrics = run(cfg, samples, one_batch(samples))

    def cut(numbers: list[int], size: int) -> list[list[int]]:
        return [numbers[i : i + size] for i in range(0, 64, size)]

    def packed_with_padding(part: list[Sample]):
        return packed(part, padding=5)

    for parts, layout in (
        *((cut(whole, size), padded) for size in (1, 4, 16)),
        ([whole[rank::2] for rank in range(2)], padded),
        ([whole[rank::4] for rank in range(4)], packed),
        ([whole], packed),
        ([order], packed),
        (cut(order, 16), packed_with_padding),
        (cut(whole, 1), packed),
    ):
        again, again_grads, again_metrics = run(cfg, samples, in_parts(samples, parts, layout))
        assert close(again, loss)
        assert_same_gradients(again_grads, grads, 1e-6)
        assert_same_metrics(again_metrics, metrics)


def test_metrics_combine_in_two_stages() -> None:
    samples = draw(seed=1, count=8)
    seqs, toks = counts(samples)
    loss_fn = ClippedPGLossFn({})
    parts = [loss_fn(*padded([s]), seqs, toks)[1] for s in samples]
    ranks = [combine_metrics(parts[:3]), {}, combine_metrics(parts[3:])]
    assert_same_metrics(combine_metrics(ranks), combine_metrics(parts), 1e-12)


def test_sample_mask_and_rewards_may_be_given_by_token() -> None:
    samples = draw(seed=5, count=6)
    for layout in (padded, packed):
        curr, batch = layout(samples)
        expected, _ = ClippedPGLossFn({"positive_example_nll_weight": 1.0})(curr, batch, 3, 17)
        rows = torch.arange(6)[:, None].expand(6, curr.shape[1])
        segments = batch["segments"][None] if "segments" in batch else rows
        spread = {name: batch[name].double()[segments] for name in ("sample_mask", "rewards")}
        actual, _ = ClippedPGLossFn({"positive_example_nll_weight": 1.0})(curr, batch | spread, 3, 17)
        assert float(actual.detach()) == float(expected.detach())


@pytest.mark.parametrize(
    "name",
    [
        "asymmetric",
        "dual clip",
        "sequence level",
        "gspo",
        "gspo, icepop",
        "reinforce",
        "tis",
        "seq-mask-tis",
        "on-policy kl",
        "positive nll",
    ],
)
def test_gradcheck(name: str) -> None:
    """For terms whose gradient is the derivative of their value: no stop-gradient, no clamped KL factor."""
    cfg = {"reference_policy_kl_penalty": 0.0, **CONFIGS[name], "kl_input_clamp_value": None}
    samples = draw(seed=11, count=3, longest=5, dtype=torch.float64)
    loss_fn = ClippedPGLossFn(cfg)
    for layout in (padded, packed):
        _, batch = layout(samples)
        values = torch.nan_to_num(layout(samples)[0].detach()).requires_grad_()
        assert torch.autograd.gradcheck(lambda c, batch=batch: loss_fn(c, batch, 3, 9)[0], (values,))


def test_kl_gradient_is_the_gradient_of_the_kl() -> None:
    """In expectation over tokens drawn from the policy: an exact sum over a vocabulary."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(torch.linspace(-1, 1, 7, dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    (expected,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True
    )
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
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_valid_is_a_finite_zero(name: str) -> None:
    samples = draw(seed=2, count=3)
    for s in samples:
        s.sample_mask = 0.0
    for layout in (padded, packed):
        curr, batch = layout(samples)
        for zero in (0, torch.tensor(0)):
            loss, metrics = ClippedPGLossFn(CONFIGS[name])(curr, batch, zero, zero)
            loss.backward()
            assert float(loss.detach()) == 0.0
            assert curr.grad is not None and not curr.grad.any()
            assert not any(math.isnan(v) for v in combine_metrics([metrics]).values())


def test_a_fully_masked_row_changes_nothing() -> None:
    samples = draw(seed=4, count=4)
    samples[2].columns["token_mask"].zero_()
    for cfg in ({}, GSPO, {"token_level_loss": False}):
        cfg = ClippedPGLossConfig(**cfg)
        loss, grads, _ = run(cfg, samples, one_batch(samples))
        assert close(loss, reference_loss(cfg, samples)[0])
        assert not grads[2].any()


def test_the_first_token_is_never_trained() -> None:
    samples = draw(seed=4, count=5)
    for s in samples:
        s.columns["token_mask"].fill_(1)
    for layout in (padded, packed):
        _, grads, _ = run(ClippedPGLossConfig(), samples, one_batch(samples, layout))
        assert not any(float(g[0]) for g in grads)
        seqs, toks = valid_counts(layout(samples)[1])
        assert (float(seqs), float(toks)) == counts(samples)


def test_counts_are_exact_past_two_to_the_24() -> None:
    weights = torch.tensor([[0.0, 2.0**24, 1.0]])  # in float32 their sum is 2**24
    seqs, toks = valid_counts({"token_mask": weights, "sample_mask": torch.ones(1)})
    assert (float(seqs), float(toks)) == (1, 2**24 + 1)
    assert seqs.dtype == toks.dtype == torch.float64


def test_prev_may_be_missing_only_where_it_is_the_current_policy() -> None:
    samples = draw(seed=6, count=4)
    curr, batch = padded(samples)
    equal = batch | {"prev_logprobs": curr.detach()}
    without = {name: value for name, value in batch.items() if name != "prev_logprobs"}
    expected, expected_metrics = ClippedPGLossFn({})(curr, equal, 4, 20)
    for loss_fn in (
        ClippedPGLossFn({}, prev_equals_curr=True),
        ClippedPGLossFn({"force_on_policy_ratio": True}),
    ):
        loss, metrics = loss_fn(curr, without, 4, 20)
        assert float(loss.detach()) == float(expected.detach())
        assert_same_metrics(combine_metrics([metrics]), combine_metrics([expected_metrics]))
    with pytest.raises(ValueError, match="prev_logprobs"):
        ClippedPGLossFn({})(curr, without, 4, 20)


@pytest.mark.parametrize(
    ("cfg", "missing"),
    [
        ({}, "reference_policy_logprobs"),
        ({}, "advantages"),
        ({}, "token_mask"),
        ({}, "sample_mask"),
        (IS, "generation_logprobs"),
        ({"use_on_policy_kl_approximation": True}, "generation_logprobs"),
        ({"positive_example_nll_weight": 1.0}, "rewards"),
    ],
)
def test_a_missing_input_is_named(cfg, missing: str) -> None:
    curr, batch = padded(draw(seed=1, count=2))
    del batch[missing]
    with pytest.raises(ValueError, match=missing):
        ClippedPGLossFn(cfg)(curr, batch, 2, 5)


def test_no_mismatch_metrics_without_engine_logprobs() -> None:
    curr, batch = padded(draw(seed=1, count=2))
    del batch["generation_logprobs"]
    _, metrics = ClippedPGLossFn({})(curr, batch, 2, 5)
    assert "gen_kl_error" not in metrics and "probs_ratio" in metrics


def test_wrong_shapes_are_named() -> None:
    curr, batch = packed(draw(seed=1, count=2))
    for change, message in (
        ({"advantages": torch.zeros(3)}, "advantages"),
        ({"sample_mask": torch.zeros(7)}, "sample_mask"),
        ({"num_segments": torch.tensor(2)}, "num_segments"),
        ({"segments": torch.zeros(1, dtype=torch.int64)}, "segments"),
    ):
        with pytest.raises(ValueError, match=message):
            ClippedPGLossFn({})(curr, batch | change, 2, 5)


class CountHostCopies(TorchDispatchMode):
    """Counts the operators that wait for the device on a GPU: reading a scalar, and shapes that depend on
    data.
    """

    NAMES = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indexes_by_mask = name == "index" and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        self.count += name.startswith(self.NAMES) or indexes_by_mask
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_metrics_never_wait_for_the_device(name: str) -> None:
    curr, batch = packed(draw(seed=3, count=4), padding=3)
    loss_fn = ClippedPGLossFn(CONFIGS[name])
    seqs, toks = torch.tensor(4), torch.tensor(20)
    with CountHostCopies() as seen:
        loss_fn(curr, batch, seqs, toks)[0].backward()
    assert seen.count == 0
    with CountHostCopies() as seen:
        float(seqs)
    assert seen.count == 1
