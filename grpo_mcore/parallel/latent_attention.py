"""Multi-head latent attention of the local layer spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class WholeLinear(torch.nn.Module):
    """A linear map whose weight every tensor-parallel rank holds whole, as TransformerEngine's "duplicated" one."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # read by finalize_model_grads

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """MLASelfAttention whose down projections are whole on every rank.

    Without TransformerEngine, Megatron-Core 0.16 splits them over the tensor-parallel ranks. The part of the keys that
    carries positions is shared by all heads, and its gradient is then that of a rank's own heads alone.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width)
