"""Masked sums and means by token and by sequence, normalised by global counts.

Padded rows [B, S] and packed rows [1, T] take one path: both are N flat tokens with a segment each. Everything is
float64, so that the result does not depend on the split into micro-batches, ranks and bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

Count: TypeAlias = int | float | Tensor


@dataclass(frozen=True)
class MaskedTokens:
    """The tokens of one micro-batch, flat, with their weights. The last slot of per-sequence tensors is for padding."""

    shape: torch.Size
    segment: Tensor
    """int64 [N]: sequence of each token; `num_segments` for padding of a packed row."""
    num_segments: int
    token_weight: Tensor
    """float64 [N]: token_mask, and 0 for the first token of each sequence."""
    sample_weight: Tensor
    """float64 [num_segments + 1]: sample_mask, and 0 in the padding slot."""
    weight: Tensor
    """float64 [N]: weight of each token: its token_weight times its sequence's sample_weight."""
    valid: Tensor
    """bool [N]: tokens with a weight above 0."""
    global_seqs: float | Tensor
    global_toks: float | Tensor
    sample_tokens: Tensor | None = None
    """float64 [num_segments + 1]: trained tokens of the sample that each sequence is a part of. None: all are whole."""

    @classmethod
    def from_batch(
        cls, shape: torch.Size, batch: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count
    ) -> MaskedTokens:
        """Read token_mask, sample_mask and, for packed rows, segments and num_segments; and sample_tokens, if some
        sequences are parts of samples that are longer than a row.

        sample_mask and sample_tokens have one value per sequence, or one per token, of which the sequence's first is
        read.
        Masks are 0 or 1, or weights. Raises ValueError if an entry is missing or has the wrong shape.
        """
        mask = _entry(batch, "token_mask")
        if mask.shape != shape or len(shape) != 2:
            raise ValueError(
                f"token_mask has shape {tuple(mask.shape)}, the log-probs {tuple(shape)}; they must be the same, 2-d"
            )
        segment, num_segments = _segments(shape, batch, mask.device)
        first = _is_first(segment)
        token_weight = torch.where(first, 0.0, mask.detach().to(torch.float64).reshape(-1))
        sample_weight = _per_sequence(_entry(batch, "sample_mask"), "sample_mask", shape, segment, num_segments, first)
        weight = token_weight * sample_weight.index_select(0, segment)
        whole = batch.get("sample_tokens")
        if whole is not None:
            whole = _per_sequence(whole, "sample_tokens", shape, segment, num_segments, first)
        return cls(
            shape=shape,
            segment=segment,
            num_segments=num_segments,
            token_weight=token_weight,
            sample_weight=sample_weight,
            weight=weight,
            valid=weight > 0,
            global_seqs=_divisor(global_valid_seqs),
            global_toks=_divisor(global_valid_toks),
            sample_tokens=whole,
        )

    def column(self, values: Tensor, name: str) -> Tensor:
        """Return a per-token tensor as float64 [N], with 0 for tokens that are not valid, even if they are NaN."""
        if values.shape != self.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, the log-probs {tuple(self.shape)}")
        return torch.where(self.valid, values.to(torch.float64).reshape(-1), 0.0)

    def per_sequence(self, values: Tensor, name: str) -> Tensor:
        """Return values given per sequence or per token as float64 [num_segments + 1], one per sequence."""
        first = _is_first(self.segment)
        return _per_sequence(values, name, self.shape, self.segment, self.num_segments, first)

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Return the sum over each sequence's weighted tokens: [N] -> [num_segments + 1]."""
        return self._add_up(values * self.token_weight)

    @cached_property
    def tokens_by_sequence(self) -> Tensor:
        """Number of weighted tokens of each sequence, [num_segments + 1]."""
        return self._add_up(self.token_weight)

    def _add_up(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.num_segments + 1).index_add(0, self.segment, values)

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """Return the mean over each sequence's weighted tokens, 0 if it has none: [N] -> [num_segments + 1]."""
        count = self.tokens_by_sequence
        return self.sum_by_sequence(values) / torch.where(count > 0, count, 1.0)

    def expand(self, by_sequence: Tensor) -> Tensor:
        """Give each token the value of its sequence: [num_segments + 1] -> [N]."""
        return by_sequence.index_select(0, self.segment)

    def maximum_by_sequence(self, values: Tensor) -> Tensor:
        """Return the maximum over each sequence's valid tokens, -inf if it has none: [N] -> [num_segments + 1]."""
        least = values.new_full((self.num_segments + 1,), -torch.inf)
        return least.scatter_reduce(0, self.segment, torch.where(self.valid, values, -torch.inf), "amax")

    def sum(self, values: Tensor) -> Tensor:
        """Return the weighted sum over all tokens, a scalar."""
        return torch.dot(values, self.weight)

    def mean(self, values: Tensor, *, by_sequence: bool = False) -> Tensor:
        """Return this batch's part of the global mean, a scalar.

        by_sequence=False: sum over tokens / global_valid_toks.
        by_sequence=True: the mean of each sequence, summed / global_valid_seqs. A part of a sample adds its part of the
        sample's mean.
        """
        if by_sequence:
            return torch.dot(values, self._sequence_mean_weight) / self.global_seqs
        return self.sum(values) / self.global_toks

    @cached_property
    def _sequence_mean_weight(self) -> Tensor:
        """float64 [N]: weight of each token in the sum of the sequences' means."""
        count = self.tokens_by_sequence if self.sample_tokens is None else self.sample_tokens
        return self.weight / self.expand(torch.where(count > 0, count, 1.0))

    @cached_property
    def num_samples(self) -> Tensor:
        """Number of valid samples, a float64 scalar; of a part its share of the sample's tokens."""
        valid = (self.sample_weight > 0).to(torch.float64)
        if self.sample_tokens is None:
            return valid.sum()
        return torch.dot(valid, self.tokens_by_sequence / torch.where(self.sample_tokens > 0, self.sample_tokens, 1.0))

    def minimum(self, values: Tensor) -> Tensor:
        """Return the minimum over valid tokens, +inf if there is none."""
        return torch.where(self.valid, values, torch.inf).amin()

    def maximum(self, values: Tensor) -> Tensor:
        """Return the maximum over valid tokens, -inf if there is none."""
        return torch.where(self.valid, values, -torch.inf).amax()


