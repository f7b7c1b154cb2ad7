"""A run on the CPU where TransformerEngine is installed: by its stand-in, whose kernels raise for tensors on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.plan.plan import plan_config
from tests.functional.runs import Task, run_command, sft_recipe

STAND_INS = str(Path(__file__).parents[1] / "stand_ins")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that are started import the stand-in, and check that they do."""
    monkeypatch.setenv("PYTHONPATH", STAND_INS, prepend=":")
    subprocess.run([sys.executable, "-c", "import transformer_engine.pytorch"], check=True, timeout=120)


def test_fine_tuning(task: Task, tmp_path: Path) -> None:
    """Two updates: gradients are clipped and Adam steps by torch's own kernels."""
    run = run_command("sft", tmp_path, sft_recipe(task), "sft.max_num_steps=2", "sft.val_at_start=false")
    assert run.code == 0, run.err
    assert len([line for line in run.metrics() if "loss" in line]) == 2


def test_a_trace(tmp_path: Path) -> None:
    recipe = "grpo-qwen2.5-3B-1n1g-lora"
    model = plan_config(load_recipe(recipe).config) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    command = [sys.executable, "-m", "grpo_mcore.cli.main", "plan", recipe, f"policy.model_name={tmp_path}", "--trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "launches" in done.stdout
