"""Statistics per sample that a policy rank reports to the driver."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective.distillation import teacher_gap
from grpo_mcore.objective.kl import every_sample, suffix_sums, token_kl
from grpo_mcore.objective.reduce import MaskedTokens
from grpo_mcore.recipe import KLType


def sample_stats(batch: Mapping[str, Any], kl_kind: KLType | None = None) -> dict[str, Tensor]:
    """Return statistics of each sample over its trained tokens, float64 [num_segments] (or [B]) each, on the device.

    tokens: their number. mult_error, if generation_logprobs g and prev_logprobs p are present: mean of exp|g - p|.
    reference_sum, if reference_policy_logprobs are present: their sum. gap_sum and gap_square, if teacher_logprobs and
    prev_logprobs are present: the sum of `teacher_gap`, and that of its squared deviations from the sample's mean.
    With kl_kind, from prev_logprobs and reference_policy_logprobs: kl_sum, kl_to_go_sum and kl_to_go_square, the
    fields of `SampleKL`. A sample without a trained token has 0 everywhere. sample_mask is ignored. A value that is not
    finite affects only its sample. Shapes as for `kl_to_go`; raises ValueError if an entry is missing.
    """
    tokens = every_sample(batch)
    stats = {"tokens": tokens.tokens_by_sequence}
    generation, prev = batch.get("generation_logprobs"), batch.get("prev_logprobs")
    if generation is not None and prev is not None:
        gap = tokens.column(generation, "generation_logprobs") - tokens.column(prev, "prev_logprobs")
        stats["mult_error"] = tokens.mean_by_sequence(torch.exp(gap.abs()))
    if (reference := batch.get("reference_policy_logprobs")) is not None:
        stats["reference_sum"] = tokens.sum_by_sequence(tokens.column(reference, "reference_policy_logprobs"))
    if batch.get("teacher_logprobs") is not None and prev is not None:
        gap = teacher_gap(batch).reshape(-1)
        stats["gap_sum"] = tokens.sum_by_sequence(gap)
        deviation = gap - tokens.expand(tokens.mean_by_sequence(gap))
        stats["gap_square"] = tokens.sum_by_sequence(deviation.square())
    if kl_kind is not None:
        kl = token_kl(batch, tokens, kl_kind)
        to_go = suffix_sums(kl, tokens)
        deviation = to_go - tokens.expand(tokens.mean_by_sequence(to_go))
        stats["kl_sum"] = tokens.sum_by_sequence(kl)
        stats["kl_to_go_sum"] = tokens.sum_by_sequence(to_go)
        stats["kl_to_go_square"] = tokens.sum_by_sequence(deviation.square())
    return {name: values.detach()[: tokens.num_segments] for name, values in stats.items()}


def stats_by_sample(index: Tensor, stats: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Return `sample_stats` of N samples, float64 [N] each, from those of their parts: 0 for samples without a part.
    index: int64 [parts], the sample of each. A sample in one part keeps its numbers bit by bit; of one in several the
    statistics of the KL to go, which is that of the part, are not the sample's."""

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(samples).index_add(0, index, values)

    tokens = stats["tokens"]
    share = tokens / total(tokens)[index].clamp(min=1)
    found = {name: total(values) for name, values in stats.items()}
    if "mult_error" in stats:
        found["mult_error"] = total(share * stats["mult_error"])
    if "gap_sum" in stats:
        whole, count = found["gap_sum"] / found["tokens"].clamp(min=1), tokens.clamp(min=1)
        found["gap_square"] = total(stats["gap_square"] + tokens * (stats["gap_sum"] / count - whole[index]).square())
    return found


def nonfinite_samples(logprobs: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return bool [samples]: the samples with a NaN or infinite log-prob at a valid token.

    logprobs: [B, S], or [1, T] with segments and num_segments in the batch; token_mask and sample_mask as in the loss.
    The result stays on the device; reading it costs the caller one copy.
    """
    tokens = MaskedTokens.from_batch(logprobs.shape, batch, 1, 1)
    bad = tokens.valid & ~torch.isfinite(logprobs.detach().reshape(-1))
    by_sample = bad.new_zeros(tokens.num_segments + 1, dtype=torch.int64)
    return by_sample.index_add(0, tokens.segment, bad.to(torch.int64))[: tokens.num_segments] > 0
