"""`data`: datasets and their loading. Both layouts of recipes end up in the one here: see data_layouts.py."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from grpo_mcore.recipe.errors import nearest
from grpo_mcore.recipe.section import NonNegative, NonNegativeFloat, Positive, Section

# Datasets that are whatever `data_path` holds; any other name is a dataset of its own.
FILE_DATASETS = ("ResponseDataset", "openai_format", "BinaryPreferenceDataset", "NemoGymDataset")
# Those with a better and a worse answer to each prompt, which GRPO and SFT have no use for.
PREFERENCE_DATASETS = ("BinaryPreferenceDataset",)
# All datasets by name. data/datasets.py loads them.
DATASETS = (
    *FILE_DATASETS,
    "SlidingPuzzle",
    "OpenMathInstruct-2",
    "DeepScaler",
    "DAPOMath17K",
    "DAPOMathAIME2024",
    "AIME2024",
    "AIME2025",
    "GSM8K",
    "NuminaMath",
    "Squad",
    "OpenAssistant",
    "Tulu3SftMixture",
    "HelpSteer3",
)
UNSET_KEYS = ("input", "output")  # input_key and output_key of an entry that does not say


def dataset_by_name(written: str) -> str | None:
    """The name of DATASETS that is meant: case, `-`, `_`, a version and a final "Dataset" do not matter."""
    return {_plain(name): name for name in DATASETS}.get(_plain(written))


def unknown_dataset(written: str) -> str:
    """What to say of a name that no dataset has."""
    near = nearest(written, DATASETS)
    hint = f"; nearest: {near}" if near else ""
    return f"{written!r} is not known{hint}; known are {', '.join(DATASETS)}, or a dataset class by import path"


def _plain(name: str) -> str:
    letters = "".join(letter for letter in re.sub(r"-\d+\.\d+$", "", name).lower() if letter.isalnum())
    return letters.removesuffix("dataset")


class DatasetEntry(Section):
    """One dataset: an entry of `data.train` or `data.validation`, with `data.default` applied. Read by
    data/."""

    dataset_name: str = "ResponseDataset"
    """A dataset by name, ResponseDataset for a file of one's own, or the import path of a dataset class."""
    data_path: str | None = None
    """A JSON, JSONL or Parquet file, or organisation/name of a Hugging Face dataset. For a dataset by name: a copy
    of it."""
    task_name: str | None = None
    """Name of the dataset in metrics and logs. null: its own name, or that of its file."""
    subset: str | None = None
    """Subset of a Hugging Face dataset. null: the dataset's own choice."""
    split: str | None = None
    """Split of a Hugging Face dataset, or part of one, such as `train[:5%]`. null: the dataset's own choice."""
    download_dir: str | None = None
    """Folder for downloaded data. null: the Hugging Face cache."""
    input_key: str = "input"
    """Field of a row that holds the question. Left alone, a dataset by name uses its own fields."""
    output_key: str = "output"
    """Field of a row that holds the answer. Left alone, a dataset by name uses its own fields."""
    chat_key: str = "messages"
    """Field of a row that holds the messages, where the dataset is openai_format."""
    system_key: str | None = None
    """Field of a row that holds its system prompt, where the dataset is openai_format."""
    system_prompt: str | None = None
    """System prompt of rows that have none, where the dataset is openai_format."""
    tool_key: str | None = "tools"
    """Field of a row that holds its tools, where the dataset is openai_format. null: tools."""
    use_preserving_dataset: bool = False
    """Kept for recipes from elsewhere, no effect: rows of JSON files always keep fields of their own."""
    prompt_key: str = "prompt"
    """Field of a row that holds the prompt, where the dataset is BinaryPreferenceDataset."""
    chosen_key: str = "chosen"
    """Field of a row that holds the better answer, where the dataset is BinaryPreferenceDataset."""
    rejected_key: str = "rejected"
    """Field of a row that holds the worse answer, where the dataset is BinaryPreferenceDataset."""
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
    """Seed of the split by split_validation_size, and of a dataset that is made and not read."""
    dataset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of a dataset that is made and not read, such as SlidingPuzzle, or of a dataset class."""
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
    """One data loader a dataset, for GRPO. There are no epochs then: a dataset that has ended begins anew, and the
    run ends by grpo.max_num_steps."""
    num_prompts_per_dataloader: Positive | None = None
    """Prompts of a batch of each data loader; grpo.num_prompts_per_step must be a multiple. Inert while
    use_multiple_dataloader is false."""
    custom_dataloader: str | None = None
    """Import path of the function that makes a step's prompts from the data loaders. null: a batch of each. Inert
    while use_multiple_dataloader is false."""
    train: list[DatasetEntry] = Field(default_factory=list)
    """Training datasets; at least one."""
    validation: list[DatasetEntry] = Field(default_factory=list)
    """Validation datasets, besides what split_validation_size takes from the training data."""
    default: dict[str, Any] = Field(default_factory=dict)
    """Values of dataset keys for the entries that do not set them; already applied to `train` and
    `validation`."""
