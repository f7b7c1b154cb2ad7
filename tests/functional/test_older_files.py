"""What version 0.2 wrote (run_of_0_2: the first two of four steps of a run, with its samples) is read and gone on from;
what a newer version wrote is refused by name."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from grpo_mcore.base.files import FORMATS
from grpo_mcore.cli.main import main
from grpo_mcore.driver.checkpoints.checkpoint_files import ResumeError
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.observe import LedgerError, read_ledger
from grpo_mcore.observe.samples import SamplesError, read_samples
from grpo_mcore.recipe import RecipeError, load_recipe
from tests.functional.preload import preload


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(Path(__file__).parent / "run_of_0_2", folder)
    monkeypatch.chdir(folder)
    return folder


def test_a_run_of_0_2_goes_on_to_its_end(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preload()
    assert main(["train", "recipe.yaml", "--resume"]) == 0, capsys.readouterr().err
    info = json.loads((run / "checkpoints" / "step_4" / "training_info.json").read_text())
    assert info["save_state"]["current_step"] == 4 and info["format"] == FORMATS["checkpoint"]
    lines = [json.loads(line) for line in (run / "logs" / "exp_001" / "metrics.jsonl").read_text().splitlines()]
    before, after = ([line for line in lines if line["prefix"] == "train"][part] for part in (slice(2, 4), slice(4, 6)))
    for old, new in zip(before, after, strict=True):  # the steps that 0.2 made, and the same ones now
        assert (old["step"], old["num_samples"]) == (new["step"], new["num_samples"])
        assert new["prompt_length"] == pytest.approx(old["prompt_length"])
    capsys.readouterr()
    assert main(["ledger", "checkpoints"]) == 0, capsys.readouterr().out
    assert main(["report", "logs/exp_001"]) == 0, capsys.readouterr().err
    assert len(read_samples(run / "logs/exp_001/samples/train/step_000001.parquet")) == 16


def test_files_of_a_newer_version_are_refused_by_name(run: Path) -> None:
    newer = {kind: known + 1 for kind, known in FORMATS.items()}
    path = run / "checkpoints" / "step_2" / "training_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": newer["checkpoint"]}))
    manager = CheckpointManager(load_recipe("recipe.yaml").config.checkpointing)
    for resume in (True, "auto", "checkpoints/step_2"):
        with pytest.raises(ResumeError, match="step_2 was written by a newer version.*format 2 of its checkpoint"):
            manager.open(resume)
    recipe = run / "recipe.yaml"
    recipe.write_text(f"format: {FORMATS['recipe']}\n" + recipe.read_text())
    assert load_recipe("recipe.yaml").config.grpo.max_num_steps == 4
    recipe.write_text(f"format: {newer['recipe']}\n" + recipe.read_text().partition("\n")[2])
    with pytest.raises(RecipeError, match=r"recipe.yaml:1: format: written by a newer version.*format 2 of its recipe"):
        load_recipe("recipe.yaml")
    ledger = run / "checkpoints" / "ledger.jsonl"
    ledger.write_text(ledger.read_text() + json.dumps({"event": "started", "format": newer["ledger"]}) + "\n")
    with pytest.raises(LedgerError, match="format 3 of its ledger; this version reads up to 2: upgrade grpo_mcore"):
        read_ledger(ledger)
    samples = run / "logs/exp_001/samples/train/step_000001.parquet"
    table = pq.read_table(samples)
    pq.write_table(table.replace_schema_metadata({"grpo_mcore.format": str(newer["samples"])}), samples)
    with pytest.raises(SamplesError, match="format 2 of its samples"):
        read_samples(samples)
