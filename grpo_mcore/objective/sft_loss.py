"""The supervised loss: negative log-likelihood of the counting tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.objective.reduce import Count, MaskedTokens


class NLLLossFn:
    """loss = sum of -log-prob over counting tokens / global_valid_toks."""

    def __call__(
        self,
        curr_logprobs: Tensor,
        batch: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Shapes, masks and counts as for `ClippedPGLossFn`; the batch needs token_mask and sample_mask.

        Returns scalars in float64: the micro-batch's part of the loss, and metrics that add up.
        """
        tokens = MaskedTokens.from_batch(curr_logprobs.shape, batch, global_valid_seqs, global_valid_toks)
        loss = tokens.mean(-tokens.column(curr_logprobs, "curr_logprobs"))
        metrics = {
            "loss": loss.detach(),
            "num_valid_samples": (tokens.sample_weight > 0).sum().to(torch.float64),
            "num_valid_tokens": tokens.valid.sum().to(torch.float64),
        }
        return loss, metrics
