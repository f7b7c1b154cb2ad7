"""Datasets: loaded from a recipe's entry, their rows in chat format."""

from grpo_mcore.data.datasets.mapped import Entry, MappedDataset, setting
from grpo_mcore.data.datasets.registry import (
    DATASET_CLASSES,
    DEFAULT_PROCESSOR,
    PREFERENCE_CLASSES,
    RawDataset,
    ResponseData,
    ResponseDataset,
    load_preference_dataset,
    load_response_dataset,
    needs_answer,
    rows_of_file,
    table_options,
    unseen,
)
from grpo_mcore.data.datasets.source import Source
