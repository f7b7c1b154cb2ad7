"""A run that follows a recorded one comes to the same weights, whatever chance decided in the first; and what another
loss would have made of its steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.observe import audit, read_ledger
from tests.functional.runs import Run, Task, assert_one_message, finished, grpo_recipe, run_here

PROMPTS = 24


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path) -> dict[str, Any]:
    """Return a recipe of age 2 with refits in flight: the engine generates six samples at a time."""
    data = task.folder / "short-24.jsonl"
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:PROMPTS]))
    recipe = grpo_recipe(task, task.untrained)
    ahead = {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True}
    ahead |= {"group_order": "oldest_first", "partial_rollouts": True}
    recipe["grpo"] |= {"max_num_steps": 99, "max_num_epochs": 1, "val_period": 3, "async_grpo": ahead}
    recipe["loss_fn"] |= {"use_importance_sampling_correction": True}
    recipe["data"] = {"train": {"data_path": str(data)}, "validation": {"data_path": str(task.val)}}
    recipe["env"] = {
        "math": {"environment": "rules", "num_workers": 1, "components": {"length": {"type": "length", "max": 8}}}
    }
    recipe["checkpointing"] = {"save_period": 2, "metric_name": None, "keep_top_k": None}
    recipe["policy"] |= {"max_total_sequence_length": 40}
    recipe["policy"]["generation"] |= {"max_new_tokens": 30}
    recipe["policy"]["generation"].setdefault("vllm_cfg", {})["max_num_seqs"] = 6
    return recipe


@pytest.fixture(scope="module")
def recorded(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished("train", tmp_path_factory.mktemp("recorded"), recipe)


def entries_of(run: Run) -> list[dict[str, Any]]:
    entries = read_ledger(run.checkpoints / "ledger.jsonl")
    return [{name: value for name, value in entry.items() if name != "time"} for entry in entries]


def weights_of(run: Run, step: int) -> dict[str, bytes]:
    folder = run.checkpoints / f"step_{step}" / "policy"
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.distcp"))}


def followed_of(run: Run) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((run.logs / "summary.json").read_text())["followed"]
    return outcome


def test_it_comes_to_the_same_weights_ledger_and_metrics(recipe: dict[str, Any], recorded: Run, tmp_path: Path) -> None:
    assert max(line["trajectory_age_max"] for line in recorded.metrics()) == 2
    assert all(line["grad_norm"] > 0 for line in recorded.metrics())
    run = finished("train", tmp_path, recipe, "--follow", str(recorded.logs))
    assert weights_of(run, 6) == weights_of(recorded, 6)
    assert entries_of(run) == entries_of(recorded)
    assert run.outcome() == recorded.outcome() and run.outcome("validation") == recorded.outcome("validation")
    outcome = followed_of(run)
    assert outcome["steps"] == 6 and outcome["differs_first"] is None and outcome["worst_logprob"] == 0


def test_it_goes_on_from_a_checkpoint_of_the_run(recipe: dict[str, Any], recorded: Run, tmp_path: Path) -> None:
    start = recorded.checkpoints / "step_2"
    run = finished("train", tmp_path, recipe, "--follow", str(recorded.logs), "--resume", str(start))
    assert weights_of(run, 6) == weights_of(recorded, 6)
    assert followed_of(run)["steps"] == 4 and followed_of(run)["differs_first"] is None
    found = audit(read_ledger(run.checkpoints / "ledger.jsonl"))
    assert not found.flaws and found.fates["trained on"] == PROMPTS


def test_another_recipe_leaves_the_record_by_name(recipe: dict[str, Any], recorded: Run, tmp_path: Path) -> None:
    run = run_here("train", tmp_path, recipe, "--follow", str(recorded.logs), "grpo.seed=7")
    assert_one_message(run, 1, "the run leaves its record", "ledger.jsonl has", '"event": "dispatched"')
    assert "with other values of" in run.out and "grpo.seed" in run.out


def test_losses_are_compared_on_a_recorded_step(recorded: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The norm of the run's own gradient is the one that training measured."""
    capsys.readouterr()
    assert main(["replay", str(recorded.logs), "--step", "3", "--loss", "own", "--loss", "ratio_clip_max=0.9"]) == 0
    out = capsys.readouterr().out
    table = {line.split("  ")[0].strip(): line.split() for line in out.splitlines() if line}
    assert float(table["own"][1]) == pytest.approx(recorded.metrics()[2]["grad_norm"], rel=1e-3)
    assert table["own"][2:] == table["ratio_clip_max=0.9"][2:] == ["1.0000", "1.0000"]  # nothing is clipped here
    shares = [table[f"advantage: {name} advantage"][-1] for name in ("positive", "negative")]
    assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=0.2)
    assert main(["replay", str(recorded.logs), "--step", "3", "--loss", "reinforce-plus-plus"]) == 1
    assert "loss_fn.use_kl_in_reward changes the advantages" in capsys.readouterr().err
