"""`sft`: supervised fine-tuning. Its batch sizes are those of `policy` (policy.train_global_batch_size, ...)."""

from __future__ import annotations

from grpo_mcore.recipe.schema.section import NULL, Derived, Fixed, NonNegative, Positive, Section


class SFTConfig(Section):
    """`sft`. A step is one optimizer step. Read by algorithms/sft.py."""

    max_num_epochs: Positive = 1
    """Maximum number of passes over the training data."""
    max_num_steps: Positive = 60
    """Maximum number of steps."""
    val_period: NonNegative = 10
    """Steps between two validations. 0: never."""
    val_batches: Positive | None = 8
    """Batches of one validation. null: the whole validation data."""
    val_global_batch_size: Derived[Positive] = NULL
    """Samples of one validation batch. null: policy.train_global_batch_size."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: Fixed[NonNegative] = 42
    """Seed of the data order."""
