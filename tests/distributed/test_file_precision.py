"""A tensor that the file holds in float32 stays so where the engine keeps it so; what training did not change is
exported to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from grpo_mcore.families import params_of, read_hf_config, shape_of
from grpo_mcore.tools.parity.parity import as_held, compare, reference_of, unstacked
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool
from tests.distributed.driver_files import driver_files
from tests.distributed.policy_cases import FEW
from tests.mixed_models import KEPT, WIDE, make_mixed_model

CASES = "tests.distributed.file_precision_cases"
TP2 = LayoutCase("TP2-SP", tensor=2, sequence_parallel=True)
RARE = ("nemotron_h_moe", "qwen3_5_moe_text", "glm4_moe", "minimax_m2", "deepseek_v3")
FAMILIES = [pytest.param(family, marks=pytest.mark.every_state) if family in RARE else family for family in KEPT]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return unstacked(found, shape_of(read_hf_config(folder)))


def whole(results: list[dict[str, Any]], key: str) -> dict[str, list[tuple[Any, Tensor]]]:
    """Return the slices of all ranks by tensor."""
    found: dict[str, list[tuple[Any, Tensor]]] = {}
    for name, box, values in (piece for result in results for piece in result[key]):
        found.setdefault(name, []).append((tuple(slice(*span) for span in box), values))
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_declared_float32_is_what_the_engine_keeps(tmp_path: Path, family: str) -> None:
    shape = shape_of(read_hf_config(make_mixed_model(family, tmp_path)))
    declared = {tensor.name for param in params_of(shape) for tensor in param.hf if tensor.float32}
    names = {tensor.name for param in params_of(shape) for tensor in param.hf}
    assert declared == {name for name in names if name.endswith(KEPT[family])} != set()


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_holds_in_the_precisions_of_the_file(ranks: RankPool, tmp_path: Path, family: str) -> None:
    (tmp_path / "model").mkdir()
    model = make_mixed_model(family, tmp_path / "model")
    held, rounded = as_held(model, tmp_path)
    stored = tensors_in(model)
    assert set(rounded) == {name for name in stored if name.endswith(WIDE) and not name.endswith(KEPT[family])}
    reference = reference_of(held, work=FEW)
    target = "grpo_mcore.tools.parity.rank:logprobs_and_gradients"
    results = ranks.run(TP2.world_size, target, str(held), TP2, True, FEW)
    found = compare(reference, results, TP2.name, packed=True)
    assert found.ok, (found.logprobs, max(found.by_layer().values()))


@pytest.mark.parametrize(
    ("family", "adapters", "freeze_router"),
    [
        ("qwen3_next", True, True),
        ("nemotron_h_moe", False, True),
        pytest.param("glm4_moe", False, False, marks=pytest.mark.every_state),
        *(pytest.param(family, True, True, marks=pytest.mark.every_state) for family in RARE),
    ],
)
def test_a_bfloat16_run_keeps_the_file_s_precisions(
    ranks: RankPool, tmp_path: Path, family: str, adapters: bool, freeze_router: bool
) -> None:
    model = make_mixed_model(family, tmp_path / "model")
    recipe = driver_files(tmp_path, model, TP2, {} if adapters else None) / "config.yaml"
    values = yaml.safe_load(recipe.read_text())
    values["policy"]["precision"] = "bfloat16"
    megatron = values["policy"]["megatron_cfg"]
    megatron["freeze_moe_router"], megatron["optimizer"]["bf16"] = freeze_router, True
    megatron["pipeline_dtype"] = "bfloat16"
    recipe.write_text(yaml.safe_dump(values))
    arguments = (str(model), TP2, adapters, freeze_router, str(tmp_path))
    results = ranks.run(2, f"{CASES}:train_save_export", *arguments)
    stored, exported = tensors_in(model), tensors_in(tmp_path / "exported")
    loaded, trained = whole(results, "loaded"), whole(results, "trained")
    assert loaded.keys() == stored.keys() == exported.keys()
    untouched = 0
    for name, tensor in stored.items():
        held = torch.float32 if name.endswith(KEPT[family]) else torch.bfloat16
        assert all(same_bits(values, tensor.to(held)[box]) for box, values in loaded[name]), name
        frozen = adapters and not any(not same_bits(values, tensor.to(held)[box]) for box, values in trained[name])
        frozen |= name.endswith("e_score_correction_bias") or (freeze_router and name.endswith(".gate.weight"))
        if frozen:
            untouched += 1
            assert same_bits(exported[name], tensor), f"{name} was not trained, and is exported otherwise"
        else:
            assert exported[name].dtype == held
            assert all(same_bits(values, exported[name][box]) for box, values in trained[name]), name
    moved = [name for name in stored if name.endswith("A_log") and not same_bits(exported[name], stored[name])]
    assert untouched and bool(moved) != adapters or "A_log" not in KEPT[family]
    for result, resumed in zip(results, ranks.run(2, f"{CASES}:resume", *arguments), strict=True):
        assert result["next"] == resumed["next"]
        for key in ("trained", "then"):
            pairs = zip(result[key], resumed[key], strict=True)
            assert [name for (name, _, one), (*_, two) in pairs if not same_bits(one, two)] == [], key
    ranks.run(1, f"{CASES}:export_here", str(tmp_path))
    merged = tensors_in(tmp_path / "merged")
    assert [name for name, tensor in exported.items() if not same_bits(merged[name], tensor)] == []
