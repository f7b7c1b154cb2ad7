"""Metrics of micro-batches, ranks and optimizer steps are combined into those of a step."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from grpo_mcore.objective import METRIC_REDUCTIONS, ClippedPGLossFn, combine_metrics, step_metrics

from .cases import BY_AGE
from .harness import MAX_AGE
from .samples import counts, draw, packed, padded


def test_parts_are_combined_by_declared_reduction() -> None:
    first = {"loss": 1.0, "probs_ratio_min": math.inf, "probs_ratio_max": -math.inf}
    second = {"loss": 0.5, "probs_ratio_min": 0.9, "probs_ratio_max": 1.2}
    assert combine_metrics([first, second]) == {"loss": 1.5, "probs_ratio_min": 0.9, "probs_ratio_max": 1.2}
    assert combine_metrics([]) == combine_metrics([{}]) == {}
    with pytest.raises(ValueError, match="probs_ratio"):
        combine_metrics([first, {"loss": 1.0}])
    for unknown in ("surprise", "surprise/age_1"):
        with pytest.raises(ValueError, match="METRIC_REDUCTIONS"):
            combine_metrics([{unknown: 1.0}])
    nan = combine_metrics([second, {**second, "probs_ratio_min": math.nan}])
    assert math.isnan(nan["probs_ratio_min"])


def test_values_are_kept_until_the_step() -> None:
    name = "sequence_mult_prob_error_p95"
    parts = [{name: torch.tensor([1.0, -math.inf, 3.0])}, {name: torch.tensor([])}, {name: [2.0]}]
    assert combine_metrics(parts) == {name: [1.0, 3.0, 2.0]}
    assert combine_metrics([combine_metrics(parts), {name: []}]) == {name: [1.0, 3.0, 2.0]}
    assert step_metrics([{name: []}]) == {}
    assert math.isnan(step_metrics([{name: [1.0, math.nan]}])[name])


def test_a_step_of_several_optimizer_steps() -> None:
    """Means are averaged, counts summed, extremes are those of all steps, the p95 is over all sequences."""
    name = "sequence_mult_prob_error_p95"
    first = {
        "loss": 1.0,
        "num_valid_samples": 3,
        "probs_ratio_min": 0.8,
        "probs_ratio_max": -math.inf,
        name: [1.0, 5.0],
    }
    second = {"loss": 3.0, "num_valid_samples": 4, "probs_ratio_min": 0.5, "probs_ratio_max": -math.inf, name: [2.0]}
    found = step_metrics([first, second, {}])
    assert found.pop(name) == pytest.approx(numpy.quantile([1.0, 5.0, 2.0], 0.95), rel=1e-15)
    assert found == {"loss": 2.0, "num_valid_samples": 7, "probs_ratio_min": 0.5}
    assert step_metrics([]) == {}


def test_means_by_age_are_over_the_tokens_of_that_age() -> None:
    """Two optimizer steps of 10 tokens: 2 tokens of age 1 have error 1.5, 6 have error 2.5; none has age 2."""
    first = {"token_share/age_1": 0.2, "gen_kl_error/age_1": 2 * 1.5 / 10, "token_share/age_2": 0.0}
    second = {"token_share/age_1": 0.6, "gen_kl_error/age_1": 6 * 2.5 / 10, "token_share/age_2": 0.0}
    found = step_metrics([m | {"gen_kl_error/age_2": 0.0} for m in (first, second)])
    assert found == pytest.approx({"token_share/age_1": 0.4, "gen_kl_error/age_1": 2.25, "token_share/age_2": 0.0})


def test_combining_in_two_stages_is_combining_at_once() -> None:
    samples = draw(seed=1, count=8)
    seqs, toks = counts(samples)
    loss_fn = ClippedPGLossFn(BY_AGE, max_age=MAX_AGE)
    parts = [loss_fn(*padded([s]), seqs, toks)[1] for s in samples]
    ranks = [combine_metrics(parts[:3]), {}, combine_metrics(parts[3:])]
    at_once, in_stages = combine_metrics(parts), combine_metrics(ranks)
    assert list(at_once) == list(in_stages)
    for name, value in at_once.items():
        assert in_stages[name] == pytest.approx(value, rel=1e-12)


def test_optimizer_steps_of_equal_counts_are_their_mean() -> None:
    """The same samples twice, under the same weights, give the metrics of one step."""
    samples = draw(seed=1, count=8)
    once = combine_metrics([ClippedPGLossFn(BY_AGE, max_age=MAX_AGE)(*packed(samples), *counts(samples))[1]])
    single, double = step_metrics([once]), step_metrics([once, once])
    assert double.pop("num_valid_samples") == 2 * single.pop("num_valid_samples")
    # Twice the same values: their quantile moves between two neighbours.
    p95 = double.pop("sequence_mult_prob_error_p95")
    assert single.pop("sequence_mult_prob_error_p95") <= p95 <= single["sequence_mult_prob_error_max"]
    assert double == pytest.approx(single, rel=1e-15)
    assert all(isinstance(value, float) for value in double.values())


def test_extremes_have_matching_names_and_reductions() -> None:
    by_suffix = {"_min": "min", "_max": "max", "_p95": "values"}
    for name, reduction in METRIC_REDUCTIONS.items():
        assert reduction == next((r for suffix, r in by_suffix.items() if name.endswith(suffix)), "sum")
