"""Datasets, the processors that turn their rows into prompts, and the loaders that batch them. A name is imported when
it is first asked for: what reads files only (`data.gym`) does without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_mcore.data.assemble import TaskData, build_task_data
    from grpo_mcore.data.batched_data_dict import BatchedDataDict
    from grpo_mcore.data.datasets import ResponseDataset, load_preference_dataset, load_response_dataset
    from grpo_mcore.data.interfaces import DataError, DatumSpec, TaskDataSpec
    from grpo_mcore.data.loader import build_dataloader
    from grpo_mcore.data.multiple_loaders import (
        MultipleDataloaderWrapper,
        build_train_dataloader,
        example_custom_dataloader,
    )
    from grpo_mcore.data.task_datasets import AllTaskProcessedDataset, Excluded
    from grpo_mcore.data.tokenizer import load_tokenizer
    from grpo_mcore.data.turn_tokens import TurnTemplate

_HOME = {
    "AllTaskProcessedDataset": "task_datasets",
    "BatchedDataDict": "batched_data_dict",
    "DataError": "interfaces",
    "DatumSpec": "interfaces",
    "Excluded": "task_datasets",
    "MultipleDataloaderWrapper": "multiple_loaders",
    "ResponseDataset": "datasets",
    "TaskData": "assemble",
    "TaskDataSpec": "interfaces",
    "TurnTemplate": "turn_tokens",
    "build_dataloader": "loader",
    "build_task_data": "assemble",
    "build_train_dataloader": "multiple_loaders",
    "example_custom_dataloader": "multiple_loaders",
    "load_preference_dataset": "datasets",
    "load_response_dataset": "datasets",
    "load_tokenizer": "tokenizer",
}

__all__ = [
    "AllTaskProcessedDataset",
    "BatchedDataDict",
    "DataError",
    "DatumSpec",
    "Excluded",
    "MultipleDataloaderWrapper",
    "ResponseDataset",
    "TaskData",
    "TaskDataSpec",
    "TurnTemplate",
    "build_dataloader",
    "build_task_data",
    "build_train_dataloader",
    "example_custom_dataloader",
    "load_preference_dataset",
    "load_response_dataset",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
