"""`grpo-mcore plan`: every recipe, a thousand GPUs, the search, and warnings about layouts that do not fit."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.cli.main import main
from grpo_mcore.driver.record.run_report import MeasuredRun
from grpo_mcore.families import FamilyError, forward_flops, parameter_count, shape_of
from grpo_mcore.families.activations import layer_bytes
from grpo_mcore.families.known import known_configs
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.recipe import MasterConfig, load_recipe
from grpo_mcore.recipe.schema.master import value_at
from grpo_mcore.refit.plan.delivery import Deliveries, readers_by_node
from grpo_mcore.refit.plan.plan import plan_model_refit
from grpo_mcore.tools.plan.measured import compare
from grpo_mcore.tools.plan.memory import CLOSE, engine_parts, fits_device, memory, node_memory, optimizer_bytes
from grpo_mcore.tools.plan.plan_text import plan_text, search_text
from grpo_mcore.tools.plan.rank_params import rank_params
from grpo_mcore.tools.plan.run_hours import checkpoint_bytes, run_text
from grpo_mcore.tools.plan.run_plan import Plan, make_plan, plan_device, plan_shape, plan_workload, ranks_of
from grpo_mcore.tools.plan.search import EQUAL, SHARES, least_bytes, saved_layout, search, stage_splits, total_nodes
from grpo_mcore.tools.plan.timing import (
    HOST_BANDWIDTH,
    LINK_EFFICIENCY,
    MEMORY_EFFICIENCY,
    NETWORK_ALL_REDUCE_S,
    all_reduce_seconds,
    check_refit,
    decoding_step,
    generation_time,
    pipeline_bubble,
    step_time,
)
from grpo_mcore.tools.plan.workload import DEVICES, Device, PlanError, Workload

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "presets"
)
DEEPSEEK = "recipes/grpo-deepseekv3-32n8g.yaml"
LLAMA = "recipes/grpo-llama3.1-8B-2n8g.yaml"
AT = "policy.megatron_cfg."
MOVES = "policy.offload_optimizer_for_generation=true"


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@cache
def config_of(recipe: str, *overrides: str) -> MasterConfig:
    return load_recipe(recipe, overrides).config


@cache
def plan(
    recipe: str,
    *overrides: str,
    device: str | None = None,
    memory_gb: float | None = None,
    mean_length: int | None = None,
) -> Plan:
    config = config_of(recipe, *overrides)
    return make_plan(config, plan_shape(config), plan_device(config, device, memory_gb), mean_length=mean_length)


def test_longer_rows_of_the_logprob_passes_need_memory() -> None:
    rows = {}
    for capacity in (4096, 8192):
        packing = "policy.sequence_packing."
        found = plan(LLAMA, f"{packing}train_mb_tokens=4096", f"{packing}logprob_mb_tokens={capacity}")
        rows[capacity] = {phase.name: phase.parts["activations"] for phase in found.stages[0].phases[-3:-1]}
    assert rows[8192]["log-probs"] == pytest.approx(2 * rows[4096]["log-probs"], rel=1e-3)
    assert rows[8192]["training"] == rows[4096]["training"]


def test_a_critic_has_weights_gradients_and_an_optimizer_beside_the_policys() -> None:
    alone = plan(LLAMA)
    both = plan(LLAMA, "ppo.critic_epochs=2", "value.megatron_cfg.freeze_attention=true")
    training = {phase.name: phase.parts for phase in both.stages[0].phases}["training"]
    assert training["critic's weights"] == training["weights"]  # of a stage without a head
    assert 0 < training["critic's gradients"] < training["gradients"]
    assert 0 < training["critic's optimizer"] < training["optimizer"]
    last = {phase.name: phase.parts for phase in both.stages[1].phases}["training"]
    assert last["critic's weights"] == last["weights"] - 2 * 4096 * (128256 - 1)
    seconds = {phase.name: phase.likely for phase in both.times.phases}
    assert seconds["critic"] > seconds["training"]
    assert both.times.likely == pytest.approx(alone.times.likely + seconds["critic"], rel=0.05)
    assert "critic      llama, 7.5 B parameters" in plan_text(both)


def test_greedy_baselines_are_generated_and_not_trained_on() -> None:
    plain, remax = (plan(LLAMA, f"defaults=presets/{name}") for name in ("grpo", "remax"))
    flops, of_remax = ({phase.name: phase.flops for phase in it.times.phases} for it in (plain, remax))
    assert of_remax["training"] == flops["training"] * 31 / 32
    assert of_remax["generation"] == flops["generation"]
    assert "= 2048 samples (64 greedy, not trained on) = " in plan_text(remax)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in RECIPES if "variants" not in name])  # which are one recipe's
def test_every_recipe_has_a_plan(recipe: str) -> None:
    found = plan(recipe)
    text = plan_text(found)
    json.dumps(found.plain())
    for word in ("batch", "layout", "memory of a rank", "training", "bottleneck", "verdict"):
        assert word in text
    assert found.fits, found.warnings
    assert found.times.bubble < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "model", "device", "count", "adapters"),
    [
        ("grpo-qwen2.5-3B-1n1g-lora", None, "RTX4090", 1, True),
        ("grpo-qwen2.5-3B-1n1g-lora", "Qwen/Qwen2.5-1.5B", "RTX4090", 1, True),
        ("grpo-qwen3-8B-1n1g-lora", None, "A100", 1, True),
        ("grpo-qwen2.5-3B-1n1g", None, "RTX4090", 1, False),
        ("grpo-qwen2.5-3B-1n1g", "Qwen/Qwen2.5-1.5B", "RTX4090", 1, False),
        ("grpo-qwen3-8B-1n1g", None, "A100", 1, False),
        ("grpo-qwen3-8B-1n2g", None, "A100", 2, False),
        ("grpo-qwen3-8B-1n4g", None, "A100", 4, False),
        ("grpo-qwen3-32B-1n8g", None, "A100", 8, False),
        ("grpo-qwen3-32B-1n4g-lora", None, "A100", 4, True),
        ("grpo-qwen3-32B-2n8g", None, "H100", 16, False),
    ],
)
def test_there_is_a_recipe_for_every_row_of_the_memory_table(
    recipe: str, model: str | None, device: str, count: int, adapters: bool
) -> None:
    """Models of 1 to 3 B on 24 GB, of 7 to 8 B on one card of 80 GB, of 32 B on four, with adapters or all weights."""
    found = plan(recipe, *([f"policy.model_name={model}"] if model else []), device=device)
    assert found.fits and found.load.world == count and (found.load.adapters is not None) == adapters
    assert not any("close to the limit" in warning for warning in found.warnings), found.warnings
    assert not plan(recipe, "policy.megatron_cfg.peft.enabled=false", device=device).fits or not adapters


@pytest.mark.parametrize(
    ("recipe", "device"),
    [
        ("grpo-qwen2.5-3B-1n1g", "RTX4090"),
        ("grpo-qwen3-8B-1n1g", "A100"),
        ("grpo-qwen3-8B-1n2g", "A100"),
        ("grpo-qwen3-32B-1n8g", "A100"),
    ],
)
def test_a_recipe_for_all_weights_on_few_cards_needs_its_optimizer(recipe: str, device: str) -> None:
    keys = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
    assert not plan(recipe, *(f"{AT}optimizer.{key}=false" for key in keys), device=device).fits
    if recipe == "grpo-qwen3-32B-1n8g":
        assert plan(recipe, "cluster.gpus_per_node=4", device=device).fits


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("aware", [False, True])
def test_an_optimizers_bytes_are_on_the_device_or_on_the_host(share: float, aware: bool) -> None:
    """A weight has 12 bytes of float32 values, on the host 4 more for its gradient; a copy of a bfloat16 gradient takes
    4 on the device. Qwen3-8B over two ranks, in one copy."""
    found = plan(
        "grpo-qwen3-8B-1n2g", f"{AT}optimizer.use_precision_aware_optimizer={aware}",
        f"{AT}optimizer.optimizer_cpu_offload={share > 0}", f"{AT}optimizer.optimizer_offload_fraction={share}",
    )  # fmt: skip
    each = found.load.params(0).owned(found.load.layout, None)
    assert each == pytest.approx(8_190_735_360 / 2, rel=1e-3)
    (stage,), kept = found.stages, {phase.name: phase for phase in found.stages[0].phases}
    assert kept["training"].parts["optimizer"] == int(12 * each * (1 - share))
    copies = 0 if aware and not share else int(4 * each * (1 - share))
    if share:  # and one copy on its way to the host: of the embeddings' gradient
        copies += 4 * 151_936 * 4096 // 2
    assert kept["optimizer"].parts["temporaries"] == copies
    assert stage.host.parts.get("updated there", 0) == int(16 * each * share)
    assert stage.host.parts.get("optimizer, while engines generate", 0) == int(12 * each * (1 - share))


def test_an_update_on_the_host_takes_time() -> None:
    """A gradient of 4 bytes to the host and a weight of 2 back, at 55 GB/s; 28 bytes in the host's memory, at 200."""
    key, each = f"{AT}optimizer.optimizer_cpu_offload", 8_190_735_360
    here, there = (plan("grpo-qwen3-8B-1n1g", f"{key}={on}").times.phases[-1] for on in ("false", "true"))
    expected = (6 / 55e9 + 28 / 200e9) * each / 0.8
    assert there.likely - here.likely == pytest.approx(expected, rel=1e-3)
    assert plan("grpo-qwen3-8B-1n1g", device="cpu").fits


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_name_gives_its_model_size_and_nodes(recipe: str) -> None:
    """30BA3B: billions of parameters, and those that a token passes. 4n8g: nodes, and GPUs of each."""
    config, name = config_of(recipe), Path(recipe).stem
    if size := re.search(r"-(\d+)B", name):
        assert parameter_count(plan_shape(config)) / 1e9 == pytest.approx(float(size[1]), rel=0.1)
    if active := re.search(r"\d+BA(\d+)B", name):
        assert forward_flops(plan_shape(config), [1]) / 2e9 == pytest.approx(float(active[1]), rel=0.2)
    if nodes := re.search(r"-(\d+)n(\d+)g", name):
        assert (config.cluster.num_nodes, config.cluster.gpus_per_node) == (int(nodes[1]), int(nodes[2]))
    assert config.cluster.num_nodes == 1 or nodes


