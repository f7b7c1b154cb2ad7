"""Parameters made of several blocks of rows, in a distributed checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor


def sharded_in_parts(whole: Any, parts: Sequence[int]) -> Any:
    """Save and load a parameter block by block, because each block is split over tensor-parallel ranks by itself.

    `whole`: the parameter's ShardedTensor. `parts`: rows of each block on this rank.
    """
    template = whole.without_data()

    @torch.no_grad()
    def build(key: str, values: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        assert flattened_range is None
        tensor = replace(template, key=key, data=values, dtype=values.dtype, replica_id=replica_id)
        blocks, start = [], 0
        for number, rows in enumerate(parts):
            blocks += [replace(block, key=f"{key}.{number}") for block in tensor.narrow(0, start, rows)]
            start += rows
        return blocks

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)
