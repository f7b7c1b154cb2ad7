"""Megatron-Core accepts the settings of every recipe on every platform; it checks them when they are built."""

import ctypes
import os
import sys
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.families import shape_of
from grpo_mcore.families.known import known_config, known_configs
from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform, PlatformError, check_optimizer, load_torchs_cudnn
from grpo_mcore.recipe import policy_layout

prepare_megatron(Platform.detect())

from megatron.core.extensions import transformer_engine as te  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer import ModuleSpec  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

from grpo_mcore.layout import PolicyLayout  # noqa: E402
from grpo_mcore.parallel import model  # noqa: E402
from grpo_mcore.parallel.layers import norm  # noqa: E402
from grpo_mcore.parallel.optimizer import ddp_config, optimizer_config  # noqa: E402
from grpo_mcore.parallel.settings import transformer_config  # noqa: E402
from grpo_mcore.recipe import (  # noqa: E402
    MasterConfig,
    MegatronConfig,
    PolicyConfig,
    SequencePackingConfig,
    load_recipe,
    shares_prefixes,
    world_size,
)
from tests.fused_adam import FusedAdam  # noqa: E402

RECIPES = sorted(p for p in (Path(__file__).parents[3] / "recipes").rglob("*.yaml") if p.parent.name != "presets")
PLATFORMS = {
    "cpu": Platform("cpu"),
    "gpu": Platform("gpu", grouped_products=True),
    "gpu with TransformerEngine": Platform("gpu", transformer_engine=True, grouped_products=True),
    "gpu with every kernel": Platform(
        "gpu", transformer_engine=True, grouped_products=True, mamba_kernels=True, delta_kernels=True
    ),
    "gpu with shared prefixes": Platform("gpu", transformer_engine=True, own_attention=True, grouped_products=True),
}


@cache
def recipe_of(path: Path) -> MasterConfig:
    return load_recipe(str(path)).config


@pytest.fixture
def transformer_engine_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for TransformerEngine's fused kernels, of which Megatron-Core's settings check only the presence."""
    for module in (rope_utils, moe_utils):
        for name in [name for name in vars(module) if name.startswith("fused_")]:
            monkeypatch.setattr(module, name, object())
    kernels = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
    for name in kernels:
        # Without TransformerEngine, Megatron-Core 0.16 does not even define these.
        monkeypatch.setattr(moe_utils, f"fused_{name}", object(), raising=False)


@pytest.fixture
def transformer_engine_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for TransformerEngine's Adam, whose arguments Megatron-Core's settings look for."""
    package = SimpleNamespace(FusedAdam=FusedAdam)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, name, package)


@pytest.mark.slow
@pytest.mark.usefixtures("transformer_engine_kernels", "transformer_engine_adam")
@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_settings_of_every_recipe_are_accepted(recipe: Path, platform: Platform) -> None:
    config = recipe_of(recipe)
    policy, hf_config = config.policy, known_config(config.policy.model_name)
    assert hf_config is not None
    shape = shape_of(hf_config)
    layout = policy_layout(policy.megatron_cfg, world_size(config))
    dtype = getattr(torch, policy.precision)
    settings = transformer_config(shape, layout, policy.megatron_cfg, dtype, platform)
    assert settings.use_cpu_initialization is not platform.on_gpu
    if not platform.transformer_engine:
        fusions = (settings.bias_activation_fusion, settings.apply_rope_fusion, settings.moe_permute_fusion)
        assert not any(fusions), "only TransformerEngine has these kernels"
    ddp = ddp_config(policy.megatron_cfg, platform)
    assert platform.on_gpu or not ddp.overlap_grad_reduce, "Gloo has no streams"
    if policy.megatron_cfg.optimizer.use_precision_aware_optimizer and not platform.transformer_engine:
        with pytest.raises(PlatformError, match="needs TransformerEngine's FusedAdam"):
            check_optimizer(policy, platform)
        return
    check_optimizer(policy, platform)
    assert optimizer_config(policy, platform).params_dtype == dtype


