"""TransformerEngine, by its stand-in (tests/stand_ins): every family is built from its layers, which compute what
transformers does; checkpoints written with it load without it and the other way round."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.recipe import PolicyConfig, load_recipe
from grpo_mcore.tools.demo.tiny_models import FAMILIES, make_tiny_model
from grpo_mcore.tools.parity.parity import Reference, compare, reference_of
from grpo_mcore.tools.parity.rank import STANDARD, LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool
from grpo_mcore.tools.plan.run_plan import plan_shape
from tests.distributed.kernel_package_cases import FAULTS

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
OF_EACH_KIND = [
    path for path in RECIPES if path.stem in ("grpo-code-cpu", "grpo-gpt-oss-20B-1n8g", "grpo-nanov3-30BA3B-2n8g-lora")
]
"""Weights and adapters, float32 and bfloat16, optimizers that are saved in both ways; KINDS has each kind of layer."""
WITH_EXPERTS = {"nemotron_h": "nemotron_h_moe", "qwen3_5_text": "qwen3_5_moe_text"}
STAND_INS = Path(__file__).parents[1] / "stand_ins"
CASES = "tests.distributed.kernel_package_cases"
KINDS = ("qwen2", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next")
"""Families that have each kind of layer, which is what a checkpoint depends on."""


TP1, SP = LayoutCase("TP1"), {"tensor": 2, "sequence_parallel": True}
TP2, CP2, EP2 = LayoutCase("TP2-SP", **SP), LayoutCase("CP2", context=2), LayoutCase("TP2-SP-EP2", expert=2, **SP)
ALLGATHER = LayoutCase("EP2-allgather", data=2, expert=2, dispatcher="allgather")
COMPARED = [("gpt_oss", EP2), ("deepseek_v3", CP2), ("nemotron_h_moe", TP1), ("qwen3_moe", ALLGATHER)]
"""Windows with sinks and YaRN, latent attention, a hybrid of Mamba2, and experts; each way of splitting a model."""
NOT_WITH_RING = ("gpt_oss", "gemma3_text", "gemma3")
"""Families with windows or sinks: TransformerEngine has no ring of context-parallel ranks for them."""


def compared() -> list[Any]:
    """Return (family, layout): COMPARED, and every other family and layout as those that only `--chaos` runs."""
    found = list[Any](COMPARED)
    for family, tiny in FAMILIES.items():
        experts = any("experts" in key for key in tiny.get("config", {}))
        layouts = [TP1, TP2, *([] if family in NOT_WITH_RING else [CP2]), *([EP2, ALLGATHER] if experts else [])]
        others = [(family, case) for case in layouts if (family, case) not in COMPARED]
        found += [pytest.param(*other, marks=pytest.mark.every_state) for other in others]
    return found


@pytest.fixture(scope="module")
def with_it() -> Iterator[RankPool]:
    """Two ranks that can import the stand-in; `ranks` has some that cannot."""
    sys.path.insert(0, str(STAND_INS))
    try:
        pool = RankPool(2)
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


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> Callable[[str], Reference]:
    """Return the reference of a family's model."""
    return functools.cache(lambda family: reference_of(models[family]))


@pytest.mark.parametrize(
    ("family", "case"), compared(), ids=lambda value: value if isinstance(value, str) else value.name
)
def test_its_layers_equal_transformers(
    with_it: RankPool, references: Callable[[str], Reference], family: str, case: LayoutCase
) -> None:
    assert within_limits(with_it, references(family), case)


def test_gradients_added_after_the_product_equal_transformers(
    with_it: RankPool, references: Callable[[str], Reference]
) -> None:
    assert within_limits(with_it, references("qwen2"), TP1, megatron={"gradient_accumulation_fusion": False})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_raises_nothing_is_found(
    with_it: RankPool, references: Callable[[str], Reference], fault: str
) -> None:
    with pytest.raises(AssertionError, match=r"gpt_oss TP1: log-probs differ by (?!0\.00)"):
        within_limits(with_it, references("gpt_oss"), TP1, fault)


def within_limits(
    ranks: RankPool,
    reference: Reference,
    case: LayoutCase,
    fault: str | None = None,
    megatron: dict[str, Any] | None = None,
) -> bool:
    """Compare log-probs and gradients with those of transformers. Raises AssertionError if they differ. `megatron`:
    the policy's megatron_cfg, in place of that of the layout."""
    changed = {} if megatron is None else {"megatron_cfg": megatron}
    arguments = str(reference.folder), case, True, STANDARD, changed, fault
    results = ranks.run(case.world_size, f"{CASES}:logprobs_and_gradients", *arguments)
    found = compare(reference, results, case.name, packed=True)
    gradient, name = max(found.by_layer().values())
    worst = max(found.logprobs.values())
    assert found.ok, f"{reference.family} {case.name}: log-probs differ by {worst:.6f}, {name} by {gradient:.1e}"
    return found.ok


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0]], ids=["some rows", "no rows"])
def test_products_of_groups_take_weights_where_they_are(with_it: RankPool, sizes: list[int], accumulates: bool) -> None:
    assert with_it.run(1, f"{CASES}:grouped_products", sizes, accumulates) == [pytest.approx([0.0] * 3, abs=1e-3)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_its_adam_is_adamw(with_it: RankPool, models: dict[str, Path], precision: str) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.99, "adam_eps": 1e-3}
    aware = {"use_precision_aware_optimizer": precision == "bfloat16"}
    found = with_it.run(1, f"{CASES}:steps_against_adamw", str(models["qwen3"]), precision, settings | aware)
    assert found == [pytest.approx([0.0, 0.0], abs=1e-6)]


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
    (trained,) = with_it.run(1, f"{CASES}:load_train", str(tmp_path), policies)
    for name, (norm, loss) in trained.items():
        rel = 1e-3 if policies[name].precision == "float32" else 0.05
        assert (norm, loss) == (pytest.approx(expected[name][0], rel=rel), pytest.approx(expected[name][1], abs=rel)), (
            name
        )


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
        # On a device these need its Adam, whose state is that of the others.
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
