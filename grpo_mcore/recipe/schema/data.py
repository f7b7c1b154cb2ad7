"""`data`: datasets and their loading, in the nested layout. nemo_rl/data_layouts.py converts the flat layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_mcore.recipe.errors import nearest_hint
from grpo_mcore.recipe.schema.section import (
    NULL,
    CustomCode,
    Derived,
    Fixed,
    ImportPath,
    NameOrCode,
    NonNegativeFloat,
    OffWhenNull,
    Positive,
    Probability,
    Section,
    Seed,
)

# Datasets that are read from `data_path`. Any other name is a dataset of its own.
FILE_DATASETS = ("ResponseDataset", "openai_format", "BinaryPreferenceDataset", "NemoGymDataset")
# Datasets with a better and a worse answer to each prompt, which neither GRPO nor SFT can use.
PREFERENCE_DATASETS = ("BinaryPreferenceDataset", "Tulu3Preference")
# Datasets of questions about images.
IMAGE_PROCESSOR = "vlm_hf_data_processor"
IMAGE_DATASETS = ("clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny")
# All names of datasets. data/datasets/ loads them.
DATASETS = (
    *FILE_DATASETS,
    "SlidingPuzzle",
    "Verifiers",
    "OpenMathInstruct-2",
    "DeepScaler",
    "DAPOMath17K",
    "DAPOMathAIME2024",
    "AIME2024",
    "AIME2025",
    "GSM8K",
    "MATH",
    "MATH-500",
    "HMMT2025-Feb",
    "HMMT2025-Nov",
    "HMMT2026-Feb",
    "GPQA",
    "MMLU",
    "MMLU-Pro",
    "HumanEval",
    "MBPP",
    "IFEval",
    "NuminaMath",
    "Squad",
    "OpenAssistant",
    "Tulu3SftMixture",
    "Tulu3Preference",
    "HelpSteer3",
    *IMAGE_DATASETS,
)
_ALIASES = {"preference": "BinaryPreferenceDataset"}  # NeMo RL's name for rows with ranked completions
UNSET_KEYS = ("input", "output")  # input_key and output_key of an entry that sets neither


def dataset_by_name(written: str) -> str | None:
    """Return the name in DATASETS that `written` means, ignoring case, `-`, `_`, a version and a final "Dataset"."""
    return ({_plain(name): name for name in DATASETS} | _ALIASES).get(_plain(written))


def unknown_dataset(written: str) -> str:
    """Return the error message for a name that no dataset has."""
    hint = nearest_hint(written, DATASETS)
    return f"{written!r} is not known{hint}; known are {', '.join(DATASETS)}, or a dataset class by import path"


def _plain(name: str) -> str:
    letters = "".join(letter for letter in re.sub(r"-\d+\.\d+$", "", name).lower() if letter.isalnum())
    return letters.removesuffix("dataset")


class DatasetEntry(Section):
    """One dataset: an entry of `data.train` or `data.validation`, with `data.default` applied."""

    dataset_name: str = "ResponseDataset"
    """Name of a known dataset, ResponseDataset for a file of your own, or the import path of a dataset class."""
    data_path: str | None = None
    """A JSON, JSONL, CSV, TSV, Parquet or Arrow file, the address of one (https://...), or organisation/name of a
    Hugging Face dataset. For a known dataset: a copy of it."""
    separator: str | None = Field(default=None, min_length=1, max_length=1)
    """Character between the cells of a CSV file. null: a comma; in a TSV file a tab."""
    task_name: str | None = None
    """Name of the dataset in metrics and logs. null: the name of the dataset or of its file."""
    subset: str | None = None
    """Subset of a Hugging Face dataset, or language of MMLU, such as ZH-CN. null: the dataset's default."""
    split: str | None = None
    """Split of a Hugging Face dataset, or part of one, such as `train[:5%]`. null: the dataset's default."""
    download_dir: str | None = None
    """Folder for downloaded data. null: the Hugging Face cache."""
    input_key: str = "input"
    """Field of a row that holds the question; dots lead into it (`extra.question`). At the default, a known dataset
    uses its own field."""
    output_key: str = "output"
    """Field of a row that holds the answer; dots lead into it (`reward_model.ground_truth`). At the default, a known
    dataset uses its own field."""
    chat_key: str = "messages"
    """Field of a row that holds the messages. Only for openai_format."""
    choices_key: str | None = None
    """Field of a row that holds the choices of its question. They are shown below the question as `A) ...`, and the
    ground truth becomes the letter of the right one. null: `choices`, `options` or another usual field, where a row has
    it and the question does not show them; none: they are not shown. Only for ResponseDataset and
    BinaryPreferenceDataset."""
    context_key: str | None = None
    """Field of a row that holds the text or the passages that its question is about, shown above it. Only for
    ResponseDataset and BinaryPreferenceDataset."""
    system_key: str | None = None
    """Field of a row that holds its system prompt. null: `system` or `system_prompt`, where a row has it. Only for
    ResponseDataset and openai_format."""
    system_prompt: str | None = None
    """System prompt of rows without one. Only for openai_format."""
    tool_key: str | None = "tools"
    """Field of a row that holds its tools. Only for openai_format. null: tools."""
    prompt_key: str = "prompt"
    """Field of a row that holds the prompt. Only for BinaryPreferenceDataset."""
    chosen_key: str = "chosen"
    """Field of a row that holds the better answer. Only for BinaryPreferenceDataset."""
    rejected_key: str = "rejected"
    """Field of a row that holds the worse answer. Only for BinaryPreferenceDataset."""
    prompt_file: str | None = None
    """File with a prompt template; the question replaces {} in it. null: the question alone."""
    system_prompt_file: str | None = None
    """File with the system prompt. null: none."""
    processor: Annotated[str | CustomCode, NameOrCode()] | None = None
    """Data processor by name, or a custom one: docs/extending.md. null: the default of the algorithm."""
    train_on: Literal["all", "last"] = "all"
    """Answers of a conversation that SFT and DPO train on. all: every answer, as the chat template shows it once
    later turns follow (Qwen3 and DeepSeek leave out earlier reasoning then). last: the last answer, as it would be
    generated."""
    hint_key: str | None = None
    """Field of a row with a hint, such as a worked solution, that only teachers of on_policy_distillation get, in the
    question. null: they read what the policy read."""
    hint_prompt: str = "{prompt}\n\n{hint}"
    """The question as teachers get it."""
    env_name: str | None = None
    """Entry of `env` that scores this dataset. null: the only entry."""
    split_validation_size: NonNegativeFloat = 0.0
    """Part of the training data that becomes validation data: a share if below 1, otherwise a number of rows."""
    seed: Seed = 42
    """Seed of the split by split_validation_size and of a generated dataset."""
    dataset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of a generated dataset, such as SlidingPuzzle, or of a dataset class. Of Verifiers: `taskset`, options
    that differ from env.NAME.verifiers.taskset, and `select` (limit, skip, shuffle, seed, include, exclude)."""
    repeat: Positive = 1
    """Number of times that each row occurs."""


class SamplerConfig(Section):
    """`data.sampler`: which prompts of the training data are worth their tokens. Each prompt is taken or skipped when
    its turn comes; a skipped prompt comes again in the next pass."""

    enabled: bool = False
    """Skip prompts. Otherwise all are taken, in their order."""
    name: Literal["difficulty"] = "difficulty"
    """difficulty: by the pool of a prompt's pass rate."""
    path: ImportPath | None = None
    """Import path of a custom function that returns the probability, in place of the pools: docs/data.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function at path."""
    thresholds: list[Probability] = Field(default=[0.25, 0.75, 1.0])
    """Highest pass rate of each pool, rising to 1."""
    weights: list[NonNegativeFloat] = Field(default=[0.2, 1.0, 0.2])
    """Weight of each pool: a prompt is taken with its pool's weight divided by the highest one. A prompt that was not
    tried is taken."""
    column: str | None = None
    """Column of the rows whose values stand for difficulties: a prompt that was not tried has the pass rate of the
    prompts with the same value. `task`: the dataset's name. null: none."""
    drop_solved_after: Positive | None = None
    """Number of a prompt's last groups, all of whose samples were solved, after which it is not taken again. null: it
    stays."""

    @model_validator(mode="after")
    def _pools(self) -> SamplerConfig:
        if len(self.thresholds) != len(self.weights):
            raise ValueError(
                f"{len(self.thresholds)} thresholds for {len(self.weights)} weights: give one of each a pool"
            )
        if not self.thresholds or self.thresholds != sorted(set(self.thresholds)) or self.thresholds[-1] != 1.0:
            raise ValueError(f"thresholds {self.thresholds} must rise to 1")
        if not max(self.weights):
            raise ValueError("weights: one of them must be above 0")
        return self


class DataConfig(Section):
    """`data`."""

    max_input_seq_length: Derived[Positive] = NULL
    """Maximum length of a prompt, in tokens; longer ones are excluded and counted. null:
    policy.max_total_sequence_length."""
    max_unusable_share: Probability = 0.05
    """Share of a dataset's rows that may be unusable: without an answer, or rejected by the chat template. They are
    excluded and counted by reason; beyond the share the data is refused. Prompts that are too long do not count."""
    shuffle: Fixed[bool] = True
    """Read the training data in an order drawn from the seed."""
    use_multiple_dataloader: Fixed[bool] = False
    """Use one data loader per dataset, for GRPO. There are no epochs then: a dataset that has ended starts again, and
    the run ends at grpo.max_num_steps."""
    num_prompts_per_dataloader: Positive | None = None
    """Prompts in a batch of each data loader; grpo.num_prompts_per_step must be a multiple. No effect without
    use_multiple_dataloader."""
    custom_dataloader: str | None = None
    """Import path of the function that composes a step's prompts from the data loaders. null: one batch of each. No
    effect without use_multiple_dataloader."""
    sampler: Annotated[SamplerConfig, OffWhenNull] = Field(default_factory=SamplerConfig)
    """How GRPO's training prompts are chosen by their pass rates."""
    train: list[DatasetEntry] = Field(default_factory=list)
    """Training datasets, at least one."""
    validation: list[DatasetEntry] = Field(default_factory=list)
    """Validation datasets, besides the part of the training data that split_validation_size takes."""
    default: dict[str, Any] = Field(default_factory=dict)
    """Values of dataset keys for entries that do not set them. Already applied to `train` and `validation`."""

    def __getitem__(self, key: str) -> Any:
        """Return a value as recipes write it: of `train` and `validation` the only dataset, a list of several, or
        None."""
        value = super().__getitem__(key)
        return (value or [None])[0] if key in ("train", "validation") and len(value) < 2 else value


def extract_necessary_env_names(data_config: DataConfig | Mapping[str, Any]) -> list[str]:
    """Return the names of the environments that the datasets of a section `data` name, without repetition. Accepts the
    section of a MasterConfig, or a mapping with `train`, `validation` and `default`."""
    names: dict[str, None] = {}
    for name in ("train", "validation", "default"):
        value = data_config.get(name)
        for entry in value if isinstance(value, list) else [value]:
            if entry is not None and (env_name := entry.get("env_name")) is not None:
                names[env_name] = None
    return list(names)
