"""A checkpoint written at once, by the steps that a run takes in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo_mcore.algorithms.checkpointing.checkpoints import (
    CheckpointManager,
    RunSnapshot,
    policy_folder,
    recipe_text,
    write_driver_files,
)
from grpo_mcore.recipe import MasterConfig


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
