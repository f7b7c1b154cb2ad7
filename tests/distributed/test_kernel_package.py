"""TransformerEngine, by its stand-in (tests/stand_ins): every family is built from its layers, and checkpoints written
with it load without it and the other way round."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.recipe import PolicyConfig, load_recipe
from grpo_mcore.tools.demo.tiny_models import FAMILIES, make_tiny_model
from grpo_mcore.tools.parity.rank_pool import RankPool
from grpo_mcore.tools.plan.run_plan import plan_shape

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
OF_EACH_KIND = [
    path
    for path in RECIPES
    if path.stem
    in (
        "grpo-code-cpu",
        "grpo-gpt-oss-20B-1n8g",
        "grpo-kimi-k2-64n8g",
        "grpo-nanov3-30BA3B-2n8g-lora",
        "grpo-qwen2.5-3B-1n1g-lora",
        "grpo-qwen3.5-35BA3B-4n8g",
    )
]
"""Each kind of layer, weights and adapters, float32 and bfloat16, optimizers that are saved in both ways."""
WITH_EXPERTS = {"nemotron_h": "nemotron_h_moe", "qwen3_5_text": "qwen3_5_moe_text"}
STAND_INS = Path(__file__).parents[1] / "stand_ins"
CASES = "tests.distributed.kernel_package_cases"
KINDS = ("qwen2", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next")
"""Families that have each kind of layer, which is what a checkpoint depends on."""


@pytest.fixture(scope="module")
def with_it() -> Iterator[RankPool]:
    """A rank that can import the stand-in; `ranks` has some that cannot."""
    sys.path.insert(0, str(STAND_INS))
    try:
        pool = RankPool(1)
    finally:
        sys.path.remove(str(STAND_INS))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def test_every_family_is_built_from_its_layers(with_it: RankPool, models: dict[str, Path]) -> None:
    (layers,) = with_it.run(1, f"{CASES}:layers", models)
    assert layers.keys() == FAMILIES.keys()
    for family, modules in layers.items():
        assert "transformer_engine.pytorch.module" in modules, family


@pytest.mark.parametrize("written_with", [True, False], ids=["written with it", "written without it"])
def test_checkpoints_load_both_ways(
    with_it: RankPool, ranks: RankPool, models: dict[str, Path], tmp_path: Path, written_with: bool
) -> None:
    writer, reader = (with_it, ranks) if written_with else (ranks, with_it)
    models = {family: models[family] for family in KINDS}
    (written,) = writer.run(1, f"{CASES}:save", str(tmp_path), models)
    for other in {reader, with_it}:
        (read,) = other.run(1, f"{CASES}:load", str(tmp_path), models)
        differences = {family: _different(written[family], read[family]) for family in KINDS}
        assert not any(differences.values()), differences


@pytest.mark.parametrize(
    "recipes", [OF_EACH_KIND, pytest.param(RECIPES, marks=pytest.mark.every_state)], ids=["of each kind", "all"]
)
def test_a_recipes_policy_resumes_after_it_was_loaded_and_saved_by_it(
    with_it: RankPool, ranks: RankPool, models: dict[str, Path], tmp_path: Path, recipes: list[Path]
) -> None:
    """Train without it, save; load with it, save; load without it, and go on as without interruption."""
    policies = _recipes_policies(models, recipes)
    assert {config.megatron_cfg.peft.enabled for config in policies.values()} == {True, False}
    (expected,) = ranks.run(1, f"{CASES}:train_save_train", str(tmp_path), policies)
    with_it.run(1, f"{CASES}:pass_on", str(tmp_path), policies)
    (resumed,) = ranks.run(1, f"{CASES}:load_train", str(tmp_path), policies)
    assert resumed == expected and resumed.keys() == policies.keys()


def _recipes_policies(models: dict[str, Path], recipes: list[Path]) -> dict[str, PolicyConfig]:
    """Return the policy sections of recipes with a tiny model of their family, on one rank; of those whose
    checkpoints have the same parts the first."""
    one_rank = {f"{kind}_model_parallel_size": 1 for kind in ("tensor", "pipeline", "expert")}
    one_rank |= {"context_parallel_size": 1, "expert_tensor_parallel_size": 1, "sequence_parallel": False}
    one_rank |= {f"num_layers_in_{which}_pipeline_stage": None for which in ("first", "last")}
    policies, seen = {}, []
    for recipe in recipes:
        config = load_recipe(recipe).config
        shape = plan_shape(config)
        family = WITH_EXPERTS.get(shape.family, shape.family) if shape.experts else shape.family
        megatron = config.policy.megatron_cfg.model_copy(
            update=one_rank | {"virtual_pipeline_model_parallel_size": None}, deep=True
        )
        # On a device these need its Adam, whose step is a kernel; its state is that of the others.
        megatron.optimizer.use_precision_aware_optimizer = megatron.optimizer.optimizer_cpu_offload = False
        policy = config.policy.model_copy(update={"model_name": str(models[family]), "megatron_cfg": megatron})
        key = (family, policy.precision, megatron.peft, megatron.dist_ckpt_optim_fully_reshardable)
        if key not in seen:
            seen.append(key)
            policies[recipe.stem] = policy
    return policies


def _different(written: dict[str, torch.Tensor], read: dict[str, Any]) -> list[str]:
    """Return the names whose values differ or that only one of the two has."""
    common = written.keys() & read.keys()
    return sorted((written.keys() ^ read.keys()) | {name for name in common if not written[name].equal(read[name])})