def valid_counts(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the numbers of valid sequences and tokens of a batch, float64 scalars, exact up to 2**53.

    Summed over micro-batches and data-parallel ranks they are the loss's global_valid_seqs and global_valid_toks. The
    first token of a sequence is never valid.
    """
    tokens = MaskedTokens.from_batch(_entry(batch, "token_mask").shape, batch, 1, 1)
    return tokens.sample_weight.sum(), tokens.weight.sum()


def _entry(batch: Mapping[str, Any], name: str) -> Tensor:
    if name not in batch or batch[name] is None:
        raise ValueError(f"the batch has no {name!r}; it has: {', '.join(sorted(batch))}")
    return batch[name]


def _segments(shape: torch.Size, batch: Mapping[str, Any], device: torch.device) -> tuple[Tensor, int]:
    rows, length = shape
    if batch.get("segments") is None:
        return torch.arange(rows, device=device)[:, None].expand(rows, length).reshape(-1), rows
    segment = batch["segments"].reshape(-1)
    if segment.numel() != rows * length:
        raise ValueError(f"segments has {segment.numel()} entries for {rows * length} tokens")
    num_segments = batch.get("num_segments")
    if not isinstance(num_segments, int):
        # A tensor would cost a copy from the device in every micro-batch.
        raise ValueError(f"a batch with segments needs num_segments as an int, not {type(num_segments).__name__}")
    return segment.to(torch.int64), num_segments


def _is_first(segment: Tensor) -> Tensor:
    start = torch.ones(1, dtype=torch.bool, device=segment.device)
    return torch.cat([start, segment[1:] != segment[:-1]])


def _per_sequence(
    values: Tensor, name: str, shape: torch.Size, segment: Tensor, num_segments: int, first: Tensor
) -> Tensor:
    values = values.detach().to(torch.float64)
    if values.shape == shape:
        sums = values.new_zeros(num_segments + 1)
        values = sums.index_add(0, segment, torch.where(first, values.reshape(-1), 0.0))[:num_segments]
    elif values.shape != (num_segments,):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; it must have one value per sequence ({num_segments},) "
            f"or per token {tuple(shape)}"
        )
    return torch.cat([values, values.new_zeros(1)])


def _divisor(count: Count) -> float | Tensor:
    """Return the count as a divisor. A batch with nothing valid has sum 0 and is divided by 1."""
    if isinstance(count, Tensor):
        count = count.detach().to(torch.float64).reshape(())
        return torch.where(count > 0, count, 1.0)
    return float(count) if count > 0 else 1.0
