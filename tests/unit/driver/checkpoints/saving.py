"""Checkpoints written at once, by the steps that a run takes in the background."""

from collections.abc import Callable
from pathlib import Path

from grpo_mcore.driver.checkpoints.checkpoint_files import RunSnapshot, policy_folder, recipe_text, write_driver_files
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.recipe import CheckpointingConfig, MasterConfig


def save_now(
    checkpoints: CheckpointManager,
    step: int,
    save_policy: Callable[[str], None],
    snapshot: RunSnapshot,
    recipe: MasterConfig,
) -> Path:
    """Write `step_N` and return its folder. Raises NotWritten."""
    with checkpoints.writing(step) as tmp:
        checkpoints.make_room(tmp)
        write_driver_files(tmp, snapshot, recipe_text(recipe))
        save_policy(policy_folder(tmp))
        return checkpoints.publish(step)


RECIPE = MasterConfig.model_validate({"policy": {"model_name": "m"}, "data": {"train": {"data_path": "x.jsonl"}}})


def manager(folder: Path, **config: object) -> CheckpointManager:
    return CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder), **config))


def write_policy(folder: str) -> None:
    Path(folder).mkdir()
    (Path(folder) / "weights").write_bytes(b"1234")


def save(checkpoints: CheckpointManager, step: int, **metrics: float) -> Path:
    named = {name.replace("_", ":", 1): value for name, value in metrics.items()}
    return save_now(
        checkpoints, step, write_policy, RunSnapshot({"current_step": step}, {"place": step}, named), RECIPE
    )