@pytest.mark.usefixtures("transformer_engine_adam")
@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
@pytest.mark.parametrize("in_fp32", [True, False])
def test_the_optimizer_takes_gradients_as_they_are_where_the_kernel_is(platform: Platform, in_fp32: bool) -> None:
    optimizer = {"use_precision_aware_optimizer": True}
    ddp = {"grad_reduce_in_fp32": in_fp32, "overlap_param_gather": True}
    policy = PolicyConfig.model_validate(
        {"model_name": "x", "megatron_cfg": {"optimizer": optimizer, "distributed_data_parallel_config": ddp}}
    )
    assert ddp_config(policy.megatron_cfg, platform).overlap_param_gather
    if not platform.transformer_engine:
        why = "it is not installed here; install it" if platform.on_gpu else "there is no GPU here; run this on one"
        with pytest.raises(PlatformError, match=f"use_precision_aware_optimizer: true needs .*, but {why}, or set"):
            check_optimizer(policy, platform)
        return
    check_optimizer(policy, platform)
    settings = optimizer_config(policy, platform)
    assert settings.use_precision_aware_optimizer and not settings.optimizer_cpu_offload
    assert settings.main_grads_dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    assert settings.main_params_dtype == settings.exp_avg_dtype == settings.exp_avg_sq_dtype == torch.float32
    assert not settings.store_param_remainders


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
@pytest.mark.parametrize("aware", [True, False])
def test_an_optimizer_on_the_host_needs_no_kernel(platform: Platform, aware: bool) -> None:
    optimizer = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }
    policy = PolicyConfig.model_validate(
        {"model_name": "x", "megatron_cfg": {"optimizer": optimizer | {"use_precision_aware_optimizer": aware}}}
    )
    check_optimizer(policy, platform)
    settings = optimizer_config(policy, platform)
    assert settings.optimizer_cpu_offload and settings.optimizer_offload_fraction == 0.5
    assert settings.overlap_cpu_optimizer_d2h_h2d and settings.pin_cpu_grads == platform.on_gpu
    assert settings.use_precision_aware_optimizer, "else Megatron-Core keeps float32 copies on the device too"


def classes_of(spec: Any) -> set[Any]:
    """Return every class and function that a layer spec names."""
    if isinstance(spec, ModuleSpec):
        return classes_of(spec.module) | classes_of(spec.submodules) | classes_of(list(spec.params.values()))
    if isinstance(spec, list):
        return set().union(*map(classes_of, spec))
    if is_dataclass(spec) and not isinstance(spec, type):
        return classes_of([getattr(spec, field.name) for field in fields(spec)])
    return {spec} if callable(spec) else set()  # without TransformerEngine, its classes are mocks


@pytest.mark.usefixtures("transformer_engine_kernels")
@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
@pytest.mark.parametrize("name", ["Qwen3-8B", "DeepSeek-V3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "gpt-oss-20b"])
def test_layers_are_those_of_the_platform(name: str, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(known_configs()[name])
    monkeypatch.setattr(model, "get_transformer_layer_offset", lambda config, vp_stage: 0)  # these ask process groups
    monkeypatch.setattr(model, "get_num_layers_to_build", lambda config, vp_stage: config.num_layers)
    config = transformer_config(shape, PolicyLayout(1, 1, 1), MegatronConfig(), torch.bfloat16, platform)
    found, fused = classes_of(model.block_spec(shape, config, None, platform)), platform.fused_attention
    theirs = {te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear}
    local = {norm.RMSNorm if platform.on_gpu else norm.CpuRMSNorm, model.RowParallelLinear}
    ours, others = (theirs, local) if platform.transformer_engine else (local, theirs)
    assert ours <= found and not others & found
    assert (te.TEDotProductAttention in found, model.PackedAttention in found) == (fused, not fused)
    # The fused kernel for packed rows knows no YaRN, and latent attention has a kernel of its own.
    assert config.apply_rope_fusion == (fused and shape.latent is None and shape.yarn is None)
    assert (model.LatentAttention in found) == (shape.latent is not None and not fused)
    assert platform.on_gpu or norm.RMSNorm not in found
    assert (model.MambaMixer in found) == bool(shape.mamba)
    grouped = shape.experts is not None and platform.on_gpu and not shape.biases
    assert (model.GroupedExperts in found) == grouped
    assert (model.Experts in found) == (shape.experts is not None and not grouped and not shape.experts.clamp)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "mamba_kernels"), ("Qwen3.5-35B-A3B", "delta_kernels")],
)
def test_mixers_use_their_kernels_in_half_precision(monkeypatch: pytest.MonkeyPatch, name: str, kernels: str) -> None:
    shape = shape_of(known_configs()[name])
    monkeypatch.setattr(model, "get_transformer_layer_offset", lambda config, vp_stage: 0)  # these ask process groups
    monkeypatch.setattr(model, "get_num_layers_to_build", lambda config, vp_stage: config.num_layers)
    for platform, dtype, fused in (
        (replace(PLATFORMS["gpu"], **{kernels: True}), torch.bfloat16, True),
        (replace(PLATFORMS["gpu"], **{kernels: True}), torch.float32, False),
        (PLATFORMS["gpu"], torch.bfloat16, False),
        (PLATFORMS["cpu"], torch.bfloat16, False),
    ):
        config = transformer_config(shape, PolicyLayout(1, 1, 1), MegatronConfig(), dtype, platform)
        mixers = [
            layer.submodules.self_attention for layer in model.block_spec(shape, config, None, platform).layer_specs
        ]
        found = [mixer.params["fused"] for mixer in mixers if "fused" in getattr(mixer, "params", {})]
        assert found == [fused] * len(found) and len(found) > shape.num_layers // 3


