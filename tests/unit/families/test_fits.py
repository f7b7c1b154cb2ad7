"""Layouts that a model does not allow are rejected with the key to change."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_mcore.families import ExpertShape, FamilyError, ModelShape, check_context_parallel, check_fit, shape_of
from grpo_mcore.recipe import MegatronConfig

DENSE = shape_of(
    {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100,
    }
)  # fmt: skip
EXPERTS = dataclasses.replace(DENSE, experts=ExpertShape(count=6, active=2, ffn_hidden_size=48))
SECOND_HALF = dataclasses.replace(
    DENSE, experts=ExpertShape(count=6, active=2, ffn_hidden_size=48, dense_layers=(0, 1, 2))
)
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        (DENSE, {PP: 3}),
        (DENSE, {PP: 3, VPP: 2}),
        (DENSE, {PP: 2, FIRST: 2}),
        (DENSE, {PP: 3, FIRST: 1, LAST: 1}),
        (EXPERTS, {EP: 3, ETP: 2}),
        (EXPERTS, {TP: 4, "sequence_parallel": True}),
        (EXPERTS, {"moe_token_dispatcher_type": "allgather"}),
        (SECOND_HALF, {PP: 2, FIRST: 4}),
    ],
)
def test_allowed_layouts(shape: ModelShape, keys: dict) -> None:
    check_fit(shape, MegatronConfig.model_validate(keys))


@pytest.mark.parametrize(
    ("shape", "keys", "message"),
    [
        (DENSE, {TP: 8}, "does not divide num_key_value_heads 4"),
        (DENSE, {PP: 4}, "6 of 6 layers do not divide over 4 stages"),
        (DENSE, {PP: 3, FIRST: 1}, "5 of 6 layers do not divide over the other 2 stages"),
        (DENSE, {PP: 2, FIRST: 6}, "0 of 6 layers do not divide over the other 1 stages"),
        (DENSE, {PP: 2, FIRST: 2, LAST: 2}, "2 of 6 layers do not divide over the other 0 stages"),
        (DENSE, {PP: 2, VPP: 2}, r"does not divide the layers of every stage \(3\)"),
        (DENSE, {VPP: 2}, "needs pipeline_model_parallel_size above 1"),
        (DENSE, {EP: 2}, "has no experts"),
        (DENSE, {ETP: 2}, "has no experts"),
        (EXPERTS, {EP: 4}, "4 does not divide the 6 experts"),
        (EXPERTS, {ETP: 32}, "does not divide the experts' intermediate size 48"),
        (SECOND_HALF, {PP: 2}, "the 3 layers of the first stage have no experts"),
        (EXPERTS, {TP: 2}, "sequence_parallel must be true"),
        (EXPERTS, {PP: 2, "moe_token_dispatcher_type": "allgather"}, "use alltoall"),
        (EXPERTS, {"moe_router_load_balancing_type": "aux_loss"}, "not supported; set it to none"),
        (EXPERTS, {"moe_router_bias_update_rate": 0.001}, "not supported; set it to 0.0"),
    ],
)
def test_rejected_layouts(shape: ModelShape, keys: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        check_fit(shape, MegatronConfig.model_validate(keys))


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
