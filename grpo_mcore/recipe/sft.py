"""`sft`: supervised fine-tuning. The batch sizes are policy.train_global_batch_size and its neighbours."""

from __future__ import annotations

from grpo_mcore.recipe.section import NonNegative, Positive, Section


class SFTConfig(Section):
    """`sft`. A step is one optimizer step. Read by algorithms/sft.py."""

    max_num_epochs: Positive = 1
    """Passes over the training data."""
    max_num_steps: Positive = 60
    """Largest number of steps."""
    val_period: NonNegative = 10
    """Validate every so many steps. 0: never."""
    val_batches: Positive | None = 8
    """Batches of one validation. null: the whole validation data."""
    val_global_batch_size: Positive | None = None
    """Samples of one validation batch. null: policy.train_global_batch_size."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: int = 42
    """Origin of the data order."""
