"""Random samples, and the layouts in which tests pass them to the loss: padded, packed, in micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGPROBS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
COLUMNS = (*LOGPROBS, "advantages", "token_mask", "entropies", "ages", "covariance_marks")
OLDEST = 3

Batch = tuple[Tensor, dict[str, Any]]
"""Log-probs of the current policy (a leaf tensor), and the rest of the batch."""
Layout = Callable[[list["Sample"]], Batch]


@dataclass
class Sample:
    """One sequence: per-token tensors [length] and values of the whole sequence."""

    curr: Tensor
    columns: dict[str, Tensor]
    sample_mask: float
    reward: float

    @property
    def trained(self) -> list[int]:
        mask = self.columns["token_mask"]
        return [t for t in range(1, len(mask)) if mask[t] > 0] if self.sample_mask else []


def draw(
    seed: int, count: int, longest: int = 12, spread: float = 0.5, dtype: torch.dtype = torch.float32
) -> list[Sample]:
    """Return random samples: some masked, some with few or no trained tokens, ratios on both sides of usual bounds.

    The age falls within a sample, as when weights change while it is generated. What no loss may read, such as the
    age of a token that is not trained, has a value that would show.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    def integers(high: int, length: int) -> Tensor:
        return torch.randint(high, (length,), generator=generator)

    samples = []
    for _ in range(count):
        length = 1 + int(integers(longest, 1))
        curr = -normal(length).abs() - 0.05
        mask = torch.rand(length, generator=generator) < 0.8
        ages = integers(OLDEST + 1, length).sort(descending=True).values
        columns = {name: curr + spread * normal(length) for name in LOGPROBS}
        columns["advantages"] = normal(1).expand(length).clone() + 0.1 * normal(length)
        columns["token_mask"] = mask.double()
        columns["entropies"] = normal(length).abs()
        columns["covariance_marks"] = (columns["entropies"] > 0.9).double()
        samples.append(
            Sample(
                curr=curr.to(dtype),
                columns={name: value.to(dtype) for name, value in columns.items()}
                | {"ages": torch.where(mask, ages, 9)},
                sample_mask=float(torch.rand(1, generator=generator) < 0.85),
                reward=float(normal(1)),
            )
        )
    return samples


def all_trained(samples: list[Sample]) -> list[Sample]:
    """Make every token but the first of every sample valid."""
    for s in samples:
        s.sample_mask = 1.0
        s.columns["ages"] = s.columns["ages"].clamp(max=OLDEST)
        s.columns["token_mask"].fill_(1)
    return samples


def counts(samples: list[Sample]) -> tuple[int, int]:
    """Return the numbers of valid (sequences, tokens)."""
    return sum(s.sample_mask > 0 for s in samples), sum(len(s.trained) for s in samples)


def padded(samples: list[Sample], extra: int = 0) -> Batch:
    """Return rows [B, S]. The padding is NaN (age 9), to detect that it is read."""
    width = max(len(s.curr) for s in samples) + extra

    def rows(name: str, values: list[Tensor]) -> Tensor:
        out = values[0].new_full((len(values), width), _fill(name))
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = value
        return out

    batch: dict[str, Any] = {name: rows(name, [s.columns[name] for s in samples]) for name in COLUMNS}
    return rows("curr", [s.curr for s in samples]).requires_grad_(), batch | _by_sample(samples)


def packed(samples: list[Sample], padding: int = 0) -> Batch:
    """Return one row [1, T] with segments. Padding is one more segment of NaN. Ages are [T], like segments."""

    def row(name: str, values: list[Tensor]) -> Tensor:
        return torch.cat([*values, values[0].new_full((padding,), _fill(name))])[None]

    batch: dict[str, Any] = {name: row(name, [s.columns[name] for s in samples]) for name in COLUMNS}
    batch["ages"] = batch["ages"][0]
    lengths = [len(s.curr) for s in samples] + [padding]
    batch["segments"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    batch["num_segments"] = len(samples)
    return row("curr", [s.curr for s in samples]).requires_grad_(), batch | _by_sample(samples)


def _fill(name: str) -> float:
    return {"token_mask": 0.0, "ages": 9}.get(name, math.nan)


def _by_sample(samples: list[Sample]) -> dict[str, Tensor]:
    return {
        "sample_mask": torch.tensor([s.sample_mask for s in samples]),
        "rewards": torch.tensor([s.reward for s in samples], dtype=torch.float64),
    }


def gradients(samples: list[Sample], curr: Tensor, batch: dict[str, Any]) -> list[Tensor]:
    """Return the gradient by each sample's log-probs, from either layout."""
    grad = curr.grad
    assert grad is not None
    lengths = [len(s.curr) for s in samples]
    if "segments" in batch:
        assert not grad[0, sum(lengths) :].any()
        return list(torch.split(grad[0, : sum(lengths)], lengths))
    assert not any(row[length:].any() for row, length in zip(grad, lengths, strict=True))
    return [row[:length] for row, length in zip(grad, lengths, strict=True)]


def micro_batches(
    samples: list[Sample], parts: Iterable[Sequence[int]], layout: Layout
) -> list[tuple[Sequence[int], Tensor, dict[str, Any]]]:
    """Yield each part in its own layout: (sample numbers, curr, batch)."""
    return [(part, *layout([samples[i] for i in part])) for part in parts]
