"""Settings that a model does not allow are refused with the key to change."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest

from grpo_mcore.families import (
    ExpertShape,
    FamilyError,
    ModelShape,
    check_context_parallel,
    check_fused_attention,
    check_settings,
    shape_of,
)
from grpo_mcore.recipe import MegatronConfig

DENSE = shape_of(
    {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100,
    }
)  # fmt: skip
EXPERTS = dataclasses.replace(DENSE, experts=ExpertShape(count=6, active=2, ffn_hidden_size=48))


def test_allowed_settings() -> None:
    check_settings(DENSE, MegatronConfig())
    check_settings(EXPERTS, MegatronConfig(moe_token_dispatcher_type="allgather", pipeline_model_parallel_size=2))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"moe_router_load_balancing_type": "aux_loss"}, "not supported; set it to none"),
        ({"moe_router_bias_update_rate": 0.001}, "not supported; set it to 0.0"),
    ],
)
def test_refused_settings(keys: dict[str, Any], message: str) -> None:
    shape = dataclasses.replace(EXPERTS, experts=ExpertShape(count=6, active=2, ffn_hidden_size=48))
    with pytest.raises(FamilyError, match=message):
        check_settings(shape, MegatronConfig.model_validate(keys))


WINDOWS = dataclasses.replace(DENSE, windows=(0, 8, 0, 8, 0, 8))
SINKS = dataclasses.replace(WINDOWS, sinks=True)


@pytest.mark.parametrize(
    ("shape", "ranks", "fused", "message"),
    [
        (WINDOWS, 2, True, "context_parallel_size 2: .* kernel for windows of keys .*shared_prefix.enabled"),
        (SINKS, 4, True, "context_parallel_size 4: .* kernel for attention sinks .*; set it to 1$"),
        (SINKS, 1, True, None),
        (WINDOWS, 2, False, None),
        (DENSE, 2, True, None),
    ],
)
def test_context_parallel_ranks_need_an_attention_kernel(
    shape: ModelShape, ranks: int, fused: bool, message: str | None
) -> None:
    if message is None:
        check_context_parallel(shape, ranks, fused_attention=fused)
    else:
        with pytest.raises(FamilyError, match=message):
            check_context_parallel(shape, ranks, fused_attention=fused)


@pytest.mark.parametrize(
    ("shape", "tensor", "tokens", "cudnn", "deterministic", "message"),
    [
        (SINKS, 1, 64, None, True, "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: .* deterministic attention for .* sinks;"),
        (DENSE, 1, 16384, 92000, True, "8 heads a rank with sequences of 16384 tokens; .*attention_backend: unfused"),
        (DENSE, 1, 16384, 92000, False, None),
        (DENSE, 4, 16384, 92000, True, None),
        (DENSE, 1, 8192, 92000, True, None),
        (SINKS, 1, 64, 92000, False, "sinks: .* cuDNN 9.26 or later, and here is 9.20; run scripts/setup_gpu.sh cudnn"),
        (SINKS, 1, 64, 92600, False, None),
        (SINKS, 1, 64, None, False, None),
    ],
)
def test_fused_attention_needs_a_kernel(
    shape: ModelShape, tensor: int, tokens: int, cudnn: int | None, deterministic: bool, message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(FamilyError, match=message):
        check_fused_attention(shape, tensor, tokens, cudnn=cudnn, deterministic=deterministic)
