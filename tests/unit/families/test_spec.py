"""The declaration of parameters: every element of every tensor on exactly one rank, or on all of them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mcore.families import (
    FamilyError,
    ModelShape,
    Split,
    local_shape,
    parameter_count,
    params_of,
    pieces,
    read_hf_config,
    shape_of,
    with_overrides,
)
from grpo_mcore.families.known import known_configs
from grpo_mcore.families.spec import YarnShape

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 4096,
    "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}  # fmt: skip


@st.composite
def shapes(draw: st.DrawFn) -> tuple[ModelShape, int]:
    tp = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    sharing = max(1, tp // kv_heads)
    config = QWEN3 | {
        "model_type": draw(st.sampled_from(["qwen2", "qwen3", "llama"])),
        "hidden_size": draw(st.integers(1, 6)), "num_hidden_layers": 1, "num_key_value_heads": kv_heads,
        "num_attention_heads": math.lcm(tp, kv_heads) * draw(st.integers(1, 3)),
        "head_dim": sharing * draw(st.integers(1, 4)),
        "intermediate_size": tp * draw(st.integers(1, 5)), "vocab_size": draw(st.integers(tp, 20)),
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    return shape_of(config), tp


@pytest.mark.slow
@given(shapes())
@settings(max_examples=150, deadline=None)
def test_the_pieces_of_all_ranks_rebuild_every_tensor(case: tuple[ModelShape, int]) -> None:
    shape, tp = case
    for param in params_of(shape):
        whole = {t.name: torch.arange(t.numel, dtype=torch.float64).view(t.shape) + 1 for t in param.hf}
        rebuilt = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        written = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        for rank in range(tp):
            local = torch.zeros(local_shape(param, shape, tp), dtype=torch.float64)
            for piece in pieces(param, shape, rank, tp):
                source = whole[piece.hf][tuple(slice(*span) for span in piece.hf_box)]
                target = local[tuple(slice(*span) for span in piece.local_box)]
                assert target.shape == source.shape and (target == 0).all(), "two pieces in one place"
                target.copy_(source)
            for piece in pieces(param, shape, rank, tp):
                place = tuple(slice(*span) for span in piece.hf_box)
                rebuilt[piece.hf][place] = local[tuple(slice(*span) for span in piece.local_box)]
                written[piece.hf][place] += 1
            if param.split is not Split.VOCAB:
                assert (local > 0).all(), f"{param.megatron} has a hole on rank {rank}"
        copies = tp if param.split is Split.REPLICATED else 1
        for name, tensor in whole.items():
            assert torch.equal(rebuilt[name], tensor)
            assert (written[name] == copies).all()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_transformers(family: str, tied: bool) -> None:
    import transformers

    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
    shape = shape_of(config.to_dict())
    assert {t.name: t.shape for p in params_of(shape) if not p.copy for t in p.hf} == expected
    assert parameter_count(shape) == sum(p.numel() for p in model.parameters())


CHECKPOINTS = {
    "nemotron_h": (
        "NemotronH",
        {
            "num_hidden_layers": None, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "head_dim": 8, "ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 2,
            "n_routed_experts": 4, "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 12,
            "moe_latent_size": 6,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "mlp_only_layers": [0]}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "attention_bias": True, "use_qk_norm": True},
    ),
    "gemma3_text": ("Gemma3", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 4}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12,
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "mlp_only_layers": [0],
            "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8,
            "first_k_dense_replace": 1, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_names_and_shapes_are_those_of_a_saved_checkpoint(family: str, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    name, sizes = CHECKPOINTS[family]
    network = getattr(transformers, f"{name}ForCausalLM")
    config = network.config_class(
        **{
            "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        } | sizes
    )  # fmt: skip
    network(config).save_pretrained(tmp_path)
    expected = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    shape = shape_of(read_hf_config(tmp_path))
    assert {t.stored.name: t.stored.shape for p in params_of(shape) if not p.copy for t in p.hf} == expected


TEXT = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
VISION = {  # its text part, its vision part
    "Qwen3_5": (
        {
            **TEXT,
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2},
            "linear_num_value_heads": 4,
        },
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
    ),
    "Gemma3": (
        {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8},
        {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
    ),
}


@pytest.mark.parametrize("name", VISION)
def test_a_dense_vision_checkpoint_is_declared_but_for_what_an_export_carries(name: str, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    text, vision = VISION[name]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(tmp_path)
    shape = shape_of(read_hf_config(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    expected = {n: tuple(tensor.shape) for n, tensor in saved.items() if not n.startswith(shape.carried)}
    assert {t.name: t.shape for p in params_of(shape) if not p.copy for t in p.hf} == expected
    assert len(expected) < len(saved)


def test_a_sparse_config_of_a_vision_model_has_the_values_of_transformers() -> None:
    import transformers

    sparse = {"model_type": "gemma3", "text_config": {**TEXT, "model_type": "gemma3_text", "sliding_window": 8}}
    del sparse["text_config"]["vocab_size"], sparse["text_config"]["head_dim"]
    assert shape_of(sparse) == shape_of(transformers.Gemma3Config(text_config=sparse["text_config"]).to_dict())
    with pytest.raises(FamilyError, match="tie_word_embeddings False is not supported for gemma3 models"):
        shape_of(sparse | {"tie_word_embeddings": False})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn_is_read_in_both_forms() -> None:
    expected = YarnShape(4.0, 32768, 32.0, 1.0)
    old = {"type" if key == "rope_type" else key: value for key, value in YARN.items()}
    for form in ({"rope_parameters": YARN}, {"rope_parameters": None, "rope_scaling": old}):
        assert shape_of(QWEN3 | form).yarn == expected
    assert shape_of(QWEN3 | {"rope_parameters": YARN | {"truncate": False}}).yarn == replace(expected, truncate=False)
    glm = shape_of(known_configs()["GLM-4.5-Air"] | {"rope_scaling": old})  # turns half of each head
    assert glm.yarn == expected and glm.rotary_fraction == 0.5


def test_both_forms_may_say_the_same() -> None:
    theta = {"rope_theta": 1e6}
    both = {"rope_scaling": YARN | {"mscale": None}, "rope_parameters": YARN | theta} | theta
    assert shape_of(QWEN3 | both).yarn == YarnShape(4.0, 32768, 32.0, 1.0)


def test_one_of_mscale_and_mscale_all_dim_alone_scales_nothing() -> None:
    """transformers and vLLM read them together; in vLLM's latent attention each acts by itself."""
    for alone in (
        {"mscale_all_dim": 0},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
    ):
        assert shape_of(QWEN3 | {"rope_parameters": YARN | alone}).yarn == YarnShape(4.0, 32768, 32.0, 1.0)
        latent = known_configs()["Moonlight-16B-A3B"] | {"rope_scaling": YARN | alone}
        if alone.get("mscale", 1) == 1 and not alone["mscale_all_dim"]:
            assert shape_of(latent).latent.yarn == YarnShape(4.0, 32768, 32.0, 1.0)
            continue
        with pytest.raises(FamilyError, match="with one of mscale and mscale_all_dim alone in latent attention"):
            shape_of(latent)


