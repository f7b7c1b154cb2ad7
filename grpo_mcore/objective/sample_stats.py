"""What a policy rank tells the driver of each sample: a few float64 numbers, none of them by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective.config import KLType
from grpo_mcore.objective.kl_in_reward import every_sample, suffix_sums, token_kl


def sample_stats(batch: Mapping[str, Any], kl_kind: KLType | None = None) -> dict[str, Tensor]:
    """Statistics of the batch's samples over their trained tokens, float64 [num_segments] each (or [B]), on the device.

    tokens: how many. mult_error, where generation_logprobs g and prev_logprobs p are there: mean of exp|g - p|.
    With kl_kind, from prev_logprobs and reference_policy_logprobs: kl_sum, kl_to_go_sum and kl_to_go_square, the
    fields of `SampleKL`. A sample without a trained token has 0 everywhere. sample_mask is not asked. What is not
    finite stays with its sample. Shapes as for `kl_to_go`; raises ValueError where an entry is missing.
    """
    tokens = every_sample(batch)
    stats = {"tokens": tokens.tokens_by_sequence}
    generation, prev = batch.get("generation_logprobs"), batch.get("prev_logprobs")
    if generation is not None and prev is not None:
        gap = tokens.column(generation, "generation_logprobs") - tokens.column(prev, "prev_logprobs")
        stats["mult_error"] = tokens.mean_by_sequence(torch.exp(gap.abs()))
    if kl_kind is not None:
        kl = token_kl(batch, tokens, kl_kind)
        to_go = suffix_sums(kl, tokens)
        deviation = to_go - tokens.expand(tokens.mean_by_sequence(to_go))
        stats["kl_sum"] = tokens.sum_by_sequence(kl)
        stats["kl_to_go_sum"] = tokens.sum_by_sequence(to_go)
        stats["kl_to_go_square"] = tokens.sum_by_sequence(deviation.square())
    return {name: values.detach()[: tokens.num_segments] for name, values in stats.items()}
