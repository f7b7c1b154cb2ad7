"""Datasets as a recipe names them: a file, a published dataset, or a class by import path.

To add a dataset by name, add the name to recipe/schema/data.py and a class that takes (entry, processor) to
DATASET_CLASSES.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from grpo_mcore.base.imports import import_by_path
from grpo_mcore.data.datasets.contexts import unseen_context
from grpo_mcore.data.datasets.files import gym_task, openai_row, preference_pair, question_and_answer
from grpo_mcore.data.datasets.mapped import Entry, MappedDataset, ToChat, as_chat, hints, name_of, setting
from grpo_mcore.data.datasets.published import HELPSTEER3_PAIRS, PUBLISHED, TULU3_PAIRS, PublishedDataset
from grpo_mcore.data.datasets.rows import Rows
from grpo_mcore.data.datasets.source import Table, open_source, plain
from grpo_mcore.data.datasets.verifiers_tasks import VerifiersDataset
from grpo_mcore.data.interfaces import DataError, TaskDataProcessFnCallable, TaskDataSpec, check_uids
from grpo_mcore.data.processors import DEFAULT_PROCESSOR, PROCESSORS, find_processor
from grpo_mcore.recipe import FILE_DATASETS, PREFERENCE_DATASETS, dataset_by_name, unknown_dataset

log = logging.getLogger(__name__)

SLIDING_PUZZLE = "examples.sliding_puzzle.dataset:SlidingPuzzleDataset"  # for dataset_name: SlidingPuzzle


class ResponseData(Protocol):
    """The attributes of a loaded dataset. A dataset class by import path needs only `dataset` and `task_name`."""

    dataset: Sequence[dict[str, Any]]
    """Rows in chat format: `messages`, `task_name`, `uid`, and what the environment needs."""
    val_dataset: Sequence[dict[str, Any]] | None
    """The rows that split_validation_size took out of `dataset`."""
    task_name: str
    task_spec: TaskDataSpec
    processor: TaskDataProcessFnCallable
    env_name: str | None


DatasetClass = Callable[[Entry, str], ResponseData]
"""(entry, name of the default processor) -> the loaded dataset"""


def load_response_dataset(entry: Entry, default_processor: str = DEFAULT_PROCESSOR) -> ResponseData:
    """Load the dataset of one entry of `data.train` or `data.validation`.

    Raises DataError for a missing file, a bad line, an empty dataset, or an unknown name.
    """
    written = setting(entry, "dataset_name", "ResponseDataset")
    name = dataset_by_name(written)
    if name in PREFERENCE_DATASETS:
        raise DataError(f"dataset_name {written!r}: pairs of answers are for DPO and Bradley-Terry reward models")
    if name not in (None, "SlidingPuzzle", "Verifiers") and setting(entry, "dataset_kwargs"):
        raise DataError(f"dataset_name {written!r}: dataset_kwargs have no effect; they are for datasets made in code")
    return _find(written, name, DATASET_CLASSES)(entry, default_processor)


def load_preference_dataset(entry: Entry, default_processor: str = DEFAULT_PROCESSOR) -> ResponseData:
    """Load a dataset of pairs of answers: rows with `messages` (the prompt), `chosen` and `rejected` (messages)."""
    written = setting(entry, "dataset_name", "BinaryPreferenceDataset")
    name = dataset_by_name(written)
    if name is not None and name not in PREFERENCE_CLASSES:
        raise DataError(f"dataset_name {written!r} has no pairs of answers; {', '.join(PREFERENCE_CLASSES)} have")
    return _find(written, name, PREFERENCE_CLASSES)(entry, default_processor)


def _find(written: str, name: str | None, classes: dict[str, DatasetClass]) -> DatasetClass:
    if name in classes:
        return classes[name]
    path = SLIDING_PUZZLE if name == "SlidingPuzzle" else written
    if {".", ":"} & set(path):
        dataset_class = import_by_path(path, "dataset_name", DataError)
        return lambda entry, processor: completed(dataset_class(entry), entry, processor)
    raise DataError(f"dataset_name {unknown_dataset(written)}")


class RawDataset:
    """A base for custom dataset classes, which set `dataset` (rows in chat format) and `task_name`."""

    dataset: Any
    task_name: str
    val_dataset: Sequence[dict[str, Any]] | None = None

    def split_train_validation(self, split_validation_size: float, seed: int) -> None:
        """Move a random part of `dataset` to `val_dataset`: a share of the rows if below 1, else a number. 0: none."""
        if split_validation_size:
            rows = Rows(self.dataset, lambda row, _: row)
            self.dataset, self.val_dataset = rows.split(split_validation_size, seed)


def completed(data: Any, entry: Entry, default_processor: str) -> ResponseData:
    """Return a custom dataset with the attributes that it leaves out: those of its entry, and for each row
    a uid and the task's name. Its `dataset` may be a mapping with `train` and `validation`. Raises DataError."""
    missing = [name for name in ("dataset", "task_name") if getattr(data, name, None) is None]
    if missing:
        raise DataError(f"{type(data).__name__}: a dataset class needs the attributes {' and '.join(missing)}")
    if isinstance(data.dataset, Mapping):
        if data.dataset.get("train") is None:
            raise DataError(f"{type(data).__name__}.dataset: it has no 'train', only {sorted(data.dataset)}")
        data.dataset, data.val_dataset = data.dataset["train"], data.dataset.get("validation")
    if not hasattr(data, "val_dataset"):
        data.val_dataset = None
    if not hasattr(data, "env_name"):
        data.env_name = setting(entry, "env_name")
    if not hasattr(data, "task_spec"):
        files = {key: setting(entry, key) for key in ("prompt_file", "system_prompt_file")}
        data.task_spec = TaskDataSpec(
            task_name=data.task_name,
            env_name=data.env_name,
            train_on=setting(entry, "train_on", "all"),
            **hints(entry),
            **files,
        )
    if not hasattr(data, "processor"):
        data.processor = find_processor(setting(entry, "processor") or default_processor)

    def named(rows: Any, part: str) -> Rows:
        check_uids(rows, f"{data.task_name}{part}")
        task = f"{data.task_name}{part}"
        rows = Table(rows) if hasattr(rows, "column_names") else rows
        return Rows(
            rows, lambda row, index: {"uid": f"{task}:{index}", **plain(row, nulls=True), "task_name": data.task_name}
        )

    data.dataset = named(data.dataset, "")
    data.val_dataset = None if data.val_dataset is None else named(data.val_dataset, "-validation")
    return data


