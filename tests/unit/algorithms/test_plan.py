"""`grpo-mcore plan`: every recipe, a thousand GPUs, the search, and what it says of layouts that cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.algorithms.plan import Plan, make_plan, plan_device, plan_shape, ranks_of, search
from grpo_mcore.algorithms.plan.memory import optimizer_bytes
from grpo_mcore.algorithms.plan.report import plan_text, search_text
from grpo_mcore.algorithms.plan.timing import pipeline_bubble
from grpo_mcore.cli.main import main
from grpo_mcore.families import ExpertShape, FamilyError
from grpo_mcore.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))
LLAMA = "recipes/grpo-llama3.1-8B-2n8g.yaml"
AT = "policy.megatron_cfg."


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan(recipe: str, *overrides: str, device: str | None = None, memory_gb: float | None = None) -> Plan:
    config = load_recipe(recipe, overrides).config
    return make_plan(config, plan_shape(config), plan_device(config, device, memory_gb))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_plan_in_time(recipe: str) -> None:
    began = time.process_time()
    found = plan(recipe)
    text = plan_text(found)
    json.dumps(found.plain())
    assert time.process_time() - began < 2  # the rest of the five seconds is Python and its imports
    for word in ("batch", "layout", "memory of a rank", "training", "bottleneck", "verdict"):
        assert word in text


def test_a_plan_needs_neither_megatron_nor_vllm_nor_ray() -> None:
    program = (
        "import sys; from grpo_mcore.cli.main import main; code = main(['plan', 'grpo_math_1B', '--json']); "
        "print([name for name in ('megatron', 'vllm', 'ray', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    assert json.loads(done.stdout)["parameters"] == 1_543_714_304


def test_a_thousand_gpus() -> None:
    found = plan(
        LLAMA, "policy.model_name=meta-llama/Llama-3.1-70B", "cluster.num_nodes=128", "policy.refit_buffer_size_gb=6",
        f"{AT}tensor_model_parallel_size=8", f"{AT}pipeline_model_parallel_size=4", f"{AT}sequence_parallel=true",
        "policy.generation.vllm_cfg.tensor_parallel_size=4",
    )  # fmt: skip
    assert found.load.world == 1024 and found.fits
    assert len(found.stages) == 4 and sum(len(layers) for layers in found.load.layers) == 80
    # Over TP and PP the model is there once; the norms, two a layer and the last one, are on every TP rank.
    held = 8 * sum(found.load.params(stage).numel for stage in range(4))
    assert held == 70_553_706_496 + 7 * (2 * 80 + 1) * 8192


def test_stages_and_ranks_are_those_of_the_mesh() -> None:
    load = plan(LLAMA, f"{AT}tensor_model_parallel_size=2").load
    for stage in range(load.layout.pipeline):
        assert all(load.layout.coordinates(rank).pipeline == stage for rank in ranks_of(load, stage))


def test_the_optimizer_is_split_over_data_parallel_ranks_without_rest() -> None:
    load = plan(LLAMA).load
    total = sum(optimizer_bytes(load, 0, load.layout.coordinates(rank)) for rank in range(8))
    assert total == 12 * load.params(0).numel


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["policy.sequence_packing.train_mb_tokens=65536"], "activation_checkpointing: true"),
        (["policy.generation.vllm_cfg.gpu_memory_utilization=0.95"], "gpu_memory_utilization (now 0.95)"),
        (["policy.generation.vllm_cfg.kv_cache_memory_gb=0.1"], "cannot hold one sample of 4,096 tokens"),
        (["policy.refit_buffer_size_gb=0.00001"], "no refit: "),
        (["policy.generation.num_engines=3"], "the engines use 3 of 16 accelerators"),
    ],
)
def test_what_does_not_fit_names_the_key(overrides: list[str], words: str) -> None:
    found = plan(LLAMA, *overrides)
    assert any(words in warning for warning in found.warnings), found.warnings
    assert found.fits == ("num_engines" in overrides[0])


AHEAD = ("grpo.async_grpo={enabled: true}", "loss_fn.use_importance_sampling_correction=true")


def test_engines_that_generate_ahead_keep_their_memory_while_the_policy_trains() -> None:
    phases = {name: plan(LLAMA, *words).stages[0].phases[-1] for name, words in (("sync", ()), ("ahead", AHEAD))}
    engine = plan(LLAMA).engine
    more = phases["ahead"].total - phases["sync"].total
    assert phases["ahead"].name == "training" and more > engine.weights + engine.kv_cache
    found = plan(LLAMA, *AHEAD)
    assert not found.fits and any("gpu_memory_utilization (now" in warning for warning in found.warnings)


def test_engines_with_a_pool_of_their_own_take_nothing_of_the_policys_devices() -> None:
    pool = "policy.generation.colocated={enabled: false, resources: {num_nodes: 1}}"
    found = plan(LLAMA, *AHEAD, "cluster.num_nodes=3", pool)
    assert (found.load.world, found.load.engines, found.load.nodes) == (16, 8, 2) and found.fits
    assert [phase.name for phase in found.stages[0].phases][0] == "refit"
    assert not any(part.startswith(("engine", "KV")) for phase in found.stages[0].phases for part in phase.parts)
    assert found.refit is not None and found.refit.to_other_nodes == found.refit.tensor_bytes


def test_a_pipeline_that_waits() -> None:
    found = plan(LLAMA, f"{AT}pipeline_model_parallel_size=16", "policy.train_global_batch_size=16")
    assert found.times.bubble == pipeline_bubble(16, 8) == 15 / 23
    assert any("the pipeline waits 65%" in warning for warning in found.warnings)


def test_a_smaller_device_does_not_fit_and_a_larger_one_does() -> None:
    assert not plan(LLAMA, memory_gb=40).fits
    assert plan(LLAMA, device="H200").fits


def test_recomputing_trades_memory_for_time() -> None:
    kept, again = plan(LLAMA), plan(LLAMA, f"{AT}activation_checkpointing=true")
    assert again.stages[0].phases[-1].parts["activations"] < kept.stages[0].phases[-1].parts["activations"] / 5
    assert again.times.phases[-1].flops == pytest.approx(kept.times.phases[-1].flops * 4 / 3)


def test_the_search_gives_layouts_that_fit_fastest_first() -> None:
    found = plan(LLAMA)
    options = search(found.load, found.device, nodes=4)
    assert options and [option.seconds for option in options] == sorted(option.seconds for option in options)
    for option in options:
        tried = plan(LLAMA, *option.overrides)
        assert tried.fits and tried.load.world == 32
        assert option.reason and option.overrides[-1] == "cluster.num_nodes=4"
    assert "cluster.num_nodes=4" in search_text(options, 4)
    assert search(found.load, replace(found.device, memory=8 * 10**9), nodes=1) == []
    assert "no layout fits" in search_text([], 1)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((LLAMA, "policy.model_name=someone/unknown"), 1, "--config-json PATH"),
        (
            (LLAMA, f"{AT}tensor_model_parallel_size=16", "cluster.num_nodes=4"),
            1,
            "does not divide num_key_value_heads 8",
        ),
        ((LLAMA, "--device", "H900"), 1, "known are A100-40GB"),
        ((LLAMA, "policy.dtensor_cfg.enabled=true", "policy.fsdp1_enabled=true"), 2, "2 problems"),
    ],
)
def test_what_cannot_be_planned_is_one_message(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, message: str
) -> None:
    words = tuple(f"+{word}" if "dtensor" in word or "fsdp" in word else word for word in words)
    assert main(["plan", *words]) == code
    assert message in capsys.readouterr().err


def test_a_config_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 32}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 131}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = main(["plan", LLAMA, "policy.model_name=mine", "--config-json", str(tmp_path / "config.json"), "--json"])
    assert json.loads(capsys.readouterr().out)["fits"] and code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["context_parallel_size=2"], "context_parallel_size 2: no plan of such a layout yet; only of 1"),
        (
            ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"],
            "virtual_pipeline_model_parallel_size 2: no plan of such a layout yet; only of 1",
        ),
    ],
)
def test_layouts_without_numbers_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(FamilyError, match=f"{AT}{message}"):
        plan(LLAMA, *(AT + word for word in words))


def test_families_without_numbers_are_refused() -> None:
    config = load_recipe(LLAMA).config
    shape = replace(plan_shape(config), experts=ExpertShape(count=4, active=2, ffn_hidden_size=64))
    with pytest.raises(FamilyError, match="policy.model_name: no plan of a llama model yet; only of dense ones"):
        make_plan(config, shape, plan_device(config, None, None))