@pytest.mark.slow
@pytest.mark.usefixtures("transformer_engine_kernels")
@pytest.mark.parametrize(
    ("changed", "dtype", "grouped"),
    [
        ({}, torch.bfloat16, True),
        ({"moe_grouped_gemm": False}, torch.bfloat16, False),
        ({}, torch.float32, False),
        ({"peft": {"enabled": True}}, torch.bfloat16, False),
        ({"peft": {"enabled": True, "exclude_modules": ["*.local_experts.*"]}}, torch.bfloat16, True),
    ],
)
def test_experts_are_grouped_where_the_kernel_takes_them(
    changed: dict[str, Any], dtype: torch.dtype, grouped: bool
) -> None:
    shape, settings = shape_of(known_configs()["Qwen3-30B-A3B"]), MegatronConfig.model_validate(changed)
    for platform in PLATFORMS.values():
        config = transformer_config(shape, PolicyLayout(1, 1, 1), settings, dtype, platform)
        assert config.moe_grouped_gemm == (grouped and platform.on_gpu)
        assert config.moe_permute_fusion == platform.transformer_engine, "on by default, where the kernel is"
        gathered = settings.model_copy(update={"moe_token_dispatcher_type": "allgather"})
        config = transformer_config(shape, PolicyLayout(1, 1, 1), gathered, dtype, platform)
        assert not config.moe_permute_fusion, "it refuses a rank whose experts get no token"
        gathered = gathered.model_copy(update={"pipeline_model_parallel_size": 2})
        config = transformer_config(shape, PolicyLayout(1, 2, 1), gathered, dtype, platform)
        assert (config.moe_token_dispatcher_type, config.variable_seq_lengths) == ("alltoall", True)
    assert shape.experts is not None
    narrow = replace(shape, experts=replace(shape.experts, ffn_hidden_size=772))
    assert not transformer_config(narrow, PolicyLayout(1, 1, 1), settings, dtype, PLATFORMS["gpu"]).moe_grouped_gemm


