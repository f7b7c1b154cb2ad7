"""policy.hf_config_overrides: values that replace those of a model's config.json."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.families import FamilyError, ModelShape, engine_overrides, read_hf_config, shape_of, with_overrides
from grpo_mcore.families.known import known_configs
from grpo_mcore.families.registry import DEFAULTS
from grpo_mcore.parallel.weights.hf_folder import HfFolderWriter
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.plan.run_plan import plan_shape

QWEN = known_configs()["Qwen2.5-0.5B"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"task_specific_params": {"a": 1, "b": 2}}))
    return tmp_path


def test_values_are_replaced_and_mappings_merged(folder: Path) -> None:
    config = read_hf_config(folder, {"num_hidden_layers": 3, "rope_theta": 5e5, "task_specific_params": {"b": 7}})
    assert (config["num_hidden_layers"], config["rope_theta"]) == (3, 5e5)
    assert config["task_specific_params"] == {"a": 1, "b": 7} and config["hidden_size"] == QWEN["hidden_size"]
    assert shape_of(config).num_layers == 3


def test_a_key_that_the_model_does_not_have_is_one_message(folder: Path) -> None:
    with pytest.raises(FamilyError, match=r"hf_config_overrides\.hiden_size: .* no such key; nearest: hidden_size"):
        read_hf_config(folder, {"hiden_size": 3})


@pytest.mark.parametrize("name", ["folder", "Qwen2.5-0.5B"])
def test_plan_sees_them(folder: Path, name: str) -> None:
    policy: dict[str, Any] = {"model_name": str(folder) if name == "folder" else name}
    policy["hf_config_overrides"] = {"num_hidden_layers": 3}
    config = MasterConfig.model_validate({"policy": policy, "data": {"train": {"data_path": "x"}}})
    assert plan_shape(config).num_layers == 3


def test_an_exported_model_has_them(folder: Path, tmp_path: Path) -> None:
    import torch

    shape = shape_of(read_hf_config(folder, {"num_hidden_layers": 1, "vocab_size": 64}))
    writer = HfFolderWriter(tmp_path / "out", shape, torch.bfloat16)
    writer.files = {}
    writer.create(folder, overrides={"max_position_embeddings": 77})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 77


OLD = {"rope_theta": 1e4, "rope_scaling": None}
NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def rope_config(form: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in QWEN.items() if not key.startswith("rope")} | {"model_type": "llama"} | form


@pytest.mark.parametrize("form", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize(
    ("overrides", "theta", "factor"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5, None),
        ({"rope_scaling": LLAMA3}, 1e4, 8.0),
        ({"rope_scaling": {"type" if key == "rope_type" else key: v for key, v in LLAMA3.items()}}, 1e4, 8.0),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, 8.0),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, 8.0),
        ({"rope_scaling": None}, 1e4, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
    ],
)
def test_policy_and_engine_see_the_same_rotary_settings_in_either_form(
    form: dict[str, Any], overrides: dict[str, Any], theta: float, factor: float | None
) -> None:
    """One of them had ignored an override in the other's form: 1.9 nat apart."""
    from transformers import AutoConfig

    config = rope_config(form)
    shape = shape_of(with_overrides(config, overrides))
    assert (shape.rope_theta, shape.rope_scaling_factor) == (theta, factor)
    engine = AutoConfig.for_model(**config)
    engine.update(engine_overrides(config, overrides))  # as vLLM does
    assert engine.rope_parameters["rope_theta"] == theta
    assert engine.rope_parameters.get("factor") == factor
    assert engine.rope_parameters["rope_type"] == ("default" if factor is None else "llama3")


def test_scaling_can_be_taken_back() -> None:
    for form in ({"rope_theta": 1e4, "rope_scaling": LLAMA3}, {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}):
        config = rope_config(form)
        assert shape_of(config).rope_scaling_factor == 8.0
        assert shape_of(with_overrides(config, {"rope_scaling": None})).rope_scaling_factor is None


