"""From the entries of a recipe to one training and one validation dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mcore.data.datasets import DEFAULT_PROCESSOR, ResponseData, load_response_dataset
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.rows import Joined
from grpo_mcore.data.task_datasets import AllTaskProcessedDataset


@dataclass(frozen=True)
class TaskData:
    """`env_names` and `val_env_names`: task name -> the entry's env_name (None: the recipe's only one)."""

    train: AllTaskProcessedDataset
    validation: AllTaskProcessedDataset | None
    env_names: dict[str, str | None]
    val_env_names: dict[str, str | None]


def build_task_data(
    train: Sequence[Any],
    validation: Sequence[Any],
    tokenizer: Any,
    max_seq_length: int | None,
    default_processor: str = DEFAULT_PROCESSOR,
) -> TaskData:
    """Loads all entries of `data.train` and `data.validation`. What `split_validation_size` takes from a
    training dataset is validated on together with the validation datasets."""
    if not train:
        raise DataError("data.train is empty: name at least one dataset")
    loaded = _load(train, default_processor)
    held_out = [data for data in loaded if data.val_dataset is not None]
    loaded_val = _load(validation, default_processor, taken={data.task_name for data in loaded})

    train_set = _join([data.dataset for data in loaded], loaded, tokenizer, max_seq_length)
    val_rows = [*(data.val_dataset for data in held_out), *(data.dataset for data in loaded_val)]
    for_val = [*held_out, *loaded_val]
    return TaskData(
        train=train_set,
        validation=_join(val_rows, for_val, tokenizer, max_seq_length) if val_rows else None,
        env_names={data.task_name: data.env_name for data in loaded},
        val_env_names={data.task_name: data.env_name for data in for_val},
    )


def _load(entries: Sequence[Any], default_processor: str, taken: set[str] | None = None) -> list[ResponseData]:
    """Every dataset under a task name of its own, since prompts are named after it."""
    names = set(taken or ())
    loaded = []
    for entry in entries:
        data = load_response_dataset(entry, default_processor)
        name, number = data.task_name, 2
        while data.task_name in names:
            data.task_name = data.task_spec.task_name = f"{name}-{number}"
            number += 1
        names.add(data.task_name)
        loaded.append(data)
    return loaded


def _join(rows: list[Any], loaded: list[ResponseData], tokenizer: Any, limit: int | None) -> AllTaskProcessedDataset:
    processors = {data.task_name: (data.task_spec, data.processor) for data in loaded}
    return AllTaskProcessedDataset(
        rows[0] if len(rows) == 1 else Joined(rows), tokenizer, None, processors, max_seq_length=limit
    )
