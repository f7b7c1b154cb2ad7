"""Datasets, the processors that turn their rows into prompts, and the loaders that batch them.

Each name is imported when it is first used, so that `data.gym`, which only reads files, runs without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_mcore.data.batched_data_dict import BatchedDataDict
    from grpo_mcore.data.datasets import RawDataset, ResponseDataset, load_preference_dataset, load_response_dataset
    from grpo_mcore.data.interfaces import DataError, TaskDataSpec
    from grpo_mcore.data.loader import build_dataloader
    from grpo_mcore.data.multiple_loaders import (
        MultipleDataloaderWrapper,
        build_train_dataloader,
        example_custom_dataloader,
    )
    from grpo_mcore.data.task_datasets import AllTaskProcessedDataset, Excluded, TaskData, build_task_data
    from grpo_mcore.data.tokenizer import check_same_tokens, check_token_ids, load_tokenizer, say_other_ends
    from grpo_mcore.data.turn_tokens import TurnTemplate
    from grpo_mcore.recipe import extract_necessary_env_names
    from grpo_mcore.rollout.datum import DatumSpec

_MODULES = {
    "grpo_mcore.data.batched_data_dict": "BatchedDataDict",
    "grpo_mcore.data.datasets": "RawDataset ResponseDataset load_preference_dataset load_response_dataset",
    "grpo_mcore.data.interfaces": "DataError TaskDataSpec",
    "grpo_mcore.data.loader": "build_dataloader",
    "grpo_mcore.data.multiple_loaders": "MultipleDataloaderWrapper build_train_dataloader example_custom_dataloader",
    "grpo_mcore.data.task_datasets": "AllTaskProcessedDataset Excluded TaskData build_task_data",
    "grpo_mcore.data.tokenizer": "check_same_tokens check_token_ids load_tokenizer say_other_ends",
    "grpo_mcore.data.turn_tokens": "TurnTemplate",
    "grpo_mcore.recipe": "extract_necessary_env_names",
    "grpo_mcore.rollout.datum": "DatumSpec",
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
