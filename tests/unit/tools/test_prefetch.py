"""`grpo-mcore prefetch` fetches from a hub that serves real HTTP, and opens everything again without it."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from grpo_mcore.cli.main import main
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.prefetch import find, needs_of
from tests.hub_server import hub

RECIPE = """
defaults: grpo-arithmetic-cpu
policy:
  model_name: tiny/qwen3
  tokenizer: {chat_template: "{% for m in messages %}{{ m.content }} {% endfor %}"}
data:
  train: {dataset_name: ResponseDataset, data_path: tiny/sums, split: train}
  validation: [{data_path: VAL}, {data_path: hf://datasets/tiny/sums/train.jsonl}]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "val.jsonl").write_text(json.dumps({"input": "1 + 1", "output": "2"}) + "\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("VAL", str(tmp_path / "val.jsonl")))
    return path


def test_what_a_recipe_needs() -> None:
    config = load_recipe("grpo-math-8B", ("policy.tokenizer.name=some/tokenizer",)).config
    kinds = [(need.kind, need.key) for need in needs_of(config)]
    assert kinds[:2] == [("model", "policy.model_name"), ("tokenizer", "policy.tokenizer.name")]
    assert [key for kind, key in kinds if kind == "data"][0] == "data.train[0]"
    critic = load_recipe("grpo-math-8B", ("defaults=presets/ppo", "value.model_name=some/critic")).config
    assert [need.name for need in needs_of(critic) if need.key == "value.model_name"] == ["some/critic"]
    teacher = load_recipe("distillation_math").config
    assert any("teacher_model_by_agent_name" in need.key for need in needs_of(teacher))


@pytest.mark.slow
def test_fetched_opened_offline_and_staged(tmp_path, monkeypatch, capsys, recipe) -> None:
    """A model and a dataset come from the hub; without it, with the cache alone, both open. A file that is lost from
    the cache is noticed, and a node's disk gets the model whole."""
    model = make_tiny_model("qwen3", tmp_path / "model", words=True)
    sums = tmp_path / "sums"
    sums.mkdir()
    rows = [json.dumps({"input": f"{i} + 1", "output": str(i + 1)}) for i in range(70)]
    (sums / "train.jsonl").write_text("\n".join(rows) + "\n")
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as a shell has it that starts runs
    with hub({"models/tiny/qwen3": model, "datasets/tiny/sums": sums}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        code = main(["prefetch", str(recipe), "--folder", str(cache)])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "tiny/qwen3 (policy.model_name): " in said and said.count("70 rows, opened without the network") == 2
    assert f"export HF_HOME={cache}" in said

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    local = tmp_path / "local"
    assert main(["prefetch", str(recipe), "--stage", str(local)]) == 0
    assert main(["prefetch", str(recipe), "--stage", str(local)]) == 0
    copied, kept = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model tiny/qwen3")]
    assert "GB copied to" in copied and "is in" in kept
    [staged] = (local / "hub/models--tiny--qwen3/snapshots").iterdir()
    assert (staged / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert [path.name for path in (local / "hub").iterdir()] == ["models--tiny--qwen3"]

    config = load_recipe(str(recipe)).config
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(local / "hub"))
    assert find(config, needs_of(config)[0]).error is None
    (staged / "model.safetensors").unlink()
    assert "complete the snapshot" in str(find(config, needs_of(config)[0]).error)


def test_staging_asks_for_the_cache_first(tmp_path, monkeypatch, capsys, recipe) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    assert main(["prefetch", str(recipe), "--stage", str(tmp_path / "local")]) == 1
    assert "policy.model_name: tiny/qwen3 is not in" in capsys.readouterr().err
