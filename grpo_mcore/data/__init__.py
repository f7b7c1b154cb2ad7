"""Datasets, the processors that turn their rows into prompts, and the loaders that batch them.

Each name is imported when it is first used, so that `data.gym`, which only reads files, runs without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_mcore.data.batched_data_dict import BatchedDataDict
    from grpo_mcore.data.datasets import ResponseDataset, load_preference_dataset, load_response_dataset
    from grpo_mcore.data.interfaces import DataError, TaskDataSpec
    from grpo_mcore.data.loader import build_dataloader
    from grpo_mcore.data.multiple_loaders import (
        MultipleDataloaderWrapper,
        build_train_dataloader,
        example_custom_dataloader,
    )
    from grpo_mcore.data.task_datasets import AllTaskProcessedDataset, Excluded, TaskData, build_task_data
    from grpo_mcore.data.tokenizer import load_tokenizer
    from grpo_mcore.data.turn_tokens import TurnTemplate
    from grpo_mcore.rollout.datum import DatumSpec

_MODULES = {
    "AllTaskProcessedDataset": "grpo_mcore.data.task_datasets",
    "BatchedDataDict": "grpo_mcore.data.batched_data_dict",
    "DataError": "grpo_mcore.data.interfaces",
    "DatumSpec": "grpo_mcore.rollout.datum",
    "Excluded": "grpo_mcore.data.task_datasets",
    "MultipleDataloaderWrapper": "grpo_mcore.data.multiple_loaders",
    "ResponseDataset": "grpo_mcore.data.datasets",
    "TaskData": "grpo_mcore.data.task_datasets",
    "TaskDataSpec": "grpo_mcore.data.interfaces",
    "TurnTemplate": "grpo_mcore.data.turn_tokens",
    "build_dataloader": "grpo_mcore.data.loader",
    "build_task_data": "grpo_mcore.data.task_datasets",
    "build_train_dataloader": "grpo_mcore.data.multiple_loaders",
    "example_custom_dataloader": "grpo_mcore.data.multiple_loaders",
    "load_preference_dataset": "grpo_mcore.data.datasets",
    "load_response_dataset": "grpo_mcore.data.datasets",
    "load_tokenizer": "grpo_mcore.data.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
