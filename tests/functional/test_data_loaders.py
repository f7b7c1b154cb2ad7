"""Runs on several datasets, uninterrupted and resumed: one loader each, a function that mixes them by the last step's
metrics, and validation sets that are reported separately."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.data import BatchedDataDict
from tests.functional.runs import Task, assert_one_message, finished, grpo_recipe, run_here

seen: list[dict[str, Any]] = []


def by_step(data_iterators, dataloaders, expected_num_prompts, step=0, **records):
    """Take a batch of each dataset in the first two steps, and only the second dataset after them."""
    seen.append({"step": step, **records})
    first, second = dataloaders
    batches = []
    for name in [first, second] if step < 2 else [second, second]:
        batch = next(data_iterators[name], None)
        if batch is None:
            data_iterators[name] = iter(dataloaders[name])
            batch = next(data_iterators[name])
        batches.append(batch)
    return BatchedDataDict.from_batches(batches), data_iterators


@pytest.fixture(scope="module")
def recipe(task: Task, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    rows, held_out = task.train.read_text().splitlines(keepends=True), task.val.read_text().splitlines(keepends=True)
    parts = {"few": rows[:3], "many": rows[3:40], "val_a": held_out[:3], "val_b": held_out[3:20]}
    for name, lines in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(lines))
    recipe = grpo_recipe(task, model)
    recipe["data"] = {
        "train": [{"data_path": str(folder / f"{name}.jsonl"), "task_name": name} for name in ("few", "many")],
        "validation": [{"data_path": str(folder / f"{name}.jsonl"), "task_name": name} for name in ("val_a", "val_b")],
        "use_multiple_dataloader": True,
        "num_prompts_per_dataloader": 2,
        "custom_dataloader": f"{__name__}.by_step",
        "shuffle": False,
    }
    recipe["checkpointing"] = {"save_period": 2, "metric_name": None}
    return recipe


def test_a_resumed_run_equals_an_uninterrupted_one_and_keeps_its_way_to_load_the_data(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_mcore.driver.rollouts.rollouts import Rollouts

    asked: list[list[str]] = []
    dispatch = Rollouts.dispatch

    def recorded(self: Rollouts, batch: Any, *args: Any, **options: Any) -> Any:
        asked.append([prompt["uid"] for prompt in batch])
        return dispatch(self, batch, *args, **options)

    monkeypatch.setattr(Rollouts, "dispatch", recorded)
    seen.clear()
    whole = finished("train", tmp_path / "whole", recipe, "grpo.val_at_end=true")
    steps, validation = asked[:4], asked[4:]
    assert steps == [
        ["few:1", "few:2", "many:1", "many:2"],
        ["few:1@2", "few:2@2", "many:3", "many:4"],  # few:3 does not fill a batch
        ["many:5", "many:6", "many:7", "many:8"],
        ["many:9", "many:10", "many:11", "many:12"],
    ]
    # grpo.max_val_samples is 8: all of the small set, and the rest of the other one.
    val = [uid for batch in validation for uid in batch]
    assert sorted(val) == ["val_a:1", "val_a:2", "val_a:3", *(f"val_b:{n}" for n in range(1, 6))]
    [line] = whole.metrics("validation")
    counts = {name: line[f"{name}/num_samples"] for name in ("val_a", "val_b")}
    assert counts == {"val_a": 3, "val_b": 5} and line["num_samples"] == 8
    accuracy = sum(count * line[f"{name}/accuracy"] for name, count in counts.items()) / 8
    assert line["accuracy"] == pytest.approx(accuracy)

    metrics = whole.metrics()
    assert [records["step"] for records in seen] == [0, 1, 2, 3]
    assert [records.get("reward") for records in seen] == [0.0, *(line["reward"] for line in metrics[:3])]
    assert all(records["accuracy"] >= 0 for records in seen[1:])

    asked.clear()
    resumed = finished("train", tmp_path / "resumed", recipe, "--resume", str(whole.checkpoints / "step_2"))
    assert asked == steps[2:]
    assert resumed.outcome() == whole.outcome()[2:]

    refused = run_here("train", tmp_path / "resumed", recipe, "--resume", "data.use_multiple_dataloader=false")
    assert_one_message(refused, 1, "data.use_multiple_dataloader: true -> false", "which a resumed run keeps")


def test_a_missing_function(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = run_here("train", tmp_path, recipe, "data.custom_dataloader=no.such_function")
    assert_one_message(run, 1, "cannot import the custom_dataloader 'no.such_function'")
    assert not list((tmp_path / "logs").glob("*/metrics.jsonl")) or not run.metrics()


def test_the_documented_example(recipe: dict[str, Any], tmp_path: Path) -> None:
    """The documented override works as written."""
    data = recipe["data"] | {"custom_dataloader": None}
    word = "data.custom_dataloader=examples.custom_dataloader.custom_dataloader.example_custom_dataloader"
    run = finished("train", tmp_path, recipe | {"data": data}, word, "grpo.max_num_steps=1")
    assert json.loads((run.logs / "summary.json").read_text())["steps"] == 1