@pytest.mark.parametrize(
    ("form", "overrides", "message"),
    [
        (NEW, {"rope_parameters": {"rope_thetta": 1.0}}, "no rotary setting 'rope_thetta'; nearest: rope_theta"),
        (OLD, {"rope_scaling": {"scale": 2}}, "no rotary setting 'scale'; nearest: mscale"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            {"rope_theta": 5e5},
            r"by kind of layer \(full_attention, sliding_attention\); override rope_parameters.full_attention",
        ),
        (OLD, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "has rope_theta and rope_scaling"),
    ],
)
def test_rotary_settings_that_one_side_would_ignore_are_refused(
    form: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(FamilyError, match=message):
        with_overrides(rope_config(form), overrides)


def test_settings_by_kind_of_layer_are_merged() -> None:
    form = {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "factor": 8.0}, "sliding_attention": {"a": 1}}}
    changed = with_overrides(rope_config(form), {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}})
    assert changed["rope_parameters"] == {
        "full_attention": {"rope_theta": 5.0, "factor": 8.0}, "sliding_attention": {"a": 1},
    }  # fmt: skip


GEMMA = {
    "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16,
    "sliding_window": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize("inner", [True, False], ids=["text of a vision model", "text model"])
@pytest.mark.parametrize(
    ("overrides", "theta", "factor"),
    [
        ({"rope_theta": 5e6}, 5e6, None),
        ({"rope_scaling": {"rope_type": "linear", "factor": 16.0}}, 1e6, 16.0),
        ({"rope_scaling": {"type": "linear", "factor": 16.0}}, 1e6, 16.0),
    ],
)
def test_layers_with_windows_keep_their_base_in_policy_and_engine(
    inner: bool, overrides: dict[str, Any], theta: float, factor: float | None
) -> None:
    from transformers import AutoConfig

    config = {"model_type": "gemma3", "text_config": GEMMA} if inner else GEMMA
    changes = {"text_config": overrides} if inner else overrides
    shape = shape_of(with_overrides(config, changes))
    assert (shape.rope_theta, shape.rope_interpolation) == (theta, factor)
    engine = AutoConfig.for_model(**config)
    said = engine_overrides(config, changes)
    text = engine.text_config if inner else engine
    text.update(said["text_config"] if inner else said)  # as vLLM does
    everywhere = text.rope_parameters["full_attention"]
    assert (everywhere["rope_theta"], everywhere.get("factor")) == (theta, factor)
    assert text.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert shape_of(GEMMA | {"rope_scaling": {"type": "linear", "factor": 8.0}}).rope_interpolation == 8.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"sliding_window": 64},
            "hf_config_overrides.sliding_window: this model has its layers in text_config; set te",
        ),
        ({"text_config": {"sliding_windo": 64}}, "text_config.sliding_windo: .* no such key; nearest: sliding_window"),
        ({"text_config": {"rope_scaling": {"factr": 2}}}, "text_config.rope_scaling: .* setting 'factr'; nearest: fac"),
    ],
)
def test_overrides_of_a_vision_model_are_checked(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        with_overrides({"model_type": "gemma3", "text_config": GEMMA}, overrides)


@pytest.mark.parametrize(
    ("form", "key"),
    [({"rope_theta": 1e4, "rope_scaling": LLAMA3}, "rope_scaling"), (NEW, "rope_parameters"),
     ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling")],
)  # fmt: skip
def test_the_old_word_for_the_type_replaces_the_new_one(form: dict[str, Any], key: str) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    config = rope_config(form)
    assert with_overrides(config, {key: yarn})[key]["rope_type"] == "yarn"
    assert "type" not in with_overrides(config, {key: yarn})[key]
    assert engine_overrides(config, {key: yarn})["rope_parameters"]["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("name", "key", "word"),
    [
        ("Qwen3-8B", "layer_types", "sliding_attention"),
        ("Qwen3.5-4B", "layer_types", "sliding_attention"),
        ("gemma-3-1b", "layer_types", "chunked_attention"),
        ("GLM-4.7-Flash", "mlp_layer_types", "moe"),
    ],
)
def test_a_word_for_a_layer_that_the_family_does_not_know_is_refused(name: str, key: str, word: str) -> None:
    config = known_configs()[name]
    text = config.get("text_config", config)
    layers = [word] * text["num_hidden_layers"]
    changed = config | {"text_config": text | {key: layers}} if "text_config" in config else config | {key: layers}
    with pytest.raises(FamilyError, match=f"{key} {word} are not supported"):
        shape_of(changed)


@pytest.mark.parametrize("name", ["Qwen3.5-4B", "Qwen3-Next-80B-A3B", "gemma-3-1b", "gpt-oss-20b", "GLM-4.7-Flash"])
def test_a_model_with_fewer_layers_is_one_that_transformers_reads(name: str) -> None:
    """Its lists of layers stayed as long as before: transformers refused the exported model."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**deepcopy(known_configs()[name])).to_dict()
    fewer: dict[str, Any] = {"num_hidden_layers": 4}
    fewer = {"text_config": fewer} if "text_config" in config else fewer
    cut = with_overrides(config, fewer)
    again = AutoConfig.for_model(**deepcopy(cut)).to_dict()
    assert shape_of(cut) == shape_of(again)
    said = engine_overrides(config, fewer)
    lists = [key for key in ("layer_types", "mlp_layer_types") if key in config.get("text_config", config)]
    assert all(len(said.get("text_config", said)[key]) == 4 for key in lists) and lists
    for layers in (3, 5):  # neither is cut: what the other layers are, nobody said
        with pytest.raises(FamilyError, match=rf"{lists[0]} has 4 entries for {layers} layers"):
            text = again.get("text_config", again) | {"num_hidden_layers": layers}
            shape_of(again | text if text["model_type"] == again["model_type"] else again | {"text_config": text})


def test_layers_that_nobody_counts_are_refused() -> None:
    nemotron = known_configs()["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]
    with pytest.raises(FamilyError, match="num_hidden_layers 4 of a nemotron_h model, .* has 52 layers"):
        shape_of(with_overrides(nemotron, {"num_hidden_layers": 4}))


def test_the_engine_is_told_of_other_keys_as_they_are() -> None:
    assert engine_overrides(QWEN, {}) == {}
    assert engine_overrides(QWEN, {"max_position_embeddings": 7}) == {"max_position_embeddings": 7}
    assert engine_overrides(QWEN, {"hidden_size": QWEN["hidden_size"]}) == {}


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_a_key_that_a_config_lacks_has_the_value_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    name = "deepseek_v3" if model_type == "kimi_k2" else model_type  # vLLM reads both with one class
    theirs = AutoConfig.for_model(name).get_text_config().to_dict()
    theirs["rope_theta"] = theirs["rope_parameters"]["rope_theta"]
    assert {key: theirs[key] for key in DEFAULTS[model_type]} == DEFAULTS[model_type]


def numbers_of(shape: ModelShape) -> ModelShape:
    """Return a shape without the sizes that its tensors have: a wrong one of them is found beside the weights."""
    sizes = {"head_dim": 1, "num_kv_heads": 1, "ffn_hidden_size": 1, "max_positions": 1, "carried": (), "latent": None}
    experts, same = shape.experts, {"count": 1, "ffn_hidden_size": 1, "shared_ffn_hidden_size": 1, "dense_layers": ()}
    return replace(shape, experts=experts and replace(experts, **same), **sizes)


@pytest.mark.parametrize("name", sorted({c["model_type"]: name for name, c in known_configs().items()}.values()))
def test_whatever_a_config_lacks_has_the_value_of_transformers(name: str) -> None:
    from transformers import AutoConfig

    config = known_configs()[name]
    inner = config.get("text_config", config)
    for left_out in [key for key in inner if key not in ("model_type", "num_experts")]:
        rest = {key: value for key, value in inner.items() if key != left_out}
        bare = {**config, "text_config": rest} if "text_config" in config else rest
        try:
            shape = shape_of(bare)
        except FamilyError:
            continue
        theirs = {**bare, "model_type": "deepseek_v3"} if bare["model_type"] == "kimi_k2" else bare
        read = AutoConfig.for_model(**deepcopy(theirs)).to_dict() | {"model_type": bare["model_type"]}
        assert numbers_of(shape) == numbers_of(shape_of(read)), left_out


def test_a_config_without_a_key_is_read_as_transformers_reads_it() -> None:
    mixtral = known_configs()["Mixtral-8x7B-v0.1"]
    bare = {key: value for key, value in mixtral.items() if key not in ("rms_norm_eps", "rope_theta")}
    assert shape_of(bare) == shape_of(mixtral) and shape_of(bare).rope_theta == 1e6
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    assert engine_overrides(bare, {"rope_scaling": scaling})["rope_parameters"]["rope_theta"] == 1e6


def test_an_engine_is_told_how_experts_are_chosen_where_the_config_does_not_say() -> None:
    config = known_configs()["DeepSeek-V3"]
    said = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    assert engine_overrides(config | said, {}) == {} == engine_overrides(QWEN, {})
    bare = {key: value for key, value in config.items() if key not in said}
    assert engine_overrides(bare, {}) == said and shape_of(bare) == shape_of(config)