def test_the_27m_model_has_its_parameters() -> None:
    assert parameter_count(shape_of(QWEN3)) == 27_272_704


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported; choose one of"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen3 models; only silu"),
        ({"use_sliding_window": True}, "use_sliding_window True .*; only False"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
         "RoPE scaling .* is not supported; known are plain"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings 8192"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "YaRN needs original_max_position_embeddings"),
        ({"rope_parameters": YARN | {"attention_factor": 1.2}}, "YaRN with attention_factor, or with one of mscale"),
        ({"rope_parameters": YARN | {"attn_factor": 0.878}},
         "hf_config_overrides.rope_scaling.attn_factor: 1 to train"),
        ({"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
         "known are plain RoPE, YaRN without mscale"),
        ({"attention_bias": True}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for qwen3 models; only 1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_scaling and other rope_parameters"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 5e6}},
         "has rope_scaling and other rope_param"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"beta_fast": 64}}, "has rope_scaling and other rope_parame"),
        ({"rope_scaling": YARN | {"beta_fast": 64}, "rope_parameters": YARN}, "has rope_scaling and other rope_parame"),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 1e4}, "has rope_scaling and other rope_parameters"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "has no head for tokens, so it cannot be a policy"),
        ({"architectures": ["Qwen2ForProcessRewardModel"]},
         "ProcessRewardModel has no head for tokens, so it cannot be"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types sliding_attention are not supported"),
    ],
)  # fmt: skip
def test_unsupported_config_values_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        shape_of(QWEN3 | change)


