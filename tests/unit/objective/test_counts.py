"""Global counts are exact where float32 is not, and the loss divides by exactly these."""

from __future__ import annotations

import pytest
import torch

from grpo_mcore.objective import ClippedPGLossFn, valid_counts

from .cases import DR_GRPO
from .samples import all_trained, counts, draw, packed, padded

PAST = 2**24 + 1  # the first integer that float32 cannot represent


def test_counts_are_those_of_the_samples() -> None:
    for samples in (draw(seed=4, count=9), all_trained(draw(seed=4, count=9))):
        for layout in (padded, packed):
            assert tuple(map(float, valid_counts(layout(samples)[1]))) == counts(samples)


def test_counts_above_two_to_the_24_are_summed_exactly() -> None:
    """Sum as ranks and micro-batches do: 2**24 tokens, then three more one by one."""
    one = {"token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1)}
    narrow, total = torch.tensor(float(2**24)), torch.tensor(float(2**24), dtype=torch.float64)
    for _ in range(3):
        seqs, toks = valid_counts(one)
        assert (float(seqs), float(toks), toks.dtype) == (1, 1, torch.float64)
        narrow, total = narrow + toks.float(), total + toks
    assert int(total) == 2**24 + 3
    assert int(narrow) == 2**24  # a float32 count would be wrong


def test_a_count_within_a_batch_is_exact_too() -> None:
    """A token weight w counts as w tokens."""
    weights = torch.tensor([[0.0, 2.0**24, 1.0]])
    assert float(weights.sum()) == 2**24
    assert float(valid_counts({"token_mask": weights, "sample_mask": torch.ones(1)})[1]) == PAST


@pytest.mark.parametrize("cfg", [{}, {"token_level_loss": False}, DR_GRPO])
def test_the_loss_divides_by_counts_above_two_to_the_24(cfg) -> None:
    """Counts may be ints, as the driver sends them, or int64 tensors."""
    samples = all_trained(draw(seed=3, count=4, dtype=torch.float64))

    def loss_for(seqs, toks) -> float:
        return float(ClippedPGLossFn(cfg)(*packed(samples), seqs, toks)[0].detach())

    alone = loss_for(1, 1)
    for count in (PAST, torch.tensor(PAST)):
        assert loss_for(count, count) * PAST == pytest.approx(alone, rel=1e-14)
    rounded = loss_for(*[torch.tensor(PAST, dtype=torch.float32)] * 2)
    assert rounded * PAST != pytest.approx(alone, rel=1e-8)


def test_ranks_with_more_than_two_to_the_24_tokens_between_them_report_means() -> None:
    """The mean of 1 over all tokens is 1."""
    samples = all_trained(draw(seed=3, count=4, dtype=torch.float64))
    for s in samples:
        s.columns["prev_logprobs"] = s.curr.clone()
    tokens = counts(samples)[1]
    repeats, rest = divmod(PAST, tokens)
    _, metrics = ClippedPGLossFn({})(*packed(samples), 4, PAST)
    assert float(metrics["probs_ratio"]) * repeats + rest / PAST == pytest.approx(1.0, abs=1e-15)
