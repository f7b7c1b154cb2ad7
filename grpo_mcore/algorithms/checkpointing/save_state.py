"""What a checkpoint remembers of the loop."""

from __future__ import annotations

from typing import TypedDict


class GRPOSaveState(TypedDict, total=False):
    """What a checkpoint remembers of the loop. Samples and steps count from the start of the run."""

    consumed_samples: int  # prompts
    current_step: int
    current_epoch: int
    total_steps: int
    total_valid_tokens: int
    val_reward: float
    val_metrics: dict[str, float | None]  # of the validation after current_step, if there was one
    log_run: str  # the run's folder in logger.log_dir, in which a resumed run goes on


def first_save_state() -> GRPOSaveState:
    return GRPOSaveState(consumed_samples=0, current_step=0, current_epoch=0, total_steps=0, total_valid_tokens=0)
