"""Which weights get an adapter, how its parts are split, and which choices are rejected."""

from __future__ import annotations

import pytest

from grpo_mcore.families import AdapterShape, FamilyError, Split, adapters_of, local_shape, params_of, shape_of
from grpo_mcore.families.adapters import check_adapters, layer_name
from grpo_mcore.families.known import known_configs

NANO = shape_of(known_configs()["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
DENSE = shape_of(known_configs()["Qwen3-8B"])


def adapted(shape, **patterns: tuple[str, ...]) -> list[str]:
    return [layer_name(weight) for weight in adapters_of(params_of(shape), AdapterShape(16, 32.0, **patterns))]


def test_without_names_every_linear_layer_has_an_adapter() -> None:
    kinds = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert adapted(DENSE) == [f"decoder.layers.{layer}.{kind}" for layer in range(36) for kind in kinds]
    found = {name.split(".", 3)[3].replace("experts.127", "experts.0") for name in adapted(NANO)}
    assert {"self_attention.in_proj", "self_attention.out_proj", "mlp.experts.local_experts.0.linear_fc1"} <= found
    assert not [name for name in found if "router" in name or "conv1d" in name or "norm" in name]


def test_names_and_patterns_choose_layers() -> None:
    assert len(adapted(NANO, excluded=("*.local_experts.*",))) == 23 * 2 + 6 * 2 + 23 * 2
    assert len(adapted(NANO, targets=("in_proj", "linear_qkv"))) == 23 + 6
    assert len(adapted(NANO, targets=("linear_fc1",), excluded=("*.shared_experts.*",))) == 23 * 128
    assert adapted(DENSE, targets=("*.layers.3.*.linear_proj",)) == ["decoder.layers.3.self_attention.linear_proj"]


def test_the_part_on_the_split_side_of_the_weight_is_split() -> None:
    found = {layer_name(w): each for w, each in adapters_of(params_of(DENSE), AdapterShape(16, 32.0)).items()}
    qkv = found["decoder.layers.0.self_attention.linear_qkv"]
    assert (qkv.down.split, qkv.up.split) == (Split.REPLICATED, Split.QKV)
    assert local_shape(qkv.down, DENSE, 4) == (16, 4096) and local_shape(qkv.up, DENSE, 4) == (6144 // 4, 16)
    out = found["decoder.layers.0.mlp.linear_fc2"]
    assert (out.down.split, out.up.split) == (Split.COLUMNS, Split.REPLICATED)
    assert local_shape(out.down, DENSE, 4) == (16, 12288 // 4) and local_shape(out.up, DENSE, 4) == (4096, 16)


@pytest.mark.parametrize(
    ("patterns", "split", "message"),
    [
        ({"targets": ("q_proj",)}, 1, "target_modules: 'q_proj' is no linear layer of this nemotron_h model, which "
         "has in_proj, linear_fc1, linear_fc2, linear_proj, linear_qkv, out_proj"),
        ({"excluded": ("linear",)}, 1, "exclude_modules: 'linear' is no linear layer"),
        ({"targets": ("in_proj",), "excluded": ("in_proj",)}, 1, "leaves no layer with an adapter"),
        ({}, 2, "experts with adapters need an expert_tensor_parallel_size of 1 or of tensor_model_parallel_size 4"),
    ],
)  # fmt: skip
def test_impossible_choices_are_rejected(patterns: dict[str, tuple[str, ...]], split: int, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        check_adapters(params_of(NANO), NANO, AdapterShape(16, 32.0, **patterns), 4, split)
    check_adapters(params_of(NANO), NANO, AdapterShape(16, 32.0, excluded=("*.local_experts.*",)), 4, 2)
    check_adapters(params_of(NANO), NANO, AdapterShape(16, 32.0), 2, 2)


def test_adapters_of_experts_are_not_sent_to_engines() -> None:
    with pytest.raises(FamilyError, match="peft.refit: engines take no adapters of experts; use merged, or"):
        check_adapters(params_of(NANO), NANO, AdapterShape(16, 32.0), 2, 2, refitted=True)
    without = AdapterShape(16, 32.0, excluded=("*.local_experts.*",))
    check_adapters(params_of(NANO), NANO, without, 2, 2, refitted=True)
    check_adapters(params_of(DENSE), DENSE, AdapterShape(16, 32.0), 2, 2, refitted=True)
