"""`data`: datasets and their loading. Both layouts of recipes end up in the one here: see data_layouts.py."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from grpo_mcore.recipe.section import NonNegative, NonNegativeFloat, Positive, Section

# Datasets that are whatever `data_path` holds; any other name is a dataset of its own.
FILE_DATASETS = ("ResponseDataset", "openai_format")


class DatasetEntry(Section):
    """One dataset: an entry of `data.train` or `data.validation`, with `data.default` applied. Read by
    data/."""

    dataset_name: str = "ResponseDataset"
    """A dataset by name, ResponseDataset for a file of one's own, or the import path of a dataset class."""
    data_path: str | None = None
    """A JSONL file, or organisation/name of a Hugging Face dataset."""
    task_name: str | None = None
    """Name of the dataset in metrics and logs. null: after its file."""
    subset: str | None = None
    """Subset of a Hugging Face dataset."""
    split: str | None = None
    """Split of a Hugging Face dataset. null: the dataset's own choice."""
    download_dir: str | None = None
    """Folder for downloaded data. null: the Hugging Face cache."""
    input_key: str = "input"
    """Field of a row that holds the question."""
    output_key: str = "output"
    """Field of a row that holds the answer."""
    chat_key: str = "messages"
    """Field of a row that holds the messages, where the dataset is openai_format."""
    system_key: str | None = None
    """Field of a row that holds its system prompt, where the dataset is openai_format."""
    system_prompt: str | None = None
    """System prompt of rows that have none, where the dataset is openai_format."""
    tool_key: str | None = "tools"
    """Field of a row that holds its tools, where the dataset is openai_format."""
    use_preserving_dataset: bool = False
    """Keep rows as they are, with fields of their own, instead of fitting all to one schema."""
    prompt_file: str | None = None
    """File whose text is put around the question, at {}. null: the question alone."""
    system_prompt_file: str | None = None
    """File with the system prompt. null: none."""
    processor: str | None = None
    """Data processor by name or import path. null: the one that suits the algorithm."""
    env_name: str | None = None
    """The entry of `env` that scores this dataset. null: the only one there is. Also read by algorithms/."""
    split_validation_size: NonNegativeFloat = 0.0
    """Part of the training data that becomes validation data: below 1 a share, from 1 on a number of rows."""
    seed: int = 42
    """Seed of the split by split_validation_size."""
    repeat: Positive = 1
    """Number of times that each row occurs."""


class DataConfig(Section):
    """`data`. Read by data/."""

    max_input_seq_length: Positive | None = None
    """Longest prompt, in tokens; longer ones are excluded and counted. null:
    policy.max_total_sequence_length."""
    shuffle: bool = True
    """Read the training data in random order, drawn from the seed."""
    num_workers: NonNegative = 1
    """Kept for recipes from elsewhere, no effect: the driver tokenises a prompt in well under a millisecond."""
    add_bos: bool = True
    """Kept for recipes from elsewhere, no effect: the chat template alone puts in special tokens."""
    add_eos: bool = True
    """Kept for recipes from elsewhere, no effect: see add_bos."""
    add_generation_prompt: bool = False
    """Kept for recipes from elsewhere, no effect: SFT trains on what follows the generation prompt."""
    use_multiple_dataloader: bool = False
    """One data loader a dataset. Not supported yet."""
    num_prompts_per_dataloader: Positive | None = None
    """Prompts taken from each data loader at a time. Inert while use_multiple_dataloader is false."""
    custom_dataloader: str | None = None
    """Import path of the function that mixes several data loaders. Not supported yet."""
    train: list[DatasetEntry] = Field(default_factory=list)
    """Training datasets; at least one."""
    validation: list[DatasetEntry] = Field(default_factory=list)
    """Validation datasets, besides what split_validation_size takes from the training data."""
    default: dict[str, Any] = Field(default_factory=dict)
    """Values of dataset keys for the entries that do not set them; already applied to `train` and
    `validation`."""