def table_options(entry: Entry) -> dict[str, Any]:
    """Return the keys of an entry that say how its table is read."""
    return {key: setting(entry, key) for key in ("subset", "split", "download_dir", "separator")}


def rows_of_file(entry: Entry, name: str) -> ToChat:
    """Return the function that makes a file's row a conversation. `name` is one of recipe.data.FILE_DATASETS."""
    if name == "openai_format":
        return partial(
            openai_row,
            chat=setting(entry, "chat_key", "messages"),
            tools=setting(entry, "tool_key", "tools"),
            system_key=setting(entry, "system_key"),
            system_prompt=setting(entry, "system_prompt"),
        )
    if name == "NemoGymDataset":
        return gym_task
    if name == "BinaryPreferenceDataset":
        keys = {part: setting(entry, f"{part}_key", part) for part in ("prompt", "chosen", "rejected")}
        parts = {part: setting(entry, f"{part}_key") for part in ("choices", "context")}
        return partial(preference_pair, **keys, **parts)
    keys = {"question": setting(entry, "input_key", "input"), "answer": setting(entry, "output_key", "output")}
    parts = {part: setting(entry, f"{part}_key") for part in ("choices", "context", "system")}
    return partial(question_and_answer, **keys, **parts, needs_answer=needs_answer(entry))


def unseen(entry: Entry, name: str, row: dict[str, Any]) -> str | None:
    """Return what to say of a text of the row that an entry of this layout does not show; None if nothing."""
    question = {"ResponseDataset": "input", "BinaryPreferenceDataset": "prompt"}.get(name)
    if question is None:
        return None
    return unseen_context(row, setting(entry, "context_key"), setting(entry, f"{question}_key", question))


def needs_answer(entry: Entry) -> bool:
    """Return whether the rows of an entry must have an answer: for all processors but `chat_data_processor` and
    custom ones, which check it themselves."""
    name = setting(entry, "processor")
    return name is None or (isinstance(name, str) and name in PROCESSORS and name != "chat_data_processor")


class FileDataset(MappedDataset):
    """The rows of `data_path`: a JSON or JSONL file, or a table of the `datasets` library. `name` is the layout of its
    rows, one of recipe.data.FILE_DATASETS."""

    def __init__(
        self, entry: Entry, default_processor: str = DEFAULT_PROCESSOR, *, name: str = "ResponseDataset"
    ) -> None:
        path = setting(entry, "data_path")
        if not path:
            raise DataError("data_path is missing: name a JSONL file or a Hugging Face dataset")
        to_chat = rows_of_file(entry, name)
        source = open_source(path, **table_options(entry))
        source.refuse_if_none_passes(partial(as_chat, to_chat))
        if note := unseen(entry, name, source.rows[0]):
            log.warning("%s: %s", path, note)
        super().__init__(entry, source, to_chat, task_name=name_of(path), default_processor=default_processor)
        if name == "NemoGymDataset":
            self.processor = find_processor("nemo_gym_data_processor")  # data.default is for other datasets


ResponseDataset = FileDataset  # questions and answers under `input_key` and `output_key`

DATASET_CLASSES: dict[str, DatasetClass] = {
    **{name: partial(FileDataset, name=name) for name in FILE_DATASETS if name not in PREFERENCE_DATASETS},
    **{name: partial(PublishedDataset, name=name, published=published) for name, published in PUBLISHED.items()},
    "Verifiers": VerifiersDataset,
}
PREFERENCE_CLASSES: dict[str, DatasetClass] = {
    **{name: partial(FileDataset, name=name) for name in PREFERENCE_DATASETS if name in FILE_DATASETS},
    "HelpSteer3": partial(PublishedDataset, name="HelpSteer3", published=HELPSTEER3_PAIRS),
    "Tulu3Preference": partial(PublishedDataset, name="Tulu3Preference", published=TULU3_PAIRS),
}
