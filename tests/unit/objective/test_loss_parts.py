"""The parts of a loss add up to it, and each holds the tokens of its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.objective import ClippedPGLossFn
from grpo_mcore.objective.loss_parts import BOUNDED, INSIDE, STOPPED, LossPart, regions, signs, token_gradient
from grpo_mcore.recipe import checked_loss

from .cases import BY_AGE, CONFIGS
from .samples import OLDEST, counts, draw, packed, padded


def gradient(loss: Any, curr: Tensor, batch: dict[str, Any], seqs: float, toks: float) -> Tensor:
    """Return the gradient by two parameters behind the log-probs, as training computes it."""
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    feature = torch.arange(curr.numel(), dtype=torch.float64).reshape(curr.shape).sin()
    logprobs = curr.detach() + weights[0] * feature + weights[1] * feature**2
    loss(logprobs, batch, global_valid_seqs=seqs, global_valid_toks=toks)[0].backward()
    assert weights.grad is not None
    return weights.grad


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", ["grpo", "dual clip", "gspo, icepop", "cispo", "dr. grpo, everything"])
def test_the_parts_of_each_kind_add_up_to_the_gradient_of_the_loss(name: str, layout: Any) -> None:
    samples = draw(3, 6)
    (curr, batch), (seqs, toks) = layout(samples), counts(samples)
    loss = ClippedPGLossFn(checked_loss(CONFIGS[name]), max_age=OLDEST - 1)
    whole = gradient(loss, curr, batch, seqs, toks)
    sets = {
        "signs": [{"value": value} for value in range(3)],
        "ages": [{"value": value, "and_above": value == OLDEST - 1} for value in range(OLDEST)],
        "regions": [{"value": value} for value in (INSIDE, BOUNDED, STOPPED)],
    }
    for by, values in sets.items():
        parts = [LossPart(loss, by, **value) for value in values]
        total = torch.stack([gradient(part, curr, batch, seqs, toks) for part in parts]).sum(0)
        torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-9)
        numbers = [part(curr, batch, seqs, toks)[1]["num_valid_tokens"] for part in parts]
        assert sum(numbers) == toks


def test_what_comes_through_each_token_is_the_formula_of_the_clipped_term() -> None:
    """Four tokens of one answer, after the prompt's: inside, clipped above, below, and beyond with the other sign."""
    ratio = torch.tensor([1.0, 1.1, 1.5, 0.5, 1.5], dtype=torch.float64)
    prev = torch.full((1, 5), -1.0, dtype=torch.float64)
    curr = prev + ratio.log()
    advantages = torch.tensor([[9.0, 2.0, 2.0, -1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]])
    batch = {"prev_logprobs": prev, "advantages": advantages, "token_mask": mask, "sample_mask": torch.ones(1)}
    loss = ClippedPGLossFn(checked_loss({"reference_policy_kl_penalty": 0.0}))
    found = token_gradient(loss, curr, batch, 1, 4)
    torch.testing.assert_close(found, torch.tensor([[0.0, -2.0 * 1.1, 0.0, 0.0, 1.5]], dtype=torch.float64) / 4)
    assert regions(loss, curr, batch, 1, 4).tolist() == [[STOPPED, INSIDE, STOPPED, STOPPED, BOUNDED]]
    assert signs(batch).tolist() == [[0, 0, 0, 1, 1]]
    to_engine = ClippedPGLossFn(checked_loss({"ratio_to_engine": True, "reference_policy_kl_penalty": 0.0}))
    recorded = {key: value for key, value in batch.items() if key != "prev_logprobs"} | {"generation_logprobs": prev}
    assert torch.equal(regions(to_engine, curr, recorded, 1, 4), regions(loss, curr, batch, 1, 4))
    cispo = ClippedPGLossFn(checked_loss({"use_cispo": True, "reference_policy_kl_penalty": 0.0}))
    part = LossPart(cispo, "regions", STOPPED, of=loss)
    assert part(curr, batch, 1, 4)[1]["num_valid_tokens"] == 2  # what GRPO stops, CISPO lets through, bounded
    assert regions(cispo, curr, batch, 1, 4).tolist() == [[STOPPED, INSIDE, BOUNDED, BOUNDED, BOUNDED]]


def test_a_weight_out_of_its_bounds_is_bounded_or_stopped() -> None:
    samples = draw(5, 6)
    (curr, batch), (seqs, toks) = packed(samples), counts(samples)
    bounds = {**BY_AGE, "reference_policy_kl_penalty": 0.0}
    icepop = ClippedPGLossFn(checked_loss(bounds), max_age=OLDEST)
    tis = ClippedPGLossFn(checked_loss({**bounds, "truncated_importance_sampling_type": "tis"}), max_age=OLDEST)
    stopped = regions(icepop, curr, batch, seqs, toks)[0]
    clamped = regions(tis, curr, batch, seqs, toks)[0]
    outside = (stopped == STOPPED) & (clamped == BOUNDED)
    assert outside.any() and not ((stopped == INSIDE) & (clamped != INSIDE)).any()


def test_a_loss_without_log_probs_has_no_gradient_through_them() -> None:
    curr = torch.zeros(1, 2)
    constant = lambda logprobs, batch, **counts: (torch.ones((), requires_grad=True) * 2, {})  # noqa: E731
    assert token_gradient(constant, curr, {}, 1, 1).eq(0).all()