@pytest.mark.parametrize("change", [{"attn_output_gate": False}, {"output_gate_type": "sigmoid"}])
def test_another_gate_of_qwen3_5_is_rejected(change: dict) -> None:
    config = QWEN3 | {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
    assert shape_of(config | {"attn_output_gate": True, "output_gate_type": "swish"}).output_gate
    with pytest.raises(FamilyError, match=f"{next(iter(change))} .* is not supported for qwen3_5_text models"):
        shape_of(config | change)


@pytest.mark.parametrize("family", sorted(known_configs()))
def test_values_that_cannot_be_meant_are_one_message(family: str) -> None:
    config = known_configs()[family]
    for key in (*config, "text_config"):
        for value in ("x", -1, 0, [1], None, 0.5, {}):
            try:
                shape_of(config | {key: value})
            except FamilyError as error:
                assert str(error)  # nothing else is raised; a wrong value that fits is found beside the weights
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        inner = config.get("text_config", config)
        wrong = inner | {key: "64"}
        with pytest.raises(FamilyError, match=f"{key} is '64'"):
            shape_of({**config, "text_config": wrong} if "text_config" in config else wrong)


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("adapter_config.json", "it is an adapter: merge it into its base model first"),
        ("snapshots/abc/config.json", "a model of the hub's cache; give .*/snapshots/abc"),
        ("q4.gguf", "its weights are GGUF, which is not read"),
        ("latest_checkpointed_iteration.txt", "a checkpoint of Megatron; convert it"),
        ("checkpoint-500/config.json", "give a model in it, such as .*/checkpoint-500"),
        ("training_info.json", "a checkpoint of a run: `grpo-mcore export .* --output DIR`"),
        ("step_8/training_info.json", "a checkpoint of a run: `grpo-mcore export"),
        ("global_step_9/actor/model_world_size_2_rank_0.pt", "verl's form: .*fsdp --local_dir .*/global_step_9/actor "),
        ("actor/dist_ckpt/metadata.json", "verl's form: .*--backend megatron --local_dir .*/actor --target_dir DIR`"),
        ("_actor/global_step20/mp_rank_00_model_states.pt", "a checkpoint of DeepSpeed: `zero_to_fp32.py`"),
        ("step_9/policy/weights/__0_0.distcp", "torch's distributed form: .* NeMo RL's convert_dcp_to_hf.py"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "torch's distributed form: .*accelerate merge-weights"),
        ("notes.txt", "give a Hugging Face folder, or a name of the hub"),
    ],
)
def test_a_folder_of_another_form_says_what_to_give(tmp_path: Path, file: str, why: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(FamilyError, match=f"holds no config.json; .*{why}"):
        read_hf_config(tmp_path)


def test_a_checkpoint_of_this_trainer_is_not_taken_for_another_trainers(tmp_path: Path) -> None:
    """The files of all three are torch's; NeMo RL has a training_info.json, too."""
    own, other = tmp_path / "own" / "step_8", tmp_path / "nemo" / "step_8"
    for file in (own / "policy" / "__0_0.distcp", other / "policy" / "weights" / "iter_0000000" / "__0_0.distcp"):
        file.parent.mkdir(parents=True)
        file.touch()
    for step in (own, other):
        (step / "training_info.json").touch()
    for folder in (own, own.parent):
        with pytest.raises(FamilyError, match=f"`grpo-mcore export {folder} --output DIR`"):
            read_hf_config(folder)
    with pytest.raises(FamilyError, match=r"NeMo RL's convert_dcp_to_hf\.py"):
        read_hf_config(other)


def test_a_model_beside_another_trainers_own_form_is_the_one_to_give(tmp_path: Path) -> None:
    """verl writes one with `save_contents: [hf_model]`."""
    model = tmp_path / "actor" / "huggingface"
    model.mkdir(parents=True)
    for path in (model / "config.json", model.parent / "model_world_size_1_rank_0.pt"):
        path.touch()
    for folder in (tmp_path, model.parent):
        with pytest.raises(FamilyError, match="verl.model_merger"):
            read_hf_config(folder)
    (model / "model.safetensors").touch()
    for folder in (tmp_path, model.parent):
        with pytest.raises(FamilyError, match=f"give a model in it, such as {model}$"):
            read_hf_config(folder)


@pytest.mark.parametrize(
    ("content", "why"),
    [("version https://git-lfs.github.com/spec/v1", "is no JSON"), ("[]", "must hold an object, got list")],
)
def test_a_config_that_is_no_object_is_refused_by_name(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "config.json").write_text(content)
    for there in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(FamilyError, match=f"config.json {why}"):
            read_hf_config(there)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("name", ["Qwen2.5-7B", "gemma-3-4b", "Nemotron-3-Nano-30B-A3B"])
def test_quantized_models_are_refused_in_every_family(name: str, key: str) -> None:
    config = next(config for known, config in known_configs().items() if name in known)
    with pytest.raises(FamilyError, match=f"{key} of a .* model; convert the checkpoint to bfloat16 first"):
        shape_of(config | {key: {"quant_method": "fp8"}})


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "GLM-4.5-Air", "MiniMax-M2"])
def test_a_window_that_only_engines_would_have_is_refused(name: str) -> None:
    """Llama models that were made of Mistral's have one. vLLM's log-probs were 3.8 apart from the policy's."""
    config = known_configs()[name]
    with pytest.raises(FamilyError, match="sliding_window 4096 .* set policy.hf_config_overrides.sliding_window: null"):
        shape_of(config | {"sliding_window": 4096})
    assert shape_of(with_overrides(config | {"sliding_window": 4096}, {"sliding_window": None})) == shape_of(config)
    qwen = known_configs()["Qwen3-4B"]  # says by use_sliding_window whether it counts
    assert shape_of(qwen | {"sliding_window": 4096, "use_sliding_window": False}) == shape_of(qwen)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DeepSeek-V3", {"scoring_func": "softmax"}),
        ("DeepSeek-V3", {"topk_method": "greedy"}),
        ("DeepSeek-V3", {"moe_layer_freq": 2}),
        ("Qwen3-4B", {"is_causal": False}),
        ("Qwen3-4B", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
        ("Llama-3.1-8B", {"bias": True}),
        ("Llama-3.1-8B", {"qkv_bias": True}),
        ("Qwen2.5-7B", {"qk_norm": True}),
        ("Qwen3-30B-A3B", {"shared_expert_intermediate_size": 512}),
        ("Qwen3-Next-80B-A3B", {"qkv_bias": True}),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"n_shared_experts": 2}),
    ],
)
def test_what_only_engines_would_act_on_or_another_way_is_refused(name: str, changes: dict[str, Any]) -> None:
    config = known_configs()[name]
    with pytest.raises(
        FamilyError, match=f"{next(iter(changes))} .* is not supported for {config['model_type']} models"
    ):
        shape_of(config | changes)


