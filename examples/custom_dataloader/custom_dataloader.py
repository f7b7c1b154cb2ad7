"""Functions for data.custom_dataloader, which take the prompts of a step from one data loader per dataset.

    grpo-mcore train RECIPE data.use_multiple_dataloader=true data.num_prompts_per_dataloader=16 \\
        data.custom_dataloader=examples.custom_dataloader.custom_dataloader.easier_first
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from grpo_mcore.data import BatchedDataDict, example_custom_dataloader
from grpo_mcore.data.multiple_loaders import Iterators

__all__ = ["easier_first", "example_custom_dataloader"]


def easier_first(
    data_iterators: Iterators,
    dataloaders: Mapping[str, StatefulDataLoader],
    expected_num_prompts: int,
    accuracy: float = 0.0,
    **_records: Any,
) -> tuple[BatchedDataDict, Iterators]:
    """Take prompts from the easier (first) dataset alone until half of the last step's samples were right, then from
    both datasets in turn. `accuracy` is a metric of the last step; the loop passes all of them with `set_records`."""
    easier, harder = dataloaders
    order = [easier] if accuracy < 0.5 else [harder, easier]
    batches, count = [], 0
    while count < expected_num_prompts:
        name = order[len(batches) % len(order)]
        batch = next(data_iterators[name], None)
        if batch is None:  # the dataset has ended: start it again
            data_iterators[name] = iter(dataloaders[name])
            batch = next(data_iterators[name])
        batches.append(batch)
        count += batch.size
    return BatchedDataDict.from_batches(batches), data_iterators
