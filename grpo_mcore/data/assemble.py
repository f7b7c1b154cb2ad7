"""From the entries of a recipe to the training data and one validation dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mcore.data.datasets import DEFAULT_PROCESSOR, ResponseData, load_response_dataset
from grpo_mcore.data.datasets.mapped import setting
from grpo_mcore.data.datasets.rows import InTurn, Joined
from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.task_datasets import AllTaskProcessedDataset


@dataclass(frozen=True)
class TaskData:
    """`train`: one dataset, or each by its task name. `env_names` and `val_env_names`: task name -> the entry's
    env_name (None: the recipe's only one)."""

    train: AllTaskProcessedDataset | dict[str, AllTaskProcessedDataset]
    validation: AllTaskProcessedDataset | None
    env_names: dict[str, str | None]
    val_env_names: dict[str, str | None]


def build_task_data(
    train: Sequence[Any],
    validation: Sequence[Any],
    tokenizer: Any,
    max_seq_length: int | None,
    default_processor: str = DEFAULT_PROCESSOR,
    *,
    separate: bool = False,
) -> TaskData:
    """Loads all entries of `data.train` and `data.validation`. What `split_validation_size` takes from a
    training dataset is validated on together with the validation datasets.

    The validation data has a row of each dataset in turn, so that what grpo.max_val_samples leaves of it has its share
    of each. `separate`: keep the training datasets apart, for data.use_multiple_dataloader.
    """
    if not train:
        raise DataError("data.train is empty: name at least one dataset")
    loaded = _load(train, default_processor)
    held_out = [data for data in loaded if data.val_dataset is not None]
    loaded_val = _load(validation, default_processor, taken={data.task_name for data in loaded})

    def processed(rows: Sequence[dict[str, Any]], of: list[ResponseData]) -> AllTaskProcessedDataset:
        processors = {data.task_name: (data.task_spec, data.processor) for data in of}
        return AllTaskProcessedDataset(rows, tokenizer, None, processors, max_seq_length=max_seq_length)

    train_set: AllTaskProcessedDataset | dict[str, AllTaskProcessedDataset]
    if separate:
        train_set = {data.task_name: processed(data.dataset, [data]) for data in loaded}
    else:
        train_set = processed(_one(Joined, [data.dataset for data in loaded]), loaded)
    val_rows = [*(data.val_dataset for data in held_out), *(data.dataset for data in loaded_val)]
    for_val = [*held_out, *loaded_val]
    return TaskData(
        train=train_set,
        validation=processed(_one(InTurn, val_rows), for_val) if val_rows else None,
        env_names={data.task_name: data.env_name for data in loaded},
        val_env_names={data.task_name: data.env_name for data in for_val},
    )


def _load(entries: Sequence[Any], default_processor: str, taken: set[str] | None = None) -> list[ResponseData]:
    """Every dataset under a task name of its own, since prompts are named after it."""
    names = set(taken or ())
    loaded = []
    for entry in entries:
        data = load_response_dataset(entry, default_processor)
        if data.task_name in names:
            split = setting(entry, "split")
            further = [f"{data.task_name}-{split}"] if split and split.isidentifier() else []
            further += [f"{data.task_name}-{number}" for number in range(2, len(names) + 3)]
            data.task_name = data.task_spec.task_name = next(name for name in further if name not in names)
        names.add(data.task_name)
        loaded.append(data)
    return loaded


def _one(join: type[Joined | InTurn], parts: list[Any]) -> Sequence[dict[str, Any]]:
    return parts[0] if len(parts) == 1 else join(parts)
