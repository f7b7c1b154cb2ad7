"""Batches with few, no or invalid values to train on."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_mcore.objective import (
    ClippedPGLossConfig,
    ClippedPGLossFn,
    combine_metrics,
    nonfinite_samples,
    step_metrics,
    valid_counts,
)

from .cases import CONFIGS
from .harness import MAX_AGE, assert_same, expected, run
from .samples import LOGPROBS, all_trained, draw, packed, padded

NONSENSE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_valid_is_a_finite_zero(name: str, layout) -> None:
    samples = draw(seed=2, count=3)
    for s in samples:
        s.sample_mask = 0.0
    curr, batch = layout(samples)
    for zero in (0, torch.tensor(0)):
        curr.grad = None
        loss, metrics = ClippedPGLossFn(CONFIGS[name], max_age=MAX_AGE)(curr, batch, zero, zero)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert curr.grad is not None and not curr.grad.any()
        reported = step_metrics([combine_metrics([metrics])])
        assert set(reported.values()) == {0.0}  # metrics without a mean or extreme are left out
        assert not [n for n in reported if n.endswith(("_min", "_max", "_p95")) or n.startswith("gen_kl_error/age")]


def test_a_rank_without_valid_tokens_changes_nothing() -> None:
    """A row of padding only, as a rank with too few samples runs it."""
    samples = draw(seed=4, count=4)
    for name in ("dual clip", "gspo, product, tis by age"):
        loss_fn = ClippedPGLossFn(CONFIGS[name], max_age=MAX_AGE)
        _, metrics = loss_fn(*packed(samples), 4, 20)
        nobody = torch.zeros(1, 8)
        idle = dict.fromkeys((*LOGPROBS, "advantages", "token_mask", "sample_mask", "rewards"), nobody)
        idle |= {"ages": nobody.long(), "segments": torch.zeros(8, dtype=torch.int64), "num_segments": 0}
        loss, nothing = loss_fn(nobody, idle, 4, 20)
        assert float(loss) == 0
        assert step_metrics([combine_metrics([metrics, nothing])]) == step_metrics([combine_metrics([metrics])])


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", ["grpo", "sequence level", "dr. grpo", "gspo", "gspo, product, tis by age"])
def test_a_fully_masked_row_has_no_gradient_and_no_part_in_sums(name: str, layout) -> None:
    samples = draw(seed=4, count=5)
    samples[2].columns["token_mask"].zero_()
    samples[3].sample_mask = 0.0
    cfg = ClippedPGLossConfig(**CONFIGS[name])
    result = run(cfg, samples, layout)
    assert_same(result, expected(cfg, samples))
    assert not result.gradients[2].any() and not result.gradients[3].any()


def test_the_first_token_is_never_trained() -> None:
    samples = all_trained(draw(seed=4, count=5))
    for layout in (padded, packed):
        result = run({}, samples, layout)
        assert not any(float(g[0]) for g in result.gradients)
        assert all(bool(g[1:].all()) for g in result.gradients)


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", ["grpo", "dr. grpo, everything", "gspo, product, tis by age"])
def test_sequences_of_one_token_train_nothing(name: str, layout) -> None:
    samples = all_trained(draw(seed=4, count=3, longest=1))
    assert [len(s.curr) for s in samples] == [1, 1, 1]
    assert tuple(map(float, valid_counts(layout(samples)[1]))) == (3, 0)
    assert run(CONFIGS[name], samples, layout).loss == 0
    among_others = samples[:2] + all_trained(draw(seed=5, count=3))
    cfg = ClippedPGLossConfig(**CONFIGS[name])
    assert_same(run(cfg, among_others, layout), expected(cfg, among_others))


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", CONFIGS)
def test_nan_at_an_invalid_token_is_harmless(name: str, layout) -> None:
    clean, dirty = draw(seed=21, count=8), draw(seed=21, count=8)
    for i, s in enumerate(dirty):
        untrained = [t for t in range(len(s.curr)) if t not in s.trained]
        s.curr[untrained] = NONSENSE[i % 3]
        for j, column in enumerate((*LOGPROBS, "advantages")):
            s.columns[column][untrained] = NONSENSE[(i + j) % 3]
    assert any(s.curr.isnan().any() for s in dirty) and any(s.curr.isinf().any() for s in dirty)
    assert_same(run(CONFIGS[name], dirty, layout), run(CONFIGS[name], clean, layout), rel=1e-15, gradient=0)
    for column in ("curr", *LOGPROBS):
        curr, batch = layout(dirty)
        assert not nonfinite_samples(curr if column == "curr" else batch[column], batch).any()


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("value", NONSENSE)
def test_nan_at_a_valid_token_is_visible_and_its_sample_named(value: float, layout) -> None:
    samples = all_trained(draw(seed=9, count=8))
    bad = [i for i, s in enumerate(samples) if len(s.curr) > 2][1:3]
    for i in bad:
        samples[i].curr[2] = value
    samples[bad[0] - 1].curr[0] = value  # the first token is never trained
    curr, batch = layout(samples)
    assert nonfinite_samples(curr, batch).nonzero().reshape(-1).tolist() == bad
    loss, _ = ClippedPGLossFn({"disable_ppo_ratio": True})(curr, batch, 8, 30)
    assert not math.isfinite(float(loss.detach()))
    batch["sample_mask"][bad[0]] = 0
    assert nonfinite_samples(curr, batch).nonzero().reshape(-1).tolist() == bad[1:]


def test_an_engine_logprob_that_is_not_finite_weighs_nothing() -> None:
    samples = all_trained(draw(seed=9, count=4, dtype=torch.float64))
    victim = next(s for s in samples if len(s.curr) > 2)
    for value in (-math.inf, math.nan):
        victim.columns["generation_logprobs"][1] = value
        result = run({**CONFIGS["weights"], "reference_policy_kl_penalty": 0.0}, samples, packed)
        assert math.isfinite(result.loss) and all(bool(g.isfinite().all()) for g in result.gradients)
        assert not any(float(g[1]) for s, g in zip(samples, result.gradients, strict=True) if s is victim)
        curr, batch = packed(samples)
        named = nonfinite_samples(batch["generation_logprobs"], batch).tolist()
        assert [s for s, bad in zip(samples, named, strict=True) if bad] == [victim]
