"""The layers of a quantised engine that stay in bfloat16."""

import re
from contextlib import nullcontext
from typing import Any

import pytest

from grpo_mcore.families import shape_of, unquantized_layers
from grpo_mcore.families.known import known_configs
from grpo_mcore.recipe.schema.generation import VllmConfig


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("Qwen3-8B", set()),
        ("Qwen3-30B-A3B", {"mlp.gate"}),
        ("Moonlight-16B-A3B", {"mlp.gate", "self_attn.kv_b_proj"}),
        ("Qwen3.5-35B-A3B", {"mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_ba", "linear_attn.conv1d"}),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"mixer.gate", "mixer.conv1d"}),
    ],
)
def test_what_chooses_experts_and_small_projections_stay(model: str, kept: set[str]) -> None:
    shape = shape_of(known_configs()[model])
    patterns = [pattern.removeprefix("re:") for pattern in unquantized_layers(shape)]
    layers = kept | {"mlp.gate_up_proj", "mlp.experts", "self_attn.qkv_proj", "mixer.in_proj", "linear_attn.out_proj"}
    matched = {name for name in layers for pattern in patterns if re.match(pattern, f"model.layers.7.{name}")}
    assert matched == kept


def kept(names: list[str], **keys: Any) -> list[str]:
    """Return which of the layers a recipe with these keys keeps in bfloat16."""
    shape = shape_of(known_configs()["Qwen3-0.6B"])
    patterns = [pattern.removeprefix("re:") for pattern in unquantized_layers(shape, VllmConfig(**keys))]
    return [name for name in names if any(re.match(pattern, name) for pattern in patterns)]


def test_layers_words_and_patterns_of_a_recipe() -> None:
    parts = ("self_attn.o_proj", "mlp.down_proj")
    names = [f"model.layers.{layer}.{part}" for layer in (0, 1, 26, 27) for part in parts]
    ends = {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 2}
    by_words = kept(names, quantization_ignored_layer_kws=["o_proj"], **ends)
    assert by_words == [name for name in names if "layers.1.mlp" not in name]
    patterns = ["model.layers.*.self_attn.*", "model.layers.28.*", "mtp.*"]  # the last two are an MTP layer
    assert kept(names, quantization_ignore_patterns=patterns) == names[::2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantization_ignored_layer_kws": ["o_porj"]}, "no tensor has 'o_porj' in its name; model"),
        ({"quantization_ignore_patterns": ["model.layers.*.self_atn.*"]}, "no layer has the name 'model.layers"),
        (
            {"num_first_layers_in_bf16": 27, "num_last_layers_in_bf16": 2},
            "27 first and 2 last layers: the model has 28",
        ),
    ],
)
def test_keys_that_name_nothing_are_errors(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kept([], **keys)


@pytest.mark.parametrize(
    ("model", "key", "value", "layer"),
    [
        ("Qwen3-30B-A3B", "quantization_ignored_layer_kws", "down_proj", "model.layers.0.mlp.experts"),
        ("Qwen3-30B-A3B", "quantization_ignored_layer_kws", "mlp.experts", None),
        ("Qwen3-30B-A3B", "quantization_ignored_layer_kws", "o_proj.weight", "model.layers.0.self_attn.o_proj"),
        ("Qwen3-30B-A3B", "quantization_ignored_layer_kws", "q_proj", None),  # vLLM says itself what it is fused with
        ("Qwen3-30B-A3B", "quantization_ignore_patterns", "model.layers.*.mlp.experts.*", "model.layers.0.mlp.experts"),
        ("Qwen3-30B-A3B", "quantization_ignore_patterns", "model.layers.*.mlp.*", None),
        ("Qwen3.5-35B-A3B", "quantization_ignore_patterns", "model.language_model.*", "language_model.model.embed"),
        ("Qwen3.5-35B-A3B", "quantization_ignore_patterns", "*.linear_attn.*", None),
        ("Moonlight-16B-A3B", "quantization_ignored_layer_kws", "a_proj", None),
    ],
)  # fmt: skip
def test_a_key_names_the_engines_layers_too(model: str, key: str, value: str, layer: str | None) -> None:
    """One that names only tensors of a checkpoint left the layer quantised without a word."""
    message = f"engines have it in {layer}.*, which {re.escape(repr(value))} does not name"
    with nullcontext() if layer is None else pytest.raises(ValueError, match=message):
        assert unquantized_layers(shape_of(known_configs()[model]), VllmConfig(**{key: [value]}))
