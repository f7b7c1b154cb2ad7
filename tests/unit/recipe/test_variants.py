"""recipes/variants: one small recipe per algorithm that inherits from the demo and sets only the algorithm's keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_mcore.recipe import load_recipe

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "variants"
VARIANTS = sorted(FOLDER.glob("*.yaml"))
NAMES = ["async", "cispo", "dapo", "dr-grpo", "gdpo", "grpo", "gspo", "reinforce-plus-plus", "rloo"]
OF_AN_ALGORITHM = ("grpo.", "loss_fn.", "policy.train_global_batch_size", "env.math.format_pattern")
OF_PLACES = {"checkpointing.checkpoint_dir", "logger.log_dir"}


def test_each_algorithm_has_a_variant() -> None:
    assert [path.stem for path in VARIANTS] == NAMES


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_a_variant_sets_only_its_algorithm(path: Path) -> None:
    recipe = load_recipe(path)
    demo = load_recipe(FOLDER.parent / "grpo-arithmetic-cpu.yaml").config
    assert [file.stem for file in recipe.files] == [path.stem, "grpo-arithmetic-cpu"]
    own = {key for key, source in recipe.provenance.items() if source.rpartition(":")[0].endswith(path.name)}
    assert own >= OF_PLACES
    assert all(key.startswith(OF_AN_ALGORITHM) for key in own - OF_PLACES)
    assert recipe.config.checkpointing.checkpoint_dir == f"results/variants/{path.stem}/checkpoints"
    assert recipe.config.logger.log_dir == f"results/variants/{path.stem}/logs"
    ours, theirs = recipe.config.model_dump(), demo.model_dump()
    assert any(ours[section] != theirs[section] for section in ("grpo", "loss_fn"))


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_a_variant_says_what_it_is(path: Path) -> None:
    head = path.read_text().partition("defaults:")[0].splitlines()
    assert 2 <= len(head) <= 4 and all(line.startswith("# ") for line in head)
    assert re.search(r"arXiv \d{4}\.\d{5}", head[0])


def test_a_variant_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("variants/gspo").path == FOLDER / "gspo.yaml"
