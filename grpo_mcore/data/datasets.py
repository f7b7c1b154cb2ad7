"""Datasets as a recipe names them: a file of one's own, a Hugging Face dataset, or a class by import path.

A loaded dataset has `dataset` (rows in chat format), `val_dataset` (None without `split_validation_size`),
`task_name`, `task_spec`, `processor` and `env_name`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_mcore.data.hub import is_local, load_table
from grpo_mcore.data.imports import import_by_path
from grpo_mcore.data.interfaces import DataError, TaskDataProcessFnCallable, TaskDataSpec
from grpo_mcore.data.jsonl import read_jsonl
from grpo_mcore.data.processors import find_processor
from grpo_mcore.data.rows import Repeated, Rows

DEFAULT_PROCESSOR = "math_hf_data_processor"

# Datasets that a recipe may call by name: where they lie on the Hugging Face hub, and their columns.
NAMED: dict[str, dict[str, str]] = {
    "OpenMathInstruct-2": {
        "data_path": "nvidia/OpenMathInstruct-2",
        "split": "train_1M",
        "input_key": "problem",
        "output_key": "expected_answer",
    },
}
_UNSET = {"input_key": "input", "output_key": "output"}  # what an entry holds that does not say


class ResponseData(Protocol):
    """What `load_response_dataset` returns, and what a dataset class by import path must offer."""

    dataset: Sequence[dict[str, Any]]
    val_dataset: Sequence[dict[str, Any]] | None
    task_name: str
    task_spec: TaskDataSpec
    processor: TaskDataProcessFnCallable
    env_name: str | None


def load_response_dataset(entry: Any, default_processor: str = DEFAULT_PROCESSOR) -> ResponseData:
    """The dataset of one entry of `data.train` or `data.validation`: an object or a mapping with its keys.

    Raises DataError for a missing file, a bad line, an empty dataset, an unknown name.
    """
    name = _get(entry, "dataset_name") or "ResponseDataset"
    if name in NAMED:
        return ResponseDataset(named_entry(entry, name), default_processor)
    if name in ("ResponseDataset", "openai_format"):
        return ResponseDataset(entry, default_processor)
    if {".", ":"} & set(name):
        return import_by_path(name, what="dataset_name")(entry)
    raise DataError(
        f"dataset_name {name!r} is not known: use {', '.join(NAMED)}, ResponseDataset with data_path (a JSONL file or "
        "a Hugging Face dataset, with input_key and output_key), openai_format, or a dataset class by import path"
    )


def named_entry(entry: Any, name: str) -> dict[str, Any]:
    """The entry with the path, split and columns of the dataset `name`, where it does not give its own."""
    plain = dict(entry) if isinstance(entry, Mapping) else dict(vars(entry))
    for key, value in NAMED[name].items():
        if plain.get(key) in (None, _UNSET.get(key)):
            plain[key] = value
    return plain


class ResponseDataset:
    """Questions and answers under `input_key` and `output_key`, or whole conversations (`openai_format`)."""

    def __init__(self, entry: Any, default_processor: str = DEFAULT_PROCESSOR) -> None:
        path = _get(entry, "data_path")
        if not path:
            raise DataError("data_path is missing: name a JSONL file or a Hugging Face dataset")
        self.task_name: str = _get(entry, "task_name") or _name_of(path)
        self.env_name: str | None = _get(entry, "env_name")
        self._chat = _get(entry, "dataset_name") == "openai_format"
        self._chat_key: str = _get(entry, "chat_key") or "messages"
        self._system_key: str | None = _get(entry, "system_key")
        self._system_prompt: str | None = _get(entry, "system_prompt")
        self.task_spec = TaskDataSpec(
            task_name=self.task_name,
            prompt_file=_get(entry, "prompt_file"),
            system_prompt_file=_get(entry, "system_prompt_file"),
            input_key=_get(entry, "input_key") or "input",
            output_key=_get(entry, "output_key") or "output",
            env_name=self.env_name,
        )
        self.processor = find_processor(_get(entry, "processor") or default_processor)

        self._lines: Sequence[int] | None = None
        source = self._load(path, entry)
        rows = Rows(source, self._to_row)
        held_out: Rows | None = None
        if _get(entry, "split_validation_size"):
            rows, held_out = rows.split(_get(entry, "split_validation_size"), _get(entry, "seed", 42))
        repeat = _get(entry, "repeat", 1)
        self.dataset: Sequence[dict[str, Any]] = Repeated(rows, repeat) if repeat > 1 else rows
        self.val_dataset: Sequence[dict[str, Any]] | None = held_out

    def _load(self, path: str, entry: Any) -> Sequence[dict[str, Any]]:
        if is_local(path) and Path(path).suffix in (".jsonl", ".json"):
            rows, self._lines = read_jsonl(Path(path), self._check)
            return rows
        table = load_table(path, _get(entry, "subset"), _get(entry, "split"), _get(entry, "download_dir"))
        self._check(dict.fromkeys(table.column_names, ""), path)
        return table

    def _check(self, row: dict[str, Any], where: str) -> None:
        """The keys that a row must have, and the type of its question."""
        question, answer = self.task_spec.input_key, self.task_spec.output_key
        needed = (self._chat_key,) if self._chat else (question, answer)
        for key in needed:
            # A ground truth can stand for the answer: GRPO never trains on answers.
            if row.get(key) is None and not (key == answer and row.get("ground_truth") is not None):
                raise DataError(f"{where}: no {key!r} in it; it has {sorted(row)}")
        if not isinstance(row[needed[0]], (str, list)):
            kind = type(row[needed[0]]).__name__
            raise DataError(f"{where}: {needed[0]!r} must be text or a list of messages, got {kind}")

    def _to_row(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        """{"messages", "task_name", "uid", and the row's other fields}."""
        if self._lines is None:  # a table's rows were not looked at when it was opened
            self._check(row, f"{self.task_name}, row {index}")
        line = index if self._lines is None else self._lines[index]
        extra = {key: value for key, value in row.items() if key not in ("messages", "task_name", "uid")}
        if self._chat:
            messages = self._with_system(row, list(row[self._chat_key]))
            extra.pop(self._chat_key, None)
        else:
            question, answer = row[self.task_spec.input_key], row.get(self.task_spec.output_key)
            messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
            if answer is not None:
                messages.append({"role": "assistant", "content": str(answer)})
            extra.pop(self.task_spec.input_key)
            extra.pop(self.task_spec.output_key, None)
        return {**extra, "messages": messages, "task_name": self.task_name, "uid": f"{self.task_name}:{line}"}

    def _with_system(self, row: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if messages and messages[0].get("role") == "system":
            return messages
        system = (row.get(self._system_key) if self._system_key else None) or self._system_prompt
        return [{"role": "system", "content": system}, *messages] if system else messages


def _get(entry: Any, key: str, default: Any = None) -> Any:
    """An entry's value by key or attribute; missing and None are `default`."""
    value = entry.get(key) if isinstance(entry, Mapping) else getattr(entry, key, None)
    return default if value is None else value


def _name_of(path: str) -> str:
    """A task's name from where its data is: the last folder and the file, without endings."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    name = "-".join(parts[-2:])
    return name.removesuffix(".jsonl").removesuffix(".json").removesuffix(".parquet")
