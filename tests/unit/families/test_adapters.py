"""Which weights get an adapter, how its parts are split, and which choices are rejected."""

import pytest

from grpo_mcore.families import AdapterShape, FamilyError, Split, adapters_of, local_shape, params_of, shape_of
from grpo_mcore.families.adapters import check_adapters, is_trained, layer_name
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


def test_what_is_trained_is_what_is_adapted_and_without_adapters_what_is_not_frozen() -> None:
    qkv = next(param for param in params_of(DENSE) if param.megatron.endswith("self_attention.linear_qkv.weight"))
    frozen = (".self_attention.",)
    assert not is_trained(qkv, None, frozen=frozen) and is_trained(qkv, AdapterShape(16, 32.0), frozen=frozen)


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


@pytest.mark.parametrize("excluded", [(), ("*.local_experts.*",), ("*.layers.1.mlp.experts.*",)])
def test_engines_take_adapters_of_all_experts_of_a_layer(excluded: tuple[str, ...]) -> None:
    check_adapters(params_of(NANO), NANO, AdapterShape(16, 32.0, excluded=excluded), 2, 2, refitted=True)


@pytest.mark.parametrize("excluded", ["linear_fc2", "*.local_experts.3.*", "*.layers.3.*.local_experts.0.linear_fc1"])
def test_engines_refuse_adapters_of_some_experts_of_a_layer(excluded: str) -> None:
    adapters = AdapterShape(16, 32.0, excluded=(excluded,))
    check_adapters(params_of(NANO), NANO, adapters, 2, 2)
    with pytest.raises(
        FamilyError, match=r"peft.refit: vLLM takes adapters .* or none; decoder.layers.[13].* has none; use"
    ):
        check_adapters(params_of(NANO), NANO, adapters, 2, 2, refitted=True)


def test_engines_refuse_adapters_of_what_vllm_absorbs() -> None:
    shape = shape_of(known_configs()["Moonlight-16B-A3B"])
    with pytest.raises(FamilyError, match="peft.refit: vLLM ignores adapters of linear_kv_up_proj"):
        check_adapters(params_of(shape), shape, AdapterShape(16, 32.0), 1, 1, refitted=True)
    without = AdapterShape(16, 32.0, excluded=("linear_kv_up_proj",))
    check_adapters(params_of(shape), shape, without, 1, 1, refitted=True)


def test_adapters_of_the_experts_of_gpt_oss_go_merged() -> None:
    shape = shape_of(known_configs()["gpt-oss-20b"])
    with pytest.raises(FamilyError, match="peft.refit: adapters of gpt_oss's experts go to engines merged only"):
        check_adapters(params_of(shape), shape, AdapterShape(16, 32.0), 2, 2, refitted=True)
