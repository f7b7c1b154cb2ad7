"""Datasets, the processors that turn their rows into prompts, and the loaders that batch them."""

from grpo_mcore.data.assemble import TaskData, build_task_data
from grpo_mcore.data.datasets import ResponseDataset, load_response_dataset
from grpo_mcore.data.interfaces import DataError, DatumSpec, TaskDataSpec
from grpo_mcore.data.loader import build_dataloader
from grpo_mcore.data.task_datasets import AllTaskProcessedDataset, Excluded
from grpo_mcore.data.tokenizer import load_tokenizer

__all__ = [
    "AllTaskProcessedDataset",
    "DataError",
    "DatumSpec",
    "Excluded",
    "ResponseDataset",
    "TaskData",
    "TaskDataSpec",
    "build_dataloader",
    "build_task_data",
    "load_response_dataset",
    "load_tokenizer",
]