def test_a_limit_of_experts_that_no_engine_has_is_refused() -> None:
    """vLLM clamps the experts of gpt-oss at 7, whatever config.json says."""
    with pytest.raises(FamilyError, match=r"swiglu_limit 5.0 is not supported for gpt_oss models; only 7.0"):
        shape_of(known_configs()["gpt-oss-20b"] | {"swiglu_limit": 5.0})


def test_a_scale_of_attention_that_nobody_reads_any_more_can_be_taken_back() -> None:
    """DeepSeek-R1-0528-Qwen3-8B has one."""
    config = known_configs()["Qwen3-8B"] | {"rope_scaling": YARN | {"attn_factor": 0.8782488562869419}}
    taken_back = with_overrides(config, {"rope_scaling": {"attn_factor": 1}})
    assert shape_of(taken_back).yarn == YarnShape(4.0, 32768, 32.0, 1.0)


def test_the_first_nemotron_h_models_have_their_heads() -> None:
    """Their config.json says attention_head_dim; the 4B's hidden size is 40 times 78.4."""
    config = known_configs()["NVIDIA-Nemotron-Nano-9B-v2"] | {"hidden_size": 3136}
    del config["head_dim"]
    assert shape_of(config | {"attention_head_dim": 128}).head_dim == 128 == shape_of(config).head_dim


def test_scaling_may_say_beside_it_where_it_begins() -> None:
    """transformers, and so vLLM, prefer original_max_position_embeddings of the config to that of its scaling."""
    scaled = known_configs()["Qwen3-8B"] | {"rope_scaling": YARN, "original_max_position_embeddings": 8192}
    assert shape_of(scaled).yarn == YarnShape(4.0, 8192, 32.0, 1.0)
    with pytest.raises(FamilyError, match="Llama 3's scaling with .*original_max_position_embeddings 8192"):
        shape_of(known_configs()["Llama-3.1-8B"] | {"original_max_position_embeddings": 4096})
