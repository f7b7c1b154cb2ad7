"""The teacher's advantage and its metrics, against sums over single tokens."""

from __future__ import annotations

import pytest
import torch

from grpo_mcore.objective import distillation_metrics, sample_stats, teacher_gap

LENGTHS = (5, 3, 7)


def batch(seed: int = 0, **changed: torch.Tensor) -> dict[str, object]:
    draw = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    names = ("teacher_logprobs", "prev_logprobs")
    columns = {name: -torch.rand(1, total, generator=draw, dtype=torch.float64) for name in names}
    mask = (torch.rand(1, total, generator=draw) > 0.3).double()
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    return columns | {"token_mask": mask, "segments": segments, "num_segments": 3} | changed


def trained(sample: dict[str, object]) -> list[list[int]]:
    """Return the trained positions of each sample; its first token is none."""
    mask, start, positions = sample["token_mask"][0], 0, []  # type: ignore[index]
    for length in LENGTHS:
        positions.append([t for t in range(start + 1, start + length) if mask[t]])
        start += length
    return positions


def test_the_gap_is_that_of_trained_tokens() -> None:
    sample = batch()
    gap = teacher_gap(sample)[0]
    expected = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    for t in sum(trained(sample), []):
        expected[t] = sample["teacher_logprobs"][0, t] - sample["prev_logprobs"][0, t]  # type: ignore[index]
    assert gap.equal(expected) and gap.dtype == torch.float64
    equal = batch(teacher_logprobs=sample["prev_logprobs"])  # type: ignore[arg-type]
    assert not teacher_gap(equal).any()
    with pytest.raises(ValueError, match="needs 'teacher_logprobs'; the batch has: num_segments"):
        teacher_gap({name: value for name, value in sample.items() if name != "teacher_logprobs"})


@pytest.mark.parametrize("left_out", [None, 1])
def test_metrics_of_a_step_are_those_of_its_tokens(left_out: int | None) -> None:
    sample, advantages, weight = batch(3), torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64), 0.7
    stats = sample_stats(sample)
    counted = [i for i in range(3) if i != left_out]
    tokens = stats["tokens"] * torch.tensor([float(i != left_out) for i in range(3)], dtype=torch.float64)
    metrics = distillation_metrics(stats["gap_sum"], stats["gap_square"], tokens, advantages, weight)
    gap, positions = teacher_gap(sample)[0], trained(sample)
    gaps = torch.tensor([gap[t] for i in counted for t in positions[i]])
    totals = torch.tensor([advantages[i] + weight * gap[t] for i in counted for t in positions[i]])
    assert metrics["teacher_student_logprob_gap_mean"] == pytest.approx(gaps.mean().item(), abs=1e-12)
    assert metrics["adv_mean"] == pytest.approx(totals.mean().item(), abs=1e-12)
    assert metrics["adv_std"] == pytest.approx(totals.std(correction=0).item(), abs=1e-12)


def test_metrics_of_nothing_are_0() -> None:
    none = torch.zeros(2, dtype=torch.float64)
    assert set(distillation_metrics(none, none, none, none, 1.0).values()) == {0.0}
