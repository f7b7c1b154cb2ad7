"""Runs the loss as the training loop does, over micro-batches, ranks and layouts, and compares the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.objective import ClippedPGLossConfig, ClippedPGLossFn, combine_metrics, step_metrics

from .reference import reference_loss
from .reference_metrics import reference_metrics
from .samples import OLDEST, Layout, Sample, counts, gradients, micro_batches, padded

MAX_AGE = OLDEST - 1  # so that some tokens are older than the last age reported


@dataclass
class Result:
    loss: float
    gradients: list[Tensor]
    """One tensor [length] for each sample."""
    metrics: dict[str, float]


def run(
    cfg: Any,
    samples: list[Sample],
    layout: Layout = padded,
    ranks: Sequence[Sequence[Sequence[int]]] | None = None,
    max_age: int | None = MAX_AGE,
) -> Result:
    """Run one optimizer step. `ranks`: for each rank its micro-batches, as lists of sample numbers."""
    seqs, toks = counts(samples)
    loss_fn = ClippedPGLossFn(cfg, max_age=max_age)
    result = Result(0.0, [torch.empty(0)] * len(samples), {})
    by_rank = []
    for parts in [[range(len(samples))]] if ranks is None else ranks:
        reports = []
        for numbers, curr, batch in micro_batches(samples, parts, layout):
            loss, metrics = loss_fn(curr, batch, global_valid_seqs=seqs, global_valid_toks=toks)
            loss.backward()
            result.loss += float(loss.detach())
            reports.append(metrics)
            for number, grad in zip(numbers, gradients([samples[i] for i in numbers], curr, batch), strict=True):
                result.gradients[number] = grad
        by_rank.append(combine_metrics(reports))
    result.metrics = step_metrics([combine_metrics(by_rank)])
    return result


def expected(cfg: ClippedPGLossConfig, samples: list[Sample], max_age: int | None = MAX_AGE) -> Result:
    """Return the result according to the formulas."""
    losses, grads = reference_loss(cfg, samples)
    return Result(losses["loss"], grads, losses | reference_metrics(cfg, samples, max_age))


def close(actual: float, wanted: float, rel: float = 1e-6) -> bool:
    return actual == pytest.approx(wanted, rel=rel, abs=1e-12)


def assert_same(actual: Result, wanted: Result, *, gradient: float = 1e-5, rel: float = 1e-6) -> None:
    """Assert that loss and metrics agree within `rel`, and gradients within `gradient` of their largest element."""
    assert close(actual.loss, wanted.loss, rel), (actual.loss, wanted.loss)
    assert set(actual.metrics) == set(wanted.metrics)
    for name, value in wanted.metrics.items():
        assert close(actual.metrics[name], value, rel), (name, actual.metrics[name], value)
    scale = max((float(g.abs().max()) for g in wanted.gradients), default=0.0)
    for a, w in zip(actual.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(a.double(), w.double(), rtol=gradient, atol=gradient * scale)
