"""A CPU run where TransformerEngine is installed: by its stand-in, whose kernels raise for tensors on a CPU.
test_sweep.py fine-tunes there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.plan.run_plan import plan_config
from tests.functional.runs import find_kernel_package


def test_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_kernel_package(monkeypatch)
    recipe = "grpo-qwen2.5-3B-1n1g-lora"
    model = plan_config(load_recipe(recipe).config) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    command = [sys.executable, "-m", "grpo_mcore.cli.main", "plan", recipe, f"policy.model_name={tmp_path}", "--trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "launches" in done.stdout
