"""Folders of checkpoints: whole or not at all, the best kept, two runs never mixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mcore.algorithms.checkpoints import CheckpointManager, ResumeError
from grpo_mcore.recipe import CheckpointingConfig, MasterConfig

RECIPE = MasterConfig.model_validate({"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x.jsonl"}}})


def manager(folder: Path, **config: object) -> CheckpointManager:
    return CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder), **config))


def save(checkpoints: CheckpointManager, step: int, **metrics: float) -> Path:
    named = {name.replace("_", ":", 1): value for name, value in metrics.items()}
    return checkpoints.save(
        step, lambda folder: Path(folder).mkdir(), {"place": step}, {"current_step": step}, named, RECIPE
    )


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=2)
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.8), (4, 0.1)):
        save(checkpoints, step, val_accuracy=accuracy)
    assert kept(tmp_path) == ["step_1", "step_3", "step_4"]
    assert checkpoints.latest() == tmp_path / "step_4"
    assert checkpoints.read(tmp_path / "step_3") == ({"current_step": 3}, {"place": 3})


def test_a_lower_metric_can_be_the_better_one(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=1, metric_name="val:loss", higher_is_better=False)
    for step, loss in ((1, 0.2), (2, 0.9), (3, 0.5)):
        save(checkpoints, step, val_loss=loss)
    assert kept(tmp_path) == ["step_1", "step_3"]


def test_the_one_just_saved_is_kept_whatever_lies_there(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=1)
    save(checkpoints, 90, val_accuracy=0.9)
    assert save(checkpoints, 10, val_accuracy=0.1).is_dir()


def test_a_run_that_does_not_resume_refuses_the_folder_of_another(tmp_path: Path) -> None:
    save(manager(tmp_path), 5)
    with pytest.raises(ResumeError, match="holds step_5 of another run: go on from it with --resume"):
        manager(tmp_path).refuse_to_mix()
    manager(tmp_path, enabled=False).refuse_to_mix()


def test_what_a_kill_left_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=1)
    (tmp_path / "step_7").mkdir()  # half deleted
    (tmp_path / "tmp_step_8").mkdir()  # half written
    assert checkpoints.latest() is None
    save(checkpoints, 8)
    save(checkpoints, 9)
    assert checkpoints.latest() == tmp_path / "step_9"
    with pytest.raises(ResumeError, match="is no checkpoint: training_info.json is missing"):
        checkpoints.find(tmp_path / "step_7")


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)

    def full_disk(folder: str) -> None:
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(2, full_disk, {}, {}, {}, RECIPE)
    assert checkpoints.latest() == tmp_path / "step_1"


def test_resume_without_a_checkpoint_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=f"no step_N folder in {tmp_path}"):
        manager(tmp_path).find(True)
    assert manager(tmp_path).find(None) is None


def test_resume_auto_goes_on_where_it_can(tmp_path: Path) -> None:
    assert manager(tmp_path).find("auto") is None
    saved = save(manager(tmp_path), 4)
    assert manager(tmp_path).find("auto") == saved
