"""GLM-4.5, 4.6 and 4.7: half of each head rotates, DeepSeek-V3's experts; the larger ones norm query and key heads.

Layers for multi-token prediction, which a checkpoint may have after the last layer, are not trained; exports copy them.
"""

from typing import Any

from grpo_mcore.families.dense import attention_params, decoder_params, dense_shape
from grpo_mcore.families.experts import expert_params, sigmoid_experts
from grpo_mcore.families.spec import ModelShape, Param


def shape(config: dict[str, Any]) -> ModelShape:
    """Read a ModelShape from `config.json`."""
    return dense_shape(
        {"partial_rotary_factor": 0.5} | config,
        family="glm4_moe",
        qkv_bias=config.get("attention_bias", False),
        qk_norm=config.get("use_qk_norm", False),
        partial_rotary=True,
        experts=sigmoid_experts(config),
    )


def params(shape: ModelShape) -> tuple[Param, ...]:
    """Declare every parameter of the model, in the order of the forward pass."""
    return decoder_params(shape, attention_params, expert_params(float32_router=True))
