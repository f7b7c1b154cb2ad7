"""TransformerEngine, by its stand-in (tests/stand_ins): every family is built from its layers, and checkpoints written
with it load without it and the other way round."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mcore.data.tiny_models import FAMILIES, make_tiny_model
from grpo_mcore.parallel.rank_pool import RankPool

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


def _different(written: dict[str, torch.Tensor], read: dict[str, Any]) -> list[str]:
    """Return the names whose values differ or that only one of the two has."""
    common = written.keys() & read.keys()
    return sorted((written.keys() ^ read.keys()) | {name for name in common if not written[name].equal(read[name])})
