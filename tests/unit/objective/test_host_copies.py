"""The loss makes no copy from the device to the host, and the metrics of all micro-batches need a single one."""

from __future__ import annotations

import pytest
import torch

from grpo_mcore.objective import (
    ClippedPGLossFn,
    NLLLossFn,
    combine_metrics,
    nonfinite_samples,
    step_metrics,
    valid_counts,
)

from .cases import CONFIGS
from .device import DEVICE, CountHostCopies, on_device
from .harness import MAX_AGE
from .samples import draw, packed, padded


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(pytest.param(name, packed, marks=pytest.mark.slow) for name in CONFIGS),
        ("grpo", padded),
        ("gspo, icepop by age", padded),
    ],
)
def test_loss_gradient_and_metrics_make_one_copy(name: str, layout) -> None:
    samples = draw(seed=3, count=5)
    curr, batch = layout(samples)
    loss_fn = ClippedPGLossFn(CONFIGS[name], max_age=MAX_AGE)
    wanted, wanted_metrics = loss_fn(curr, batch, 4, 20)
    wanted.backward()
    for seqs, toks in ((4, 20), (on_device(torch.tensor(4)), on_device(torch.tensor(20)))):
        there, batch_there = on_device(curr).requires_grad_(), on_device(batch)
        with CountHostCopies() as seen:
            loss, metrics = loss_fn(there, batch_there, seqs, toks)
            loss.backward()
            assert seen.copies == []
            reported = step_metrics([combine_metrics([metrics])])
        assert seen.copies == ["_to_copy"]
        assert loss.device == there.grad.device == DEVICE
        assert float(loss.held) == float(wanted.detach())
        torch.testing.assert_close(there.grad.held, curr.grad, rtol=0, atol=0)
        assert reported == step_metrics([combine_metrics([wanted_metrics])])


@pytest.mark.slow
def test_many_micro_batches_make_one_copy_in_all() -> None:
    loss_fn = ClippedPGLossFn(CONFIGS["icepop by age"], max_age=MAX_AGE)
    with CountHostCopies() as seen:
        parts = [loss_fn(*on_device(packed(draw(seed=i, count=3))), 20, 90)[1] for i in range(8)]
        combine_metrics(parts)
    assert seen.copies == ["_to_copy"]


def test_the_other_functions_of_a_micro_batch_make_none() -> None:
    curr, batch = on_device(packed(draw(seed=3, count=5), padding=3))
    with CountHostCopies() as seen:
        NLLLossFn()(curr, batch, 4, 20)
        valid_counts(batch)
        nonfinite_samples(curr, batch)
    assert seen.copies == []


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: float(t[0]),
        lambda t: int(t[0]),
        lambda t: bool(t.any()),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: torch.zeros(3).copy_(t),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: torch.masked_select(t, t > 0),
        lambda t: torch.where(t > 0),
        lambda t: t.unique(),
        lambda t: torch.zeros(3).to(t.device),
    ],
)
def test_copies_are_counted(read) -> None:
    """Every way to make a GPU wait is counted, except `tolist`, which torch itself rejects on this device."""
    there = on_device(torch.tensor([1.0, -2.0, 3.0]))
    with CountHostCopies() as seen:
        read(there)
    assert len(seen.copies) == 1


def test_work_on_the_device_is_not_counted() -> None:
    there = on_device(torch.tensor([1.0, -2.0, 3.0]))
    with CountHostCopies() as seen:
        out = (there.double() * 2).sum() + there.new_zeros(3).amax() + torch.arange(3, device=DEVICE).amin()
    assert seen.copies == [] and out.device == DEVICE and float(out.held) == 4
    for stranger in (torch.zeros(3), torch.tensor([1.0, 2.0, 3.0], device=DEVICE)):
        with CountHostCopies(), pytest.raises(AssertionError, match="host"):
            there + stranger


def test_a_loss_that_reads_a_value_is_caught(monkeypatch) -> None:
    """The test above can fail: here a mean reads its value."""
    from grpo_mcore.objective.reduce import MaskedTokens

    plain = MaskedTokens.sum

    def reading(self: MaskedTokens, values: torch.Tensor) -> torch.Tensor:
        plain(self, values).detach().item()
        return plain(self, values)

    monkeypatch.setattr(MaskedTokens, "sum", reading)
    with CountHostCopies() as seen:
        ClippedPGLossFn({})(*on_device(packed(draw(seed=3, count=5))), 4, 20)
    assert seen.copies
