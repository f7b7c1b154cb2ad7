"""`grpo-mcore doctor`: exit codes, JSON, and what a recipe asks for."""

import json
from typing import Any

import pytest

from grpo_mcore.cli.check.doctor import needs_of
from grpo_mcore.cli.main import main
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools import doctor
from grpo_mcore.tools.doctor import CheckResult, Needs


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("fault", 1)])
def test_a_fault_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Any, code: int
) -> None:
    asked: list[Needs] = []
    finding = CheckResult("disk", state, "results: full", "make room")
    monkeypatch.setattr(doctor, "examine", lambda needs: asked.append(needs) or [finding])
    assert main(["doctor", "--port", "6379", "--port", "8265"]) == code
    assert "results: full; make room" in capsys.readouterr().out and asked[0].ports == (6379, 8265)
    assert main(["doctor", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == code and found["nodes"][""][0]["advice"] == "make room"


def test_what_a_recipe_asks_for() -> None:
    needs = needs_of(load_recipe("grpo-llama3.1-8B-2n8g").config)
    assert (needs.gpu, needs.nodes, needs.gpus_per_node) == (True, 2, 8)
    assert needs.folders == {"checkpoints": "results/grpo-llama3.1-8B-2n8g", "logs": "logs"}
    assert needs.model == "meta-llama/Llama-3.1-8B-Instruct" and needs.shm_bytes > 4 * 2**30
    assert needs_of(load_recipe("grpo-arithmetic-cpu").config).gpu is False
    assert needs_of(load_recipe("grpo-code-cpu").config).sandbox and not needs.sandbox
    trusting = load_recipe("grpo-code-cpu", ["env.code.sandbox=none_i_trust_the_code"]).config
    assert not needs_of(trusting).sandbox


@pytest.mark.parametrize(
    ("recipe", "kernels"),
    [
        ("grpo-llama3.1-8B-2n8g", ()),
        ("grpo-nanov3-30BA3B-2n8g", ("mamba_ssm", "causal_conv1d")),
        ("grpo-qwen3.5-35BA3B-4n8g", ("fla", "causal_conv1d")),
    ],
)
def test_kernels_for_a_recipes_model(recipe: str, kernels: tuple[str, ...]) -> None:
    assert needs_of(load_recipe(recipe).config).gpu_packages == ("transformer_engine.pytorch", *kernels)
    unknown = load_recipe(recipe, ["policy.model_name=someone/something"]).config
    assert needs_of(unknown).gpu_packages == ("transformer_engine.pytorch",)


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["doctor", "--cluster"]) == 1
    assert "RAY_ADDRESS is not set" in capsys.readouterr().out
