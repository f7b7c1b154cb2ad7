"""A run's recorded recipe is that of its own algorithm, whichever command reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.recipe import algorithm_of, load_recipe

RECIPES = {"grpo": "grpo-arithmetic-cpu", "sft": "sft-arithmetic-cpu", "dpo": "dpo", "rm": "rm"}


@pytest.mark.parametrize("algorithm", RECIPES)
@pytest.mark.parametrize(
    ("name", "beside", "text"),
    [
        ("config.yaml", "training_info.json", '{"save_state": {"current_step": 2, "algorithm": "NAME"}}'),
        ("hyperparams.json", "events.jsonl", '{"what": "begin", "algorithm": "NAME"}\n{"what": "step"}\n{"wha'),
    ],
)
def test_a_record_is_of_its_runs_algorithm(tmp_path: Path, algorithm: str, name: str, beside: str, text: str) -> None:
    written: dict[str, Any] = load_recipe(RECIPES[algorithm]).config.model_dump(mode="json")
    assert {"grpo", "sft", "dpo", "rm"} <= written.keys(), "it has the sections of all"
    (tmp_path / name).write_text(json.dumps(written))
    (tmp_path / beside).write_text(text.replace("NAME", algorithm))
    read = load_recipe(str(tmp_path / name)).config
    assert algorithm_of(read) == algorithm and read[algorithm].max_num_steps == written[algorithm]["max_num_steps"]
