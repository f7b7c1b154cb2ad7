"""Checks on tensors that say which samples are bad; the caller decides when to look, and raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective.reduce import MaskedTokens


def nonfinite_samples(logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """bool [samples]: the samples with a NaN or infinite log-prob at a token that counts.

    logprobs: [B, S], or [1, T] with segments and num_segments in the batch; token_mask and sample_mask as in
    the loss. Stays on the device: one `.tolist()` of the caller costs one copy.
    """
    tokens = MaskedTokens.from_batch(logprobs.shape, batch, 1, 1)
    bad = tokens.valid & ~torch.isfinite(logprobs.detach().reshape(-1))
    by_sample = bad.new_zeros(tokens.num_segments + 1, dtype=torch.int64)
    return by_sample.index_add(0, tokens.segment, bad.to(torch.int64))[: tokens.num_segments] > 0
