"""`grpo-mcore eval` with a real engine: a model and its checkpoint, an interruption, and other settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from tests.functional.preload import preload
from tests.functional.runs import Run, Task, called, grpo_recipe, write_recipe

SAMPLES = 4


def evaluate(recipe: Path, *words: str) -> tuple[int, str, str]:
    run = called(recipe.parent, "eval", *words, "--config", str(recipe))
    return run.code, run.out, run.err


def test_a_checkpoint_equals_its_export_and_an_interrupted_evaluation_goes_on(
    task: Task, model: Path, sft_run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "eval"
    section: dict[str, Any] = {"num_tests_per_prompt": 2, "num_seeds": 2, "k_value": 2, "save_path": str(folder)}
    recipe = write_recipe(tmp_path, grpo_recipe(task, model) | {"eval": section})
    code, out, err = evaluate(recipe, str(model), str(sft_run.checkpoints), "eval.num_prompts=24")
    assert code == 0, err
    first, second = json.loads((folder / "report.json").read_text())["scores"]
    assert first["model"] == str(model) and second["model"] == "checkpoints/step_20"
    assert {**first, "model": ""} == {**second, "model": ""}, "the checkpoint holds the weights of the model"
    assert first["num_prompts"] == 24 and first["num_samples"] == 24 * SAMPLES
    assert 0.2 < first["accuracy_low"] < first["accuracy"] < first["accuracy_high"] < 0.8
    assert first["pass@1"] <= first["pass@2"] <= first["pass@4"]

    report, samples = (folder / "report.md").read_text(), folder / "samples.jsonl"
    assert [line for line in out.splitlines() if line.startswith("|")] == report.splitlines()[2:6]
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 2 * 24 * SAMPLES
    assert {(line["truth"], line["reward"]) for line in lines if line["answer"] == "1"} == {("1", 1.0), ("0", 0.0)}

    whole = samples.read_text()
    kept = whole.splitlines(keepends=True)[: 2 * len(lines) // 3]  # all of the first model, and some of the second
    samples.write_text("".join(kept)[:-20])  # as if it had been killed while it wrote
    code, out, _ = evaluate(recipe, str(model), str(sft_run.checkpoints), "eval.num_prompts=24")
    assert code == 0 and (folder / "report.md").read_text() == report
    assert sorted(samples.read_text().splitlines()) == sorted(whole.splitlines())

    code, _, err = evaluate(recipe, str(model), "policy.generation.val_temperature=0.5")
    assert code == 1 and "holds samples that differ in temperature; choose another folder" in err
    assert "Traceback" not in err and (folder / "report.md").read_text() == report
    code, _, err = evaluate(recipe, str(model), "policy.hf_config_overrides={rope_theta: 5.0}")
    assert code == 1 and "holds samples that differ in hf_config_overrides" in err

    changed = samples.read_text()
    samples.write_text(changed.replace('"prompt": "', '"prompt": "Think. ', 1))  # of a prompt file that was edited
    code, _, err = evaluate(recipe, str(model), "eval.num_prompts=5")
    assert code == 1 and "has samples of another prompt" in err and "a prompt file or the chat template" in err
    samples.write_text(changed)
    code, _, err = evaluate(recipe, str(model), "eval.num_prompts=5")
    (score,) = json.loads((folder / "report.json").read_text())["scores"]
    assert code == 0 and (score["num_prompts"], score["num_samples"]) == (5, 5 * SAMPLES), "and no others of the folder"


def test_a_checkpoint_of_another_algorithm_is_evaluated_with_its_own_recipe_unless_it_is_damaged(
    sft_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.yaml has the sections of all algorithms."""
    preload()
    words = ["eval.num_prompts=2", "env={math: {num_workers: 1}}", "policy.generation.max_new_tokens=4"]
    words += ["policy.generation.vllm_cfg.kv_cache_memory_gb=0.1"]
    saved = shutil.copytree(sft_run.checkpoints / "step_20", tmp_path / "step_20")
    assert main(["eval", str(saved), *words, f"eval.save_path={tmp_path / 'good'}"]) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "good" / "report.json").read_text())["scores"][0]["num_prompts"] == 2
    weights = max((saved / "policy").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert main(["eval", str(saved), *words, f"eval.save_path={tmp_path / 'bad'}"]) == 1
    reason = f"step_20 is damaged: policy/{weights.name} is not what was saved (its digest differs)"
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere/model"], 1, "'nowhere/model' is not a folder here, and could not be fetched"),
        (["./nowhere"], 1, "there is no folder './nowhere'"),
        (["eval.k_value=3"], 2, "eval.k_value: 3 is more than the 1 samples of a prompt"),
        (["data.validation=null"], 1, "data.validation is empty"),
    ],
)
def test_mistakes_are_one_message(
    task: Task, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, grpo_recipe(task, model))
    found, _, err = evaluate(recipe, *words)
    assert found == code and message in err and "Traceback" not in err, err
    again = evaluate(recipe, *words, "policy.generation.val_temperature=0.5")
    assert again[2] == err, "what failed before its first sample leaves no settings to keep to"
