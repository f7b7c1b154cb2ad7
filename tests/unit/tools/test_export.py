"""Which checkpoints of a run are exported, and what the command refuses before it reads a weight."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.cli.main import main
from grpo_mcore.recipe import CheckpointingConfig, load_recipe
from grpo_mcore.tools import export as tools


def checkpoints(folder: Path, accuracies: dict[int, float | None]) -> None:
    for step, accuracy in accuracies.items():
        metrics = {} if accuracy is None else {"val:accuracy": accuracy}
        (folder / f"step_{step}").mkdir(parents=True)
        info = {"save_state": {"current_step": step}, "metrics": metrics}
        (folder / f"step_{step}" / "training_info.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("save_hf", "higher_is_better", "steps"),
    [("none", True, []), ("last", True, [10]), ("best", True, [2]), ("best", False, [4]), ("all", True, [2, 4, 8, 10])],
)
def test_save_hf_chooses_among_the_kept_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_hf: Any, higher_is_better: bool, steps: list[int]
) -> None:
    checkpoints(tmp_path, {10: None, 8: 0.5, 2: 0.75, 4: 0.25})
    (tmp_path / "tmp_step_12").mkdir()
    done = []
    monkeypatch.setattr(tools, "export", lambda folder, target, replace: done.append((folder.name, target.name)))
    config = CheckpointingConfig(checkpoint_dir=str(tmp_path), save_hf=save_hf, higher_is_better=higher_is_better)
    found = tools.export_run(config)
    assert done == [(f"step_{step}", f"hf_step_{step}") for step in steps]
    assert found == [tmp_path / target for _, target in done]


def test_of_equal_checkpoints_the_newest_is_the_best(tmp_path: Path) -> None:
    checkpoints(tmp_path, {2: 0.5, 4: 0.5})
    best = tools.best_checkpoint(CheckpointingConfig(checkpoint_dir=str(tmp_path)))
    assert best == tmp_path / "step_4"


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_checkpoint_without_the_metric_is_not_the_best_and_is_named(
    tmp_path: Path, package_log: Any, higher_is_better: bool
) -> None:
    checkpoints(tmp_path, {2: 0.5, 4: None})
    config = CheckpointingConfig(checkpoint_dir=str(tmp_path), higher_is_better=higher_is_better)
    assert tools.best_checkpoint(config) == tmp_path / "step_2"
    assert "val:accuracy is missing in step_4, which cannot be the best; validate at the end" in package_log.text
    package_log.clear()
    assert tools.best_checkpoint(config.model_copy(update={"metric_name": "val:other"})) == tmp_path / "step_4"
    assert "missing in step_2, step_4, so the newest is taken for the best" in package_log.text


def test_the_command_says_what_is_wrong_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints(tmp_path, {2: 0.5})
    for words, message in (
        ([str(tmp_path / "nowhere")], "does not exist; give a folder step_N"),
        ([str(tmp_path / "step_2")], "has no config.yaml"),
        ([str(tmp_path)], "has no config.yaml"),
    ):
        assert main(["export", *words, "--output", str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
        assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(tmp_path)])
    (tmp_path / "step_2" / "config.yaml").touch()
    for info, message in (
        ("{", "step_2 is damaged: training_info.json cannot be read"),
        ('{"save_state": {"current_step": 2}, "format": 99}', "by a newer version of grpo_mcore"),
    ):
        (tmp_path / "step_2" / "training_info.json").write_text(info)
        assert main(["export", str(tmp_path), "--output", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err


def test_a_run_whose_critic_was_off_has_none_to_export(tmp_path: Path) -> None:
    checkpoints(tmp_path, {2: 0.5})
    recipe = load_recipe("grpo-arithmetic-cpu", ["defaults=presets/ppo", "ppo.enabled=false"]).config
    (tmp_path / "step_2" / "config.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    with pytest.raises(tools.ExportError, match="step_2 has no critic: its run trained none"):
        tools.export(tmp_path, tmp_path / "out", critic=True)


DATA = ("openai/gsm8k", "data/train.jsonl", "/data/mine.jsonl")


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B-Base"),
        ("/scratch/models/qwen", None),  # a folder that has moved: a hub refuses the card of an upload
        ("./results/hf", None),
        ("results/demo/base/hf", None),
    ],
)
def test_the_card_names_a_base_model_that_a_hub_can_know(model: str, base: str | None) -> None:
    words = [f"policy.model_name={model}", f"data.train=[{', '.join(f'{{data_path: {path}}}' for path in DATA)}]"]
    recipe = load_recipe("grpo-qwen3-8B-1n1g", words).config
    card = tools.model_card(tools.SavedCheckpoint(Path("step_1"), 1, {"loss": 0.5}, recipe), "transformers")
    header = yaml.safe_load(card.split("---")[1])
    assert header.get("base_model") == base and header["datasets"] == ["openai/gsm8k"]


def test_the_card_says_what_a_reader_wants(tmp_path: Path) -> None:
    """Base model, data, algorithm, and the validation before and after; the 60 metrics of a step are no card."""
    rows = [{"step": step, "prefix": "validation", "accuracy": value} for step, value in ((0, 0.25), (7, 0.75))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe("grpo-arithmetic-cpu", ["defaults=presets/gspo"]).config
    metrics = {"val:accuracy": 0.75, "train:refit/bytes": 2.0, "train:reward": 0.7}
    card = tools.model_card(tools.SavedCheckpoint(Path("step_7"), 7, metrics, recipe, tmp_path), "transformers")
    for line in (
        "| base model | `results/demo/base/hf` |", "| training data | train.jsonl |", "| rewards | math |",
        "| metric | before | after 7 steps |", "| val:accuracy | 0.25 | 0.75 |",
    ):  # fmt: skip
        assert line in card
    assert "| algorithm | preset gspo, " in card and "refit/bytes" not in card and "train:reward" not in card
    alone = tools.model_card(tools.SavedCheckpoint(Path("step_7"), 7, {"train:reward": 0.7}, recipe), "transformers")
    assert "| train:reward |  | 0.7 |" in alone
