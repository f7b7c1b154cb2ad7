"""A dataset whose rows are made conversations when they are read: `MappedDataset`, the base of all datasets here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_mcore.data.datasets.rows import Repeated, Rows
from grpo_mcore.data.datasets.source import Source, missing
from grpo_mcore.data.interfaces import DataError, RowError, TaskDataSpec
from grpo_mcore.data.processors import PROCESSORS, find_processor
from grpo_mcore.recipe import IMAGE_PROCESSOR, DatasetEntry
from grpo_mcore.rollout.chat_form import ChatForm
from grpo_mcore.rollout.datum import field_of
from grpo_mcore.rollout.messages import MessageError, join_texts

Entry = DatasetEntry | Mapping[str, Any]
"""An entry of `data.train` or `data.validation`, or a mapping with some of its keys."""
Row = dict[str, Any]
ToChat = Callable[[Row], Row]
"""A row as it was published -> {"messages": conversation, and what the environment needs: "ground_truth", ...}, or
`unusable(reason)`. Raises KeyError or DataError for a row with other fields than expected."""


def unusable(reason: str) -> Row:
    """Return the row that stands for one that the dataset itself marks as useless: it is excluded and counted."""
    return {"messages": [], "unusable": reason}


def setting(entry: Entry, key: str, default: Any = None) -> Any:
    """Return an entry's value by key or attribute; `default` where it is missing or None."""
    value = entry.get(key) if isinstance(entry, Mapping) else getattr(entry, key, None)
    return default if value is None else value


def hints(entry: Entry) -> dict[str, Any]:
    """Return the keys of an entry that say what teachers get besides the question."""
    key = setting(entry, "hint_key")
    return {} if key is None else {"hint_key": key, "hint_prompt": setting(entry, "hint_prompt", "{prompt}\n\n{hint}")}


class MappedDataset:
    """A recipe's entry, loaded. `dataset` and `val_dataset` hold rows in chat format with `task_name` and `uid`; see
    `ResponseData`."""

    def __init__(
        self, entry: Entry, source: Source, to_chat: ToChat, *, task_name: str, default_processor: str
    ) -> None:
        """`split_validation_size`, `seed`, `repeat`, the prompt files, `processor` and `env_name` are the entry's."""
        self.task_name: str = setting(entry, "task_name") or task_name
        self.env_name: str | None = setting(entry, "env_name")
        self.task_spec = TaskDataSpec(
            task_name=self.task_name,
            prompt_file=setting(entry, "prompt_file"),
            system_prompt_file=setting(entry, "system_prompt_file"),
            input_key=setting(entry, "input_key", "input"),
            output_key=setting(entry, "output_key", "output"),
            env_name=self.env_name,
            train_on=setting(entry, "train_on", "all"),
            **hints(entry),
        )
        name = setting(entry, "processor") or default_processor
        if name == IMAGE_PROCESSOR and default_processor == "sft_processor":  # which takes images, too
            name = default_processor
        self.processor = find_processor(name)
        self._source, self._to_chat = source, to_chat

        rows = Rows(source.rows, self._to_row)
        held_out: Rows | None = None
        if size := setting(entry, "split_validation_size"):
            rows, held_out = rows.split(size, setting(entry, "seed", 42))
        repeat = setting(entry, "repeat", 1)
        self.dataset: Sequence[Row] = Repeated(rows, repeat) if repeat > 1 else rows
        self.val_dataset: Sequence[Row] | None = held_out

    def _to_row(self, row: Row, index: int) -> Row:
        row_name = self._source.name_of(index)
        uid = f"{self.task_name}:{self._source.numbers[index]}"
        key = self.task_spec.hint_key
        value = None if key is None else field_of(row, key)
        hint = {} if value is None else {str(key): value}  # the answer may be the hint, too
        chat = as_chat(self._to_chat, row, row_name)
        if self.processor not in PROCESSORS.values():  # a processor of the user's own expects texts
            chat["messages"] = join_texts(chat["messages"], ChatForm.joint)
        return {**hint, **chat, "task_name": self.task_name, "uid": uid}


def as_chat(to_chat: ToChat, row: Row, row_name: str) -> Row:
    """Return `to_chat(row)`. Every error becomes a RowError that names the row's place."""
    try:
        return to_chat(row)
    except KeyError as error:
        raise RowError(row_name, str(missing(row, error.args[0]))) from error
    except (DataError, MessageError) as error:
        raise RowError(row_name, str(error)) from error
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        kinds = {key: type(value).__name__ for key, value in row.items()}
        raise RowError(row_name, f"a field has another layout than expected ({error}); it has {kinds}") from error


def name_of(path: str) -> str:
    """Return a task's name made of its data's path: the last folder and the file, without endings."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    name = "-".join(parts[-2:])
    for suffix in (".gz", ".jsonl", ".json", ".parquet"):
        name = name.removesuffix(suffix)
    return name
