"""`logger` and `checkpointing`: what a run leaves behind."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_mcore.recipe.section import NonNegative, Positive, Section


class WandbConfig(Section):
    """`logger.wandb`. Read by observe/."""

    project: str | None = None
    """Project of Weights & Biases."""
    name: str | None = None
    """Name of the run there."""
    entity: str | None = None
    """User or team there."""


class TensorBoardConfig(Section):
    """`logger.tensorboard`. Read by observe/."""

    log_dir: str | None = None
    """Folder of the event files, inside the run's log folder. null: tensorboard."""


class GRPOLoggerConfig(Section):
    """`logger`. A JSONL file of all metrics is always written. Read by observe/."""

    log_dir: str = "logs"
    """Folder of the logs, from the working directory; each run gets its own folder in it."""
    wandb_enabled: bool = False
    """Log to Weights & Biases."""
    tensorboard_enabled: bool = False
    """Log to TensorBoard."""
    num_val_samples_to_print: NonNegative = 0
    """Validation samples printed at each validation. Also read by algorithms/."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Where wandb_enabled logs to."""
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    """Where tensorboard_enabled logs to."""


class CheckpointingConfig(Section):
    """`checkpointing`. Read by algorithms/ and parallel/."""

    enabled: bool = True
    """Write checkpoints."""
    checkpoint_dir: str = "results/grpo"
    """Folder of the checkpoints, from the working directory; it must be the same on all nodes."""
    metric_name: Annotated[str, Field(pattern=r"^(val|train):.+")] | None = "val:accuracy"
    """Metric that ranks checkpoints: "val:" or "train:" and its name. null: the newest are kept."""
    higher_is_better: bool = True
    """A higher metric ranks higher."""
    keep_top_k: Positive | None = 3
    """Checkpoints to keep, by rank; the newest is always kept. null: all."""
    save_period: Positive = 10
    """Write one every so many steps."""
    save_optimizer: bool = True
    """Write the optimizer state too, without which a run cannot be resumed exactly."""
    is_async: bool = False
    """Write them beside the steps that follow: training waits only until their values are copied. A run that ends in
    the middle may then have lost the one that was being written. false: training waits until they are written."""
    checkpoint_must_save_by: Annotated[str, Field(pattern=r"^\d+:\d\d:\d\d:\d\d$")] | None = None
    """Time since its start after which a run finishes its step, saves and ends, as "DD:HH:MM:SS": leave room for the
    longest step and a save. null: none. Read by cli/."""
    ft_save_period: Positive | None = None
    """Period of extra checkpoints for crash recovery, in steps. Not supported yet."""
    ft_keep_latest_k: Positive | None = None
    """Crash-recovery checkpoints to keep. Not supported yet."""

    @property
    def seconds_to_save_by(self) -> int | None:
        """checkpoint_must_save_by in seconds."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = map(int, self.checkpoint_must_save_by.split(":"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