@pytest.mark.slow
@pytest.mark.parametrize("command", [["plan", "grpo_math_1B", "--json"], ["refit", "plan", LLAMA]])
def test_a_plan_imports_none_of_the_large_libraries(command: list[str]) -> None:
    program = (
        f"import sys; from grpo_mcore.cli.main import main; code = main({command}); print("
        "[n for n in ('torch', 'megatron', 'vllm', 'ray', 'transformers') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    assert command[0] == "refit" or json.loads(done.stdout)["parameters"] == 1_543_714_304


def test_a_thousand_gpus() -> None:
    found = plan(
        LLAMA, "policy.model_name=meta-llama/Llama-3.1-70B", "cluster.num_nodes=128", "policy.refit_buffer_size_gb=6",
        f"{AT}tensor_model_parallel_size=8", f"{AT}pipeline_model_parallel_size=4", f"{AT}sequence_parallel=true",
        "policy.generation.vllm_cfg.tensor_parallel_size=4",
    )  # fmt: skip
    assert found.load.world == 1024 and found.fits
    assert len(found.stages) == 4 and sum(len(layers) for layers in found.load.layers) == 80
    # TP and PP hold the model once; the norms, two a layer and the last one, are on every TP rank.
    held = 8 * sum(found.load.params(stage).numel for stage in range(4))
    assert held == 70_553_706_496 + 7 * (2 * 80 + 1) * 8192


def test_stages_and_ranks_are_those_of_the_mesh() -> None:
    load = plan(LLAMA, f"{AT}tensor_model_parallel_size=2").load
    for stage in range(load.layout.pipeline):
        assert all(load.layout.coordinates(rank).pipeline == stage for rank in ranks_of(load, stage))


def test_the_optimizer_is_split_over_data_parallel_ranks_without_remainder() -> None:
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
def test_a_plan_that_does_not_fit_names_the_key(overrides: list[str], words: str) -> None:
    found = plan(LLAMA, *overrides)
    assert any(words in warning for warning in found.warnings), found.warnings
    assert found.fits == ("num_engines" in overrides[0])


AHEAD = ("grpo.async_grpo={enabled: true}", "loss_fn.use_importance_sampling_correction=true")


@pytest.mark.slow
def test_each_node_of_an_engine_gets_the_bytes_that_it_reads() -> None:
    """Compare with the delivery of every block, and with the same engines on nodes four times as large."""
    found = plan(DEEPSEEK)
    load, refit = found.load, found.refit
    assert refit is not None and (load.engine_layout.nodes, load.engines) == (4, 8)
    trainer = PolicyLayout(8, 16, 2, 1, 16, 1, first_layers=4, last_layers=1)
    engine = EngineLayout(32, expert_parallel=True)
    moved = plan_model_refit(load.shape, trainer, engine, dtype="bfloat16", buffer_bytes=load.refit_buffer)
    node_of_rank = [rank // 8 for rank in range(256)]
    deliveries = Deliveries(
        moved, node_of_rank, readers_by_node([range(first, first + 4) for first in range(0, 32, 4)], 32)
    )
    over_the_wire = [0] * 32
    for block in moved.blocks():
        for node, sender in deliveries.of(block):
            over_the_wire[node] += block.nbytes * (node_of_rank[sender] != node)
    assert refit.to_other_nodes == max(over_the_wire)
    assert refit.to_other_nodes < 0.3 * refit.tensor_bytes
    whole = plan(DEEPSEEK, "cluster.num_nodes=8", "cluster.gpus_per_node=32").refit
    assert whole is not None and whole.tensor_bytes == refit.tensor_bytes and whole.read == refit.read


def test_a_refit_of_adapters_moves_their_bytes_alone() -> None:
    """Every linear layer of Qwen2.5-3B: rank x (inputs + outputs), where query, key and value share one input side."""
    recipe, key = "grpo-qwen2.5-3B-1n1g-lora", "policy.megatron_cfg.peft.refit"
    merged, alone = (plan(recipe, f"{key}={kind}", device="RTX4090") for kind in ("merged", "adapters"))
    assert merged.refit is not None and alone.refit is not None and alone.load.adapters is not None
    assert merged.refit.tensor_bytes == merged.refit.merged == alone.refit.merged == 2 * 3_085_938_688
    hidden, kv, wide = 2048, 2 * 128, 11_008
    sides = [hidden, hidden + 2 * kv, hidden, hidden, hidden, 2 * wide, wide, hidden]
    assert alone.refit.tensor_bytes == alone.refit.read == 2 * 36 * alone.load.adapters.rank * sum(sides)
    assert merged.refit.adapters == alone.refit.adapters == alone.refit.tensor_bytes
    assert "peft.refit: adapters" in plan_text(alone) and "peft.refit: merged" in plan_text(merged)
    full = plan("grpo_math_1B").refit
    assert full is not None and full.adapters is None


@pytest.mark.every_state
def test_the_search_includes_the_recipes_own_layout() -> None:
    found = plan(DEEPSEEK)
    (option,) = [it for it in search(found.load, found.device, nodes=32).candidates if it.own]
    again = plan(DEEPSEEK, *option.overrides)
    assert again.load.layout == found.load.layout and again.load.engine_layout.nodes == 4 and again.fits


def test_an_engines_quantised_weights_have_a_byte_and_a_share_of_a_scale() -> None:
    vllm = "policy.generation.vllm_cfg."
    words = [vllm + "precision=fp8", "loss_fn.use_importance_sampling_correction=true"]
    cases = ([], words, [*words, vllm + "is_mx=true"], [*words, vllm + "fp8_per_channel=true"])
    cases += ([*words, vllm + "num_last_layers_in_bf16=18"],)
    found = [plan("grpo-qwen3-8B-1n4g", vllm + "tensor_parallel_size=1", *more) for more in cases]
    whole, blocks, mx, channels, kept = (it.engine.weights for it in found)
    shape = found[0].load.shape
    vocabulary = 2 * 2 * shape.padded_vocab_size(1) * shape.hidden_size  # embeddings and head
    assert blocks - vocabulary == pytest.approx((whole - vocabulary) * (1 + 4 / 128**2) / 2, rel=1e-3)
    assert mx - vocabulary == pytest.approx((whole - vocabulary) * (1 + 1 / 32) / 2, rel=1e-3)
    assert channels - vocabulary == pytest.approx((whole - vocabulary) * (1 + 4 / shape.hidden_size) / 2, rel=1e-3)
    assert kept - blocks == pytest.approx((whole - blocks) / 2, rel=1e-3)
    apart = [*words, *("policy.generation.colocated." + key for key in ("enabled=false", "resources.gpus_per_node=2"))]
    divided = [plan("grpo-qwen3-8B-1n4g", *apart, *more) for more in cases[1:4:2]]
    rows = 2 * 36 * shape.hidden_size * (shape.num_heads * shape.head_dim + shape.ffn_hidden_size) // 2
    assert divided[1].engine.receiver - divided[0].engine.receiver == rows  # wait in bfloat16 for the commit
    seconds = [it.refit.seconds(it.load, it.device) for it in found[:2]]
    assert seconds[1] - seconds[0] == pytest.approx(3 * found[1].refit.read / found[1].device.memory_bandwidth)


def test_an_engine_that_applies_adapters_has_them_four_times() -> None:
    recipe = "grpo-nanov3-30BA3B-2n8g-lora"
    merged, without, every = (
        plan(recipe, *(AT + key for key in keys))
        for keys in ([], ["peft.refit=adapters"], ["peft.refit=adapters", "peft.exclude_modules=[]"])
    )
    assert merged.engine.adapters == 0
    assert without.engine.adapters == 4 * without.refit.adapters
    assert every.engine.adapters == 4 * every.refit.adapters > 10 * without.engine.adapters  # with those of experts


def test_an_engine_apart_collects_its_largest_layer_before_it_quantises_it() -> None:
    apart = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}"
    words = [apart, "policy.generation.vllm_cfg.precision=fp8", "loss_fn.use_importance_sampling_correction=true"]
    whole, quantised = (plan("grpo-qwen3-8B-1n4g", *more) for more in ([apart], words))
    shape, ranks = whole.load.shape, whole.load.engine_layout.tensor
    gate_up = 2 * 2 * shape.ffn_hidden_size * shape.hidden_size // ranks
    assert quantised.engine.receiver - whole.engine.receiver == gate_up


NOT_FIRST = {  # docs/plan_and_doctor.md has the reasons
    "grpo-qwen3-30BA3B-4n8g": "experts over EP 8",
    "grpo-qwen3.5-35BA3B-4n8g": "experts over EP 8",
    "grpo-qwen3-30BA3B-4n8g-fp8-rollouts": "experts over EP 8",
    "grpo-qwen3-30BA3B-4n8g-async-1off": "generates and trains at the same time",
}


def searched() -> list[Any]:
    """Return the recipes whose layouts are searched; those with experts on many nodes take longest."""
    names = [recipe for recipe in RECIPES if re.search(r"-[1-8]n\d+g", recipe)]
    often = {name for name in names if re.search(r"-\d+B-|nanov3-30BA3B-2n8g\.yaml", name)}
    return [name if name in often else pytest.param(name, marks=pytest.mark.every_state) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", searched())
def test_a_shipped_recipe_is_the_searchs_first_or_the_reason_is_said(recipe: str) -> None:
    found = plan(recipe, device="RTX4090" if "-3B-1n1g" in recipe else "H100")
    options = search(found.load, found.device, total_nodes(found.load)).candidates
    assert [it.seconds for it in options] == sorted(it.seconds for it in options)
    (own,) = [option for option in options if option.own]
    assert (own.seconds <= EQUAL * options[0].seconds) == (Path(recipe).stem not in NOT_FIRST), options[0]


@pytest.mark.parametrize(
    ("ranks", "nbytes", "measured"),
    [(2, 4096, 8.8e-6), (8, 4096, 9.3e-6), (2, 2**20, 26.6e-6), (4, 2**20, 40.2e-6), (8, 2**20, 45.0e-6)],
)
def test_all_reduces_of_engines_take_what_was_measured(ranks: int, nbytes: int, measured: float) -> None:
    """vLLM's kernel on H100, as published in sgl-project/sglang#2904."""
    assert all_reduce_seconds(ranks, nbytes, DEVICES["H100"].peer_bandwidth) == pytest.approx(measured, rel=0.3)


@pytest.mark.slow
def test_small_micro_batches_take_the_time_of_weights_and_launches() -> None:
    """Each micro-batch reads the rank's weights three times, and its float32 gradients once with a write."""
    found = plan(DEEPSEEK)
    training = next(phase for phase in found.times.phases if phase.name == "training")
    assert training.bound == "weights and gradients, read for each micro-batch"
    parts = max((stage.phases[-1].parts for stage in found.stages), key=lambda parts: parts["weights"])
    read = 128 * (3 * parts["weights"] + 2 * parts["gradients"]) / found.device.memory_bandwidth
    assert training.likely * (1 - found.times.bubble) > read / 0.6
    large = plan(DEEPSEEK, "policy.sequence_packing.train_mb_tokens=24576")  # 8 micro-batches
    assert next(phase for phase in large.times.phases if phase.name == "training").bound != training.bound
    keys = (AT + "tensor_model_parallel_size=4", "policy.sequence_packing.logprob_mb_tokens=4096")
    thin = plan("recipes/grpo-qwen3-30BA3B-4n8g.yaml", *keys, "policy.sequence_packing.train_mb_tokens=4096")
    assert {phase.name: phase.bound for phase in thin.times.phases}["log-probs"] == "kernel launches"


def test_engines_that_generate_ahead_keep_their_memory_while_the_policy_trains() -> None:
    phases = {name: plan(LLAMA, *words).stages[0].phases[-2] for name, words in (("sync", ()), ("ahead", AHEAD))}
    engine = plan(LLAMA).engine
    more = phases["ahead"].total - phases["sync"].total
    assert phases["ahead"].name == "training" and more > engine.weights + engine.kv_cache
    found = plan(LLAMA, *AHEAD)
    assert not found.fits and any("gpu_memory_utilization (now" in warning for warning in found.warnings)


def test_images_take_a_tower_and_the_features_of_each_prompts_image() -> None:
    """Where a layer takes them: here on the first stage and, of two layers with the deepstack's three, the second."""
    text = plan("grpo-math-8B").load
    load = replace(text, shape=shape_of(known_configs()["Qwen3-VL-8B"]), images=16)
    layout = replace(load.layout, tensor=1, pipeline=2, data=4)
    vision, device = load.shape.vision, DEVICES["H100"]
    assert vision is not None
    for first, seen in ((2, [True, True]), (18, [True, False])):
        of_text, of_images = (
            memory(replace(it, layout=replace(layout, first_layers=first)), device)
            for it in (replace(load, images=0), load)
        )
        assert of_images[0].weights - of_text[0].weights == 2 * vision.parameters // load.engine_layout.tensor
        for before, stage, takes in zip(of_text[1], of_images[1], seen, strict=True):
            more = {phase.name: phase.parts.get("features of images", 0) for phase in stage.phases}
            expected = 16 * 1024 * 4096 * 4 * 2 if takes else 0
            assert more["training"] == more["log-probs"] == expected and not more["generation"]
            assert stage.host.total - before.host.total == (2 * vision.parameters if takes else 0)


def test_engines_with_their_own_pool_take_no_memory_of_the_policys_devices() -> None:
    pool = "policy.generation.colocated={enabled: false, resources: {num_nodes: 1}}"
    found = plan(LLAMA, *AHEAD, "cluster.num_nodes=3", pool)
    assert (found.load.world, found.load.engines, found.load.nodes) == (16, 8, 2) and found.fits
    assert [phase.name for phase in found.stages[0].phases][0] == "refit"
    assert not any(part.startswith(("engine", "KV")) for phase in found.stages[0].phases for part in phase.parts)
    assert found.refit is not None and found.refit.to_other_nodes == found.refit.tensor_bytes


def test_a_large_pipeline_bubble_is_a_warning() -> None:
    found = plan(LLAMA, f"{AT}pipeline_model_parallel_size=16", "policy.train_global_batch_size=16")
    assert found.times.bubble == pipeline_bubble(16, 8) == 15 / 23
    assert any("the pipeline waits 65%" in warning for warning in found.warnings)


def test_a_smaller_device_does_not_fit_and_a_larger_one_does() -> None:
    assert not plan(LLAMA, memory_gb=40).fits
    assert plan(LLAMA, device="H200").fits


def test_recomputation_trades_memory_for_time() -> None:
    kept, again = plan(LLAMA), plan(LLAMA, f"{AT}activation_checkpointing=true")
    assert again.stages[0].phases[-2].parts["activations"] < kept.stages[0].phases[-2].parts["activations"] / 5
    assert again.times.phases[-1].flops == pytest.approx(kept.times.phases[-1].flops * 4 / 3)


def test_shared_prompts_are_computed_once() -> None:
    lengths = ["policy.max_total_sequence_length=8832", "policy.generation.max_new_tokens=640"]
    lengths += ["policy.sequence_packing.train_mb_tokens=16384"]
    whole = plan(LLAMA, *lengths, mean_length=8832)
    once = plan(LLAMA, *lengths, "policy.sequence_packing.shared_prefix.enabled=true", mean_length=8832)
    assert whole.load.computed == 1.0 and (once.load.sharing, once.load.group) == (12, 32), "a bin has room for 12"
    assert once.load.computed == pytest.approx((640 + 8192 / 12) / 8832)
    training, generation = once.times.phases[-1], once.times.phases[1]
    assert once.load.computed < training.flops / whole.times.phases[-1].flops < 1.3 * once.load.computed  # attention
    assert generation == whole.times.phases[1], "an engine has its own prefix cache"
    assert once.load.micro_batches < whole.load.micro_batches
    assert "of their tokens are computed, if prompts have 8,192: once for" in plan_text(once)


@pytest.mark.parametrize(("device", "shares"), [("cpu", True), ("H100", False)])
def test_plan_and_run_share_prefixes_on_the_same_platforms(device: str, shares: bool) -> None:
    assert (plan(LLAMA, device=device).load.group > 1) == shares, "shared_prefix.enabled is null"


def test_prefixes_that_are_shared_on_request_are_computed_by_our_attention() -> None:
    """So the run does it, also where TransformerEngine is installed: more is kept, sines and cosines among it."""
    fused, ours = plan(LLAMA), plan(LLAMA, "policy.sequence_packing.shared_prefix.enabled=true")
    assert (fused.load.rank.attention, ours.load.rank.attention) == ("transformer_engine", "torch")
    assert ours.load.rank.kernels == "transformer_engine"
    more = [layer_bytes(found.load.shape, found.load.rank, 1.0, length=1.0) for found in (fused, ours)]
    assert more[1] - more[0] == 4 * 2 * fused.load.shape.head_dim


def test_windows_need_our_attention_over_context_parallel_ranks() -> None:
    keys = [f"{AT}context_parallel_size=2", "policy.model_name=gemma-3-1b"]
    with pytest.raises(FamilyError, match="no attention kernel for windows of keys"):
        plan(LLAMA, *keys)
    assert plan(LLAMA, *keys, "policy.sequence_packing.shared_prefix.enabled=true").load.layout.context == 2


def seconds_of(found: Plan) -> dict[str, float]:
    return {phase.name: phase.likely for phase in found.times.phases}


def test_a_step_that_waits_for_its_longest_samples_takes_their_passes() -> None:
    """Beyond those of the mean sample they read the weights for ever fewer samples."""
    waits, goes_on = plan("grpo-nanov3-30BA3B-2n8g"), plan("grpo-nanov3-30BA3B-2n8g-async-1off")
    assert waits.load.waits_for_longest and not goes_on.load.waits_for_longest
    load, engine, device = waits.load, waits.engine, waits.device
    assert load.samples / load.engines <= min(256, engine.sequences(load.mean_length) or 0), "all at once"
    more = load.max_length - load.mean_length  # passes
    reduced = 52 * all_reduce_seconds(8, 2 * load.shape.hidden_size, device.peer_bandwidth)
    slower = seconds_of(waits)["generation"] - seconds_of(goes_on)["generation"]
    assert slower == pytest.approx(more * (engine.weights / device.memory_bandwidth / MEMORY_EFFICIENCY + reduced))
    shorter = plan("grpo-nanov3-30BA3B-2n8g", mean_length=load.max_length // 4)
    assert "the longest samples" in {phase.bound for phase in shorter.times.phases}
    longest = plan("grpo-nanov3-30BA3B-2n8g", mean_length=load.max_length)
    assert "the longest samples" not in {phase.bound for phase in longest.times.phases}


def test_what_moves_to_the_host_and_back_takes_time() -> None:
    """The optimizer of eight ranks at once; engines drop their weights, unless the refit brings adapters alone."""
    found = plan("grpo-nanov3-30BA3B-2n8g", MOVES)
    moved = 2 * optimizer_bytes(found.load, 0)
    assert seconds_of(found)["offload, sleep"] == pytest.approx(moved / (HOST_BANDWIDTH / 8) / LINK_EFFICIENCY)
    adapters = plan("grpo-nanov3-30BA3B-2n8g-lora", f"{AT}peft.refit=adapters", MOVES)
    moved = 2 * (optimizer_bytes(adapters.load, 0) + sum(adapters.engine.woken.values()))
    assert seconds_of(adapters)["offload, sleep"] == pytest.approx(moved / (HOST_BANDWIDTH / 8) / LINK_EFFICIENCY)
    assert "offload, sleep" not in seconds_of(plan(LLAMA, *AHEAD)), "engines that stay take nothing from the policy"


def test_an_optimizer_that_stays_takes_memory_in_place_of_time() -> None:
    """On the device in every phase, and nowhere on the host. What brings it back is said."""
    moves, stays = plan("grpo-nanov3-30BA3B-2n8g", MOVES), plan("grpo-nanov3-30BA3B-2n8g")
    each = optimizer_bytes(stays.load, 0)
    assert all(phase.parts["optimizer"] == each for phase in stays.stages[0].phases)
    before, after = ({phase.name: phase.total for phase in found.stages[0].phases} for found in (moves, stays))
    more = {name: after[name] - before[name] for name in before}
    assert more == {"refit": each, "generation": each, "log-probs": 0, "training": 0, "optimizer": 0}
    assert "offload, sleep" not in seconds_of(stays) and moves.node_memory - stays.node_memory == 8 * each
    (staying,) = (it for it in moves.suggestions if it.startswith("policy.offload_optimizer_for_generation: false"))
    assert f"{stays.times.likely:.3g} s a step" in staying
    too_large = plan("grpo-nanov3-30BA3B-2n8g", MOVES, memory_gb=72)
    assert too_large.fits and not any("offload_optimizer" in it for it in too_large.suggestions)


def test_a_synchronous_plan_says_what_going_one_step_ahead_brings() -> None:
    for recipe in ("grpo-nanov3-30BA3B-2n8g", "grpo-qwen3-30BA3B-4n8g"):
        found, sibling = plan(recipe), plan(f"{recipe}-async-1off")
        (ahead,) = found.suggestions
        seconds = re.search(r": ([\d.]+) s a step", ahead)
        assert ahead.startswith("one step ahead") and seconds is not None
        assert float(seconds[1]) == pytest.approx(sibling.times.likely, rel=0.01)
        assert not sibling.suggestions


GPU_RECIPES = [recipe for recipe in RECIPES if "cpu" not in recipe and "variants" not in recipe]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", GPU_RECIPES)
def test_an_engines_parts_add_up_to_its_share_of_the_device(recipe: str) -> None:
    found = plan(recipe)
    load, engine, device = found.load, found.engine, found.device
    if not load.grpo or device.memory is None:
        return
    assert engine.sampler == load.max_sequences * 4 * (load.shape.vocab_size + -(-load.shape.vocab_size // 32))
    parts = engine_parts(load, device, engine, "generation") if load.colocated else {}
    for phase in found.stages[0].phases:
        assert phase.total == sum(phase.parts.values())
        if phase.name == "generation":
            assert parts.items() <= phase.parts.items()
    if parts and load.kv_cache is None:
        assert sum(parts.values()) == int(load.engine_share * device.memory)


def test_more_requests_at_a_time_leave_less_cache() -> None:
    key = "policy.generation.vllm_cfg.max_num_seqs"
    few, many = (plan("grpo-qwen3-30BA3B-4n8g", f"{key}={count}").engine for count in (256, 1024))
    assert few.kv_cache - many.kv_cache == many.sampler - few.sampler == 768 * 4 * (151_936 + 4748)


def test_states_are_read_and_written_in_decoding() -> None:
    found = plan("grpo-nanov3-30BA3B-2n8g")
    load, engine, device = found.load, found.engine, found.device
    without = replace(engine, state_bytes=0)
    more = decoding_step(load, device, engine, 256, 1e5) - decoding_step(load, device, without, 256, 1e5)
    assert more == pytest.approx(2 * 256 * engine.state_bytes / device.memory_bandwidth / MEMORY_EFFICIENCY)
    assert engine.state_bytes == 23 * (64 * 64 * 128 * 4 + (4096 + 2 * 8 * 128) * 3 * 2) // 8


def test_a_refit_over_the_network_takes_memory_of_an_engines_first_gpu() -> None:
    pool = ("policy.generation.colocated={enabled: false, resources: {num_nodes: 1}}", "cluster.num_nodes=3")
    found = plan(LLAMA, *pool)
    assert found.fits and found.engine.receiver == 2**30 + found.load.refit_buffer // 2
    full = plan(LLAMA, *pool, "policy.generation.vllm_cfg.gpu_memory_utilization=0.99")
    assert not full.fits and any("first GPU of an engine" in warning for warning in full.warnings)
    assert plan(LLAMA).engine.receiver == 0


def test_a_comparison_of_log_probs_keeps_engines_weights_on_the_host() -> None:
    with_it, without = plan(LLAMA), plan(LLAMA, "policy.refit_parity=null")
    assert with_it.node_memory - without.node_memory == 8 * sum(with_it.engine.woken.values())


def test_a_refit_takes_as_long_as_the_memory_of_a_node_needs() -> None:
    """All that its engines read goes in once and out to every reader."""
    refit = plan("grpo-nanov3-30BA3B-2n8g").refit
    assert refit is not None
    assert refit.through_host == pytest.approx(refit.tensor_bytes + 8 * refit.read)
    assert refit.through_host / HOST_BANDWIDTH > 2 * refit.read / DEVICES["H100"].host_bandwidth


def test_engines_apart_generate_while_the_policy_trains() -> None:
    pool = "policy.generation.colocated={enabled: false, resources: {num_nodes: 1}}"
    found = plan(LLAMA, *AHEAD, "cluster.num_nodes=3", pool)
    each = seconds_of(found)
    policy = sum(each.values()) - each["generation"] - each["refit"]
    assert found.times.likely == pytest.approx(each["refit"] + max(each["generation"], policy))
    alternating = plan(LLAMA, "cluster.num_nodes=3", pool)
    assert alternating.times.likely == pytest.approx(sum(seconds_of(alternating).values()))


@pytest.mark.slow
def test_the_search_returns_layouts_that_fit_fastest_first() -> None:
    found = plan(LLAMA)
    result = search(found.load, found.device, nodes=4)
    with pytest.raises(PlanError, match="give a number of nodes, at least 1"):
        search(found.load, found.device, nodes=0)
    options = result.candidates
    assert 3 <= len(options) <= 5
    assert [it.seconds for it in options] == sorted(it.seconds for it in options)
    assert not any(option.own for option in options), "the recipe has two nodes"
    for option in options:
        tried = plan(LLAMA, *option.overrides)
        assert tried.fits and tried.load == option.load
        assert option.reason and option.overrides[-1] == "cluster.num_nodes=4"
    assert len({option.layout for option in options}) == len(options)
    assert "cluster.num_nodes=4" in search_text(result, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "nodes"), [(LLAMA, 8), (DEEPSEEK, 16)])
def test_the_search_answers_alike_however_the_nodes_are_named(recipe: str, nodes: int, capsys) -> None:
    """Also where the recipe's own layout, which is among the answers if it fits, needs another number of nodes."""
    answers = []
    for words in ([], [f"cluster.num_nodes={nodes}"], [f"cluster.num_nodes={nodes - 1}"]):
        main(["plan", recipe, *words, "--search", str(nodes), "--json"])
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1] == answers[2]
    assert [it["own"] for it in answers[0]["candidates"]].count(True) == (recipe == LLAMA)


@pytest.mark.slow
def test_each_policy_of_the_search_has_the_engines_with_which_its_step_is_fastest() -> None:
    """Every engine and share is tried beside it here."""
    found = plan(LLAMA)
    options = search(found.load, found.device, 1).candidates
    assert len(options) == 5
    for option in options:
        seconds = []
        for layout, share in product((1, 2, 4, 8), SHARES):
            engines = replace(option.load.engine_layout, tensor=layout)
            tried = replace(option.load, engine_layout=engines, engines=8 // layout, engine_share=share)
            engine, stages = memory(tried, found.device)
            close = max(stage.peak.total for stage in stages) <= CLOSE * found.device.memory
            if close and fits_device(stages, engine, tried, found.device) and engine.sequences(tried.max_length):
                seconds.append(step_time(tried, found.device, engine, None).likely)
        assert option.seconds == pytest.approx(min(seconds))


@pytest.mark.slow
def test_the_search_marks_layouts_that_a_resume_would_refuse(tmp_path: Path, capsys) -> None:
    """A checkpoint with the optimizer in parts resumes with the same TP, PP and EP alone."""
    at, saved = f"checkpointing.checkpoint_dir={tmp_path}", tmp_path / "step_20"
    saved.mkdir()
    for whole in (True, False):
        config = load_recipe(LLAMA, [at, f"{AT}dist_ckpt_optim_fully_reshardable={str(whole).lower()}"]).config
        (saved / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        assert (saved_layout(config) is None) == whole
    assert main(["plan", LLAMA, at, "--search", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()[1::3]
    marked = [line for line in lines if f"not on --resume from {saved}" in line]
    assert marked and all(("TP 1 x PP 2 x" in line) == (line not in marked) for line in lines)
    assert any("(the recipe's" in line for line in lines if line not in marked)


BASE = "recipes/grpo_math_1B_megatron.yaml"
"""The settings of NeMo RL's recipes, for models of any size."""


def of_model(name: str, nodes: int) -> tuple[str, ...]:
    return (
        f"policy.model_name={name}", "policy.max_total_sequence_length=4096", "cluster.platform=gpu",
        "cluster.gpus_per_node=8", f"cluster.num_nodes={nodes}",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "nodes"),
    [("Qwen/Qwen2.5-7B-Instruct", 1), pytest.param("Qwen/Qwen3-235B-A22B", 32, marks=pytest.mark.every_state)],
)
def test_the_search_finds_what_plan_says_fits(model: str, nodes: int) -> None:
    """The keys of each candidate give the very workload that was searched, and its plan fits."""
    words = of_model(model, nodes)
    load, device = workload(*words)
    candidates = search(load, device, nodes).candidates
    assert len(candidates) >= 3
    for candidate in candidates:
        tried, _ = workload(*words, *candidate.overrides)
        assert tried == candidate.load
        engine, stages = memory(tried, device)
        assert fits_device(stages, engine, tried, device)
        assert candidate.node_memory == node_memory(tried, stages, engine, device)
        assert candidate.peak == max(stage.peak.total for stage in stages)
        check_refit(tried)


def workload(*words: str) -> tuple[Workload, Device]:
    config = load_recipe(BASE, words).config
    device = plan_device(config, None)
    return plan_workload(config, plan_shape(config), device), device


@pytest.mark.slow
def test_what_is_said_where_nothing_fits() -> None:
    found = plan(LLAMA)
    lacking = search(found.load, replace(found.device, memory=8 * 10**9), nodes=1)
    assert "no layout fits 1 node\n" in search_text(lacking, 1) and lacking.plain()["candidates"] == []
    assert not search(found.load, replace(found.device, host_memory=100 * 10**9), nodes=2).candidates
    assert not search(replace(found.load, max_length=10**8), found.device, nodes=1).candidates
    assert search_text(search(replace(found.load, batch=17), found.device, nodes=32), 32).count("\n") == 2
    five_stages = replace(found.load.engine_layout, pipeline=5)
    refused = search(replace(found.load, engine_layout=five_stages), found.device, nodes=1)
    assert not refused.candidates and refused.refused is not None
    assert "ranks of an engine (TP 1 x PP 5)" in " ".join(search_text(refused, 1).split())


def test_stages_that_do_not_divide_the_layers() -> None:
    assert stage_splits(80, 8) == [(None, None)]
    assert stage_splits(94, 8) == [(None, 10), (11, 11)]
    assert stage_splits(61, 16) == [(None, 1), (3, 2)]
    for layers in range(4, 70):
        for stages in range(2, layers // 4 + 2):
            for first, last in stage_splits(layers, stages):
                chunks = PolicyLayout(1, stages, first_layers=first, last_layers=last).layers(layers)
                counts = [len(chunk) for (chunk,) in chunks]
                assert sum(counts) == layers and max(counts) == -(-layers // stages)


def test_the_least_that_a_rank_needs_is_never_more_than_it_needs() -> None:
    """The search leaves out what does not fit by this bound."""
    for recipe in (LLAMA, MOE, DEEPSEEK, "recipes/grpo-qwen3-8B-1n1g-lora.yaml", "recipes/grpo-qwen3-32B-1n8g.yaml"):
        found = plan(recipe)
        training = max(
            phase.total for stage in found.stages for phase in stage.phases if phase.name in ("training", "optimizer")
        )
        assert 0.3 * training < least_bytes(found.load, found.device) <= training, recipe


def test_a_checkpoint_and_the_optimizer_on_the_host_count_against_a_nodes_memory() -> None:
    recipe = "recipes/grpo-qwen3-32B-1n8g.yaml"
    found = plan(recipe)
    parts = found.stages[0].host.parts
    assert parts["updated there"] == 16 * owned(found)
    assert parts["a checkpoint, while it is written"] == 12 * owned(found)
    asleep = sum(found.engine.woken.values())  # while log-probs are compared
    assert found.node_memory == 8 * (sum(parts.values()) + asleep + 2 * 6 * 2**30) + found.load.refit_buffer
    assert f"{found.node_memory / 1e9:,.0f} of 2,199 GB" in plan_text(found)
    whole = plan(recipe, f"{AT}dist_ckpt_optim_fully_reshardable=true")
    gathered = whole.stages[0].host.parts["a checkpoint, while it is written"]
    assert gathered == 12 * whole.load.params(0).numel == pytest.approx(2 * 12 * owned(found))
    assert "a checkpoint, while it is written" not in plan(recipe, "checkpointing.enabled=false").stages[0].host.parts
    small = plan(recipe, "launch.memory_gb_per_node=512")
    assert not small.fits
    (warning,) = [warning for warning in small.warnings if "host memory" in warning]
    assert "of 550 GB, most of it updated there; lower policy.megatron_cfg.optimizer" in warning


def owned(found: Plan) -> int:
    return found.load.params(0).owned(found.load.layout, None)


@pytest.mark.slow
def test_engines_over_several_nodes_wait_for_the_network() -> None:
    found = plan(DEEPSEEK)
    inside = replace(found.load, engine_layout=replace(found.load.engine_layout, nodes=1))
    seconds = [generation_time(load, found.device, found.engine).likely for load in (inside, found.load)]
    passes = 512 // 8 / min(64, 256) * (found.load.mean_length - found.load.prompt)
    assert seconds[1] - seconds[0] > passes * 2 * 61 * 2 * NETWORK_ALL_REDUCE_S  # of four nodes


TOO_WIDE = (f"{AT}tensor_model_parallel_size=64", f"{AT}pipeline_model_parallel_size=1", "cluster.num_nodes=8")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((LLAMA, "policy.model_name=someone/unknown"), 1, "--config-json PATH"),
        ((LLAMA, *TOO_WIDE), 1, "does not divide num_attention_heads 32"),
        ((LLAMA, "--device", "H900"), 1, "known are A100-40GB"),
        ((LLAMA, "+policy.fsdp_sizes=2", "+policy.fsdp1_enabled=true"), 2, "2 problems"),
    ],
)  # fmt: skip
def test_errors_are_one_message(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, message: str
) -> None:
    assert main(["plan", *words]) == code
    assert message in capsys.readouterr().err


def test_a_config_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 32}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 131}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = main(["plan", LLAMA, "policy.model_name=mine", "--config-json", str(tmp_path / "config.json"), "--json"])
    assert json.loads(capsys.readouterr().out)["fits"] and code == 0


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen2.5-1.5B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("data", [1, 3, 64])
def test_every_element_is_owned_once(name: str, data: int) -> None:
    shape = shape_of(known_configs()[name])
    for stage, chunks in enumerate(PolicyLayout(pipeline=4).layers(shape.num_layers)):
        found = rank_params(shape, PolicyLayout(2, 4, data), stage, chunks, ())
        for shard in (*found.common, *found.experts):
            assert sum(shard.owned) == shard.numel <= shard.buffer
            assert shard.most_owned <= shard.buffer / len(shard.owned)


MOE = "recipes/grpo-qwen3-30BA3B-4n8g.yaml"


@pytest.mark.slow
def test_experts_lie_on_fewer_ranks_than_the_rest() -> None:
    load = plan(MOE).load
    found = load.params(0)
    of_one = 3 * 2048 * 768  # an expert's three matrices
    assert found.expert_numel == 48 * 128 // 8 * of_one
    total = [optimizer_bytes(load, 0, load.layout.coordinates(rank)) for rank in range(32)]
    # Together the 32 ranks own each TP rank's parameters once, and every expert once.
    assert sum(total) == 12 * (2 * (found.numel - found.expert_numel - found.frozen) + 8 * found.expert_numel)


@pytest.mark.slow
def test_layouts_of_a_thousand_gpus_with_experts() -> None:
    found = plan(
        MOE, "policy.model_name=deepseek-ai/DeepSeek-V3", "cluster.num_nodes=128", "policy.refit_buffer_size_gb=8",
        f"{AT}tensor_model_parallel_size=8", f"{AT}pipeline_model_parallel_size=16",
        f"{AT}expert_model_parallel_size=32",
        f"{AT}num_layers_in_first_pipeline_stage=4", f"{AT}num_layers_in_last_pipeline_stage=1",
        "policy.generation.vllm_cfg.tensor_parallel_size=8", "policy.train_global_batch_size=2048",
    )  # fmt: skip
    assert found.load.world == 1024 and len(found.stages) == 16
    latent = 61 * (512 + 64) * 2
    assert found.engine.kv_bytes_per_token == latent  # equal on every rank of an engine


def test_interleaved_stages_wait_less_and_keep_more_activations() -> None:
    words = [f"{AT}pipeline_model_parallel_size=4", "policy.train_global_batch_size=256"]
    plain, chunks = plan(LLAMA, *words), plan(LLAMA, *words, f"{AT}virtual_pipeline_model_parallel_size=4")
    assert chunks.times.bubble < plain.times.bubble
    assert sorted(layer for layers in chunks.load.layers for layer in layers) == list(range(32))
    kept = [each.stages[0].phases[-2].parts["activations"] for each in (plain, chunks)]
    assert kept[0] < kept[1] < 2 * kept[0]


def test_context_parallel_ranks_share_a_bin() -> None:
    whole, half = plan(LLAMA), plan(LLAMA, f"{AT}context_parallel_size=2")
    kept = [each.stages[0].phases[-2].parts["activations"] for each in (whole, half)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.05)
    assert [optimizer_bytes(each.load, 0) for each in (whole, half)] == [optimizer_bytes(whole.load, 0)] * 2


@pytest.mark.slow
def test_the_search_tries_expert_parallelism() -> None:
    found = plan(MOE)
    options = search(found.load, found.device, nodes=2).candidates
    assert options and len({option.layout for option in options}) == len(options)
    best = plan(MOE, *options[0].overrides)
    assert best.fits and best.load.world == 16
    assert any(f"{AT}expert_model_parallel_size=1" not in option.overrides for option in options)


def test_a_runs_measurements_are_compared_with_the_prediction() -> None:
    config = load_recipe("recipes/grpo-arithmetic-cpu.yaml").config
    shape = plan_shape(config)
    steps = [{"refit": 9.0, "generate": 9.0, "train": 9.0}, *[{"refit": 0.1, "generate": 2.0, "train": 1.0}] * 3]
    memory = [{"weights": 100, "gradients": 200, "optimizer": 300 + rank, "refit buffer": 50} for rank in range(2)]
    found = compare(MeasuredRun(config, shape, steps, memory, 20))
    assert found is not None and found.device.name == "cpu"
    lines = {line.what: line for line in found.lines}
    assert "training" not in lines, "on CPU only the bytes are compared"
    assert lines["optimizer"].measured == 301  # the largest of the ranks
    assert lines["weights"].predicted == plan("recipes/grpo-arithmetic-cpu.yaml").stages[0].phases[0].parts["weights"]
    text = "\n".join(found.text())
    assert "ratio" in text and "seconds" not in text
    json.dumps(found.plain())


def test_nothing_is_compared_if_memory_or_device_is_unknown() -> None:
    config = load_recipe("recipes/grpo-arithmetic-cpu.yaml").config
    shape, step = plan_shape(config), {"train": 1.0}
    assert compare(MeasuredRun(config, shape, [step], [{}, {}], 20)) is None
    unknown = {"weights": 1, "gradients": 1, "optimizer": 1, "refit buffer": 1}
    unknown |= {"device": "Some GPU", "device bytes": 10**10, "peak": 1}
    assert compare(MeasuredRun(config, shape, [step], [unknown], 20)) is None
    known = compare(MeasuredRun(config, shape, [step], [unknown | {"device": "NVIDIA H100 80GB HBM3"}], 20))
    assert known is not None and known.device.name == "H100" and known.lines[-1].what == "peak"
    assert "the data sheet of H100" in known.text()[-2] and "samples of 20 tokens" in known.text()[-1]
    steps = [{"train": 9.0}, *[{"train": 1.0}] * 3]
    known = compare(MeasuredRun(config, shape, steps, [unknown | {"device": "NVIDIA H100 80GB HBM3"}], 20))
    assert known is not None and known.lines[0].measured == 1.0  # without the first step


@pytest.mark.slow
def test_no_absurd_layout_is_found() -> None:
    found = plan(LLAMA, "cluster.num_nodes=32", "policy.train_global_batch_size=2048")
    for option in search(found.load, found.device, nodes=32).candidates:
        tried = plan(LLAMA, *option.overrides)
        assert tried.load.layout.pipeline <= 8 and tried.times.bubble <= 0.25


DISTILLATION = "recipes/distillation_math.yaml"


def test_a_teacher_is_counted_in_memory_and_seconds() -> None:
    """What the teacher needs is what it would need as the policy of a run; its output layer is the policy's guest."""
    found = plan(DISTILLATION)
    alone = plan(DISTILLATION, "policy.model_name=Qwen/Qwen3-4B", "distillation.topk_logits_k=8").stages[0]
    (stage,), (teacher,) = found.stages, found.load.teachers
    phases = {phase.name: phase for phase in stage.phases}
    assert list(phases) == ["refit", "generation", "teachers", "training", "optimizer"]
    assert phases["teachers"].parts["teacher weights"] == alone.phases[0].parts["weights"]
    assert "gradients" not in phases["teachers"].parts, "the policy has made room"
    head = 151_936 // 2 * 2560 * 2  # TP 2, bfloat16
    assert phases["training"].parts["teacher's output layer"] == pytest.approx(head, rel=0.01)
    assert stage.host.parts["teachers"] == phases["teachers"].parts["teacher weights"]
    seconds = {phase.name: phase for phase in found.times.phases}
    tokens = found.load.samples * found.load.mean_length
    assert seconds["teachers"].flops == pytest.approx(2 * 4.02e9 * tokens, rel=0.2)
    larger = {phase.name: phase for phase in plan(DISTILLATION, "teacher.model_name=Qwen/Qwen3-14B").times.phases}
    assert larger["teachers"].likely > 2.5 * seconds["teachers"].likely
    assert larger["training"].likely == seconds["training"].likely
    assert "teacher: qwen3, 4.02 B parameters, TP 2 x PP 1 x DP 4" in plan_text(found)
    assert found.plain()["teachers"] == [
        {
            "alias": "teacher",
            "parameters": parameter_count(teacher.load.shape),
            "layout": teacher.load.layout.describe(),
            "backend": "megatron",
        }
    ]


def test_teachers_that_score_log_probs_send_no_hidden_states() -> None:
    """Two aliases of one model and layout are one teacher; two models share the samples."""
    recipe = "recipes/grpo-math-8B.yaml"
    section = "on_policy_distillation"
    words = ["grpo.adv_estimator.name=opd", f"{section}.enabled=true", f"{section}.default_teacher_alias=a"]
    one = plan(recipe, *words, f"+{section}.teacher_model_by_agent_name={{a: Qwen/Qwen3-32B, b: Qwen/Qwen3-32B}}")
    assert [teacher.alias for teacher in one.load.teachers] == ["a"] and one.load.prev
    assert not one.load.teachers[0].distributions
    assert "teacher's output layer" not in one.stages[-1].peak.parts
    two = plan(recipe, *words, f"+{section}.teacher_model_by_agent_name={{a: Qwen/Qwen3-32B, b: Qwen/Qwen3-8B}}")
    assert [teacher.share for teacher in two.load.teachers] == [0.5, 0.5]
    times = [next(it for it in each.times.phases if it.name == "teachers") for each in (one, two)]
    assert times[1].flops < times[0].flops
    with pytest.raises(PlanError, match="teacher_model_by_agent_name.a 'nobody/knows' is neither a folder here"):
        plan(recipe, *words, f"+{section}.teacher_model_by_agent_name={{a: nobody/knows}}")


def test_a_teacher_on_engines_has_a_cache_and_the_logits_of_a_batch_of_prompts() -> None:
    places = "+on_policy_distillation.non_colocated_teachers={default_teacher_cfg: {backend: vllm, %s}}"
    models = "+on_policy_distillation.teacher_model_by_agent_name={it: Qwen/Qwen3-8B}"
    words = ["grpo.adv_estimator.name=opd", "on_policy_distillation.enabled=true", models]
    found = plan("recipes/grpo-math-8B.yaml", *words, places % "tensor_model_parallel_size: 2")
    (parts,) = (phase.parts for phase in found.stages[0].phases if phase.name == "teachers")
    assert parts["teacher weights"] == pytest.approx(8.19e9 / 2 * 2, rel=0.01)
    device = found.device.memory
    assert device is not None
    there = sum(parts[name] for name in ("teacher weights", "KV cache", "engine overhead"))
    assert there == pytest.approx(0.6 * device, rel=0.01), "gpu_memory_utilization"
    assert parts["logits"] == min(2048, found.load.max_length) * 151_936 * (2 + 8)
    assert "4 vLLM engines" in plan_text(found) and found.plain()["teachers"][0]["backend"] == "vllm"
    assert found.fits and not plan("recipes/grpo-math-8B.yaml", *words, places % "gpu_memory_utilization: 0.1").fits


def test_the_search_lays_teachers_out_on_the_nodes_that_it_tries() -> None:
    found = plan(DISTILLATION)
    options = search(found.load, found.device, nodes=2).candidates
    assert options
    best = plan(DISTILLATION, *options[0].overrides)
    assert best.load.teachers[0].load.world == 16


def test_a_teacher_on_a_node_of_its_own_takes_nothing_from_the_policy() -> None:
    places = "+on_policy_distillation.non_colocated_teachers={enabled: true, default_teacher_cfg: {num_nodes: 1}}"
    models = "+on_policy_distillation.teacher_model_by_agent_name={it: Qwen/Qwen3-32B}"
    words = ["grpo.adv_estimator.name=opd", "on_policy_distillation.enabled=true", models]
    recipe = "recipes/grpo-math-8B.yaml"
    together, apart = plan(recipe, *words), plan(recipe, *words, places, "cluster.num_nodes=2")
    assert apart.load.world == together.load.world == apart.load.teachers[0].load.world == 8
    phases = [{phase.name: phase.parts for phase in it.stages[0].phases}["teachers"] for it in (together, apart)]
    assert phases[0]["teacher weights"] == phases[1]["teacher weights"]
    assert "weights" in phases[0] and set(phases[1]) == {"reserved", "teacher weights", "activations"}
    assert "teachers" in together.stages[0].host.parts and "teachers" not in apart.stages[0].host.parts
    seconds = [next(phase for phase in it.times.phases if phase.name == "teachers") for it in (together, apart)]
    assert seconds[1].likely < seconds[0].likely
    assert "has 1 x 8 devices to itself" in plan_text(apart)


def test_a_layout_that_was_found_is_written_as_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It inherits from the recipe that was planned, with what the command line said, and fits."""
    mine, found = tmp_path / "mine.yaml", tmp_path / "found.yaml"
    mine.write_text("defaults: grpo-qwen3-8B-1n1g\n")
    rate = f"{AT}optimizer.min_lr=1e-9"
    words = ["policy.max_total_sequence_length=4096", rate, "--preset", "dapo", "--search", "1", "--write", str(found)]
    assert main(["plan", str(mine), "cluster.gpus_per_node=8", *words]) == 0
    first = capsys.readouterr().out.splitlines()[3].split()
    config, plain = load_recipe(found).config, yaml.safe_load(found.read_text())
    assert plain["defaults"] == ["mine.yaml", "presets/dapo"] and config.cluster.gpus_per_node == 8
    assert all(str(value_at(config, one.split("=")[0])).lower() == one.split("=")[1] for one in first)
    assert main(["plan", str(found)]) == 0
    assert plain["policy"]["megatron_cfg"]["optimizer"]["min_lr"] == 1e-9
    assert main(["plan", str(mine), "--write", str(found)]) == 2
    capsys.readouterr()
    assert main(["plan", str(mine), "~grpo.val_period", "--search", "1", "--write", str(found)]) == 2
    assert "~grpo.val_period: --write has no place for it" in capsys.readouterr().err
    assert main(["plan", str(mine), "--search", "1", "--write", str(tmp_path / "no" / "found.yaml")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_an_evaluation_has_engines_alone(capsys) -> None:
    assert main(["plan", "eval", "generation.model_name=Qwen/Qwen3-32B", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert set(planned["memory"]) == {"engine weights", "sampler state", "KV cache", "engine overhead", "total"}
    assert planned["memory"]["engine weights"] > 60e9 and planned["samples"] == 1000 and planned["fits"]
    assert main(["plan", "eval", "generation.model_name=Qwen/Qwen2.5-72B-Instruct"]) == 1
    text = capsys.readouterr().out
    assert "cannot hold one sample of 2,048 tokens" in text and "optimizer" not in text
    words = ["eval.num_prompts=30", "eval.num_tests_per_prompt=16", "generation.temperature=1", "--device", "cpu"]
    assert main(["plan", "eval", *words]) == 0
    assert "30 prompts x 16 = 480" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--search", "2"], ["--trace"]])
def test_an_evaluation_has_no_layout_to_search(option: list[str], capsys) -> None:
    assert main(["plan", "eval", *option]) == 2
    assert "an evaluation has engines alone" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "least"), [("GB200", 180e9), ("GB300", 270e9)])
def test_nodes_of_nvl72_are_known(name: str, least: float) -> None:
    config = load_recipe(LLAMA, ["cluster.gpus_per_node=4"]).config
    device = plan_device(config, name.lower())
    assert device.memory > least and make_plan(config, plan_shape(config), device).fits


def test_a_run_has_a_range_of_hours_with_its_source_and_the_bytes_of_a_checkpoint() -> None:
    config = load_recipe(LLAMA).config
    found = plan(LLAMA)
    size, hours, source = run_text(found, config)
    assert checkpoint_bytes(found) == parameter_count(found.load.shape) * (2 + 12) and "112 GB" in size
    low, usual, high = map(float, re.findall(r"[\d.]+(?= h| to)", hours))
    steps = config.grpo.max_num_steps
    assert low > steps * found.times.likely / 3600, "checkpoints are part of it"
    assert usual > 1.75 * low and high > usual and "measured elsewhere: 1.8 to 2.4 x" in source
    assert f"{steps} steps, {steps // config.checkpointing.save_period} checkpoints" in source
    demo = load_recipe("recipes/grpo-arithmetic-cpu.yaml").config
    (size,) = run_text(plan("recipes/grpo-arithmetic-cpu.yaml"), demo)  # no data sheet has the seconds of a CPU
    assert size == "checkpoint  0.00873 GB", "that of the demo has 0.0093 GB with its small files"