def test_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Platform.detect() == Platform.detect("cpu") == PLATFORMS["cpu"]
    with pytest.raises(RuntimeError, match="cluster.platform is gpu, but torch sees no GPU"):
        Platform.detect("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("grpo_mcore.parallel.platform.find_spec", lambda name: None)
    assert Platform.detect() == Platform.detect("gpu") == PLATFORMS["gpu"]
    assert Platform.detect("cpu") == PLATFORMS["cpu"]
    monkeypatch.setattr("grpo_mcore.parallel.platform.find_spec", lambda name: object())
    monkeypatch.setattr("grpo_mcore.parallel.platform.why_not_imported", lambda name: None)
    assert Platform.detect() == PLATFORMS["gpu with every kernel"]
    monkeypatch.setattr("grpo_mcore.parallel.platform.why_not_imported", lambda name: "FileNotFoundError: no .so file")
    with pytest.raises(PlatformError, match=r"transformer_engine is installed .* no .so file\); install it again"):
        Platform.detect()
    assert Platform.detect("cpu") == PLATFORMS["cpu"]


def test_transformer_engine_finds_torchs_cudnn_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the system's first. With 9.14 there and 9.19 in torch, an H200 had no kernel for gpt-oss's sinks."""
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcudnn.so.9", "libcudnn_graph.so.9", "else.so.9"):
        (folder / name).touch()
    loaded: list[str] = []
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append(path))
    load_torchs_cudnn()
    assert loaded == [str(folder / "libcudnn.so.9"), str(folder / "libcudnn_graph.so.9")]


def test_kernels_that_a_model_needs_are_imported_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mamba_ssm.py").write_text("raise OSError('undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    shape, settings = shape_of(known_configs()["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]), MegatronConfig()
    with pytest.raises(PlatformError, match=r"mamba_ssm is installed here .* undefined symbol"):
        model.build_model(shape, PolicyLayout(1, 1, 1), settings, torch.bfloat16, PLATFORMS["gpu with every kernel"])


def test_a_process_of_the_cpu_runs_no_rank_on_a_gpu() -> None:
    prepare_megatron(Platform("cpu"))  # again: as it is
    with pytest.raises(PlatformError, match="has run a rank on the CPU"):
        prepare_megatron(Platform("gpu"))


def test_megatron_core_takes_no_kernels_for_gpus_on_a_cpu() -> None:
    """By import it would take them from packages that are installed, for tensors on a CPU too."""
    assert [sys.modules.get(name, "importable") for name in ("transformer_engine", "apex", "amp_C")] == [None] * 3


@pytest.mark.parametrize(
    ("backend", "asked", "built_with", "then"),
    [
        (AttnBackend.auto, None, None, "0"),
        (AttnBackend.auto, "0", None, "0"),
        (AttnBackend.auto, "1", None, "1"),
        (AttnBackend.unfused, "1", "1", "1"),
    ],
)
def test_attention_without_a_kernel_is_an_error(
    monkeypatch: pytest.MonkeyPatch, backend: AttnBackend, asked: str | None, built_with: str | None, then: str
) -> None:
    """Megatron-Core refuses NVTE_UNFUSED_ATTN=0 while it builds a model with the backend auto, and sets it to 1."""
    name = "NVTE_UNFUSED_ATTN"
    monkeypatch.delenv(name, raising=False) if asked is None else monkeypatch.setenv(name, asked)
    with model.without_unfused_attention(SimpleNamespace(attention_backend=backend)):
        assert os.environ.get(name) == built_with
        os.environ[name] = "1"
    assert os.environ[name] == then


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"causal_conv1d", "mamba_ssm"}, {"mamba_kernels"}),
        ({"causal_conv1d", "fla"}, {"delta_kernels"}),
        ({"mamba_ssm", "fla"}, set()),
        ({"transformer_engine"}, {"transformer_engine"}),
    ],
)
def test_detection_of_kernels(monkeypatch: pytest.MonkeyPatch, installed: set[str], expected: set[str]) -> None:
    """A mixer's kernels are used only together with the one of its convolution."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("grpo_mcore.parallel.platform.find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr("grpo_mcore.parallel.platform.why_not_imported", lambda name: None)
    assert Platform.detect() == replace(PLATFORMS["gpu"], **dict.fromkeys(expected, True))
    assert Platform.detect("cpu") == PLATFORMS["cpu"]


@pytest.mark.parametrize(
    ("packing", "where"),
    [
        ({}, {"cpu", "gpu"}),
        ({"shared_prefix": {"enabled": None}}, {"cpu", "gpu"}),
        ({"shared_prefix": {"enabled": True}}, {"cpu", "gpu", "gpu with TransformerEngine"}),
        ({"shared_prefix": {"enabled": False}}, set()),
        ({"enabled": False}, set()),
    ],
)
def test_samples_share_prefixes_where_no_kernel_is_lost(packing: dict[str, Any], where: set[str]) -> None:
    config = SequencePackingConfig.model_validate(packing)
    names = ("cpu", "gpu", "gpu with TransformerEngine")
    assert {
        name for name in names if shares_prefixes(config, transformer_engine=PLATFORMS[name].transformer_engine)
    } == where


def test_streams_have_events_although_vllm_replaced_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU worker, imported after us into the same process, puts streams here whose events are None."""
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    prepare_megatron(Platform("cpu"))
    with torch.cuda.Stream() as stream:
        assert stream.query() is True
        stream.record_event().wait(torch.cuda.current_stream())
