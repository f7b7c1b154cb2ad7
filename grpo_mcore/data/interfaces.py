"""The types that datasets and processors are written against: `DataError`, `TaskDataSpec`, the processor's signature.
A processor returns a `DatumSpec` (grpo_mcore/rollout/datum.py)."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_mcore.rollout.datum import DatumSpec, LLMMessageLogType, Message
from grpo_mcore.rollout.images import ImageReader

__all__ = ["DataError", "DatumSpec", "LLMMessageLogType", "Message", "TaskDataProcessFnCallable", "TaskDataSpec"]

LATER_EPOCH = re.compile(r"@[0-9]+$")
"""Ending of the uid that a prompt has from its second epoch on."""

RESERVED_KEYS = ("messages", "task_name", "uid")  # of a row in chat format; its other fields are the user's


TrainOn = Literal["all", "last"]


class DataError(ValueError):
    """Data that cannot be used. The text names the file, line or row, and the remedy."""


class RowError(DataError):
    """A row that cannot be used. `reason` is the text without the row's name, so that rows can be counted by it."""

    def __init__(self, row: str, reason: str) -> None:
        super().__init__(f"{row}: {reason}")
        self.row, self.reason = row, reason


class UidError(DataError):
    """A uid that no row may have. Data with such rows is refused, unless it is too large to be read before a run."""


@dataclass
class TaskDataSpec:
    """The properties that all rows of a task share. The prompt files are read at once; a bad one is a DataError."""

    task_name: str = "default"
    prompt_file: str | None = None
    """Text with one {} where the problem goes; other braces are doubled, as in str.format."""
    system_prompt_file: str | None = None
    input_key: str = "input"
    output_key: str = "output"
    env_name: str | None = None
    train_on: TrainOn = "all"
    """Answers of a conversation that SFT trains on."""
    hint_key: str | None = None
    """Field of a row that only teachers get, in the question."""
    hint_prompt: str = "{prompt}\n\n{hint}"
    images: ImageReader | None = None
    """Reads images for prompts. None: the run has no images, and a row with one is unusable."""
    stop_strings: list[str] | None = None
    """Those of the task's environment, for rows whose processor sets none."""
    prompt: str | None = field(init=False, default=None)
    system_prompt: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.prompt_file is not None:
            self.prompt = read_text(self.prompt_file, "prompt_file")
        if self.system_prompt_file is not None:
            self.system_prompt = read_text(self.system_prompt_file, "system_prompt_file")
        if self.prompt is not None and "<the problem>" not in self.format_problem("<the problem>"):
            raise DataError(f"prompt_file {self.prompt_file}: no {{}} in it where the problem would go")

        if missing := [part for part in ("{prompt}", "{hint}") if part not in self.hint_prompt]:
            raise DataError(f"hint_prompt {self.hint_prompt!r} has no {' and no '.join(missing)}")

    def with_hint(self, prompt: str, hint: str) -> str:
        """Return the question with the hint, as teachers get it."""
        parts = {"{prompt}": prompt, "{hint}": hint}
        return re.sub(r"\{prompt\}|\{hint\}", lambda match: parts[match[0]], self.hint_prompt)

    def format_problem(self, problem: str) -> str:
        """Return the problem inside the prompt file's text, or alone where there is none."""
        if self.prompt is None:
            return problem
        try:
            return self.prompt.format(problem)
        except (IndexError, KeyError, ValueError) as error:
            raise DataError(
                f"prompt_file {self.prompt_file}: write one {{}} where the problem goes and double all other "
                f"braces, such as \\boxed{{{{}}}} ({type(error).__name__}: {error})"
            ) from error


TaskDataProcessFnCallable = Callable[[dict[str, Any], TaskDataSpec, Any, int | None, int], DatumSpec]
"""(row, task spec, tokenizer, max_seq_length, idx) -> DatumSpec. It never truncates: a prompt that is too long gets
loss_multiplier 0."""


def read_text(path: str, key: str) -> str:
    """Return the text of a file that the recipe names under `key`. Raises DataError."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # Windows begins a file with a mark of its encoding
    except OSError as error:
        raise DataError(f"{key} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{key} {path}: not UTF-8 text ({error.reason}, byte {error.start})") from error


def uid_text(uid: Any, default: str) -> str:
    """Return a row's uid as text: `default` where the row has none, and a whole number as its digits. Raises UidError
    for anything else, and for an ending that marks a prompt's later epochs (x@2), which would make two prompts one."""
    if uid is None or uid == "" or (isinstance(uid, float) and uid != uid):
        return default
    if hasattr(uid, "item"):  # of numpy, as tables give them
        uid = uid.item()
    if isinstance(uid, bool) or not isinstance(uid, str | int):
        raise UidError(f"{default}: its uid must be text or a whole number, got {type(uid).__name__}: {uid!r:.80}")
    text = str(uid)
    if LATER_EPOCH.search(text):
        raise UidError(f"{default}: its uid {text!r} ends as a prompt's does in a later epoch (x@2); name it otherwise")
    return text


def check_uids(rows: Any, task: str) -> None:
    """Check the uids that rows bring with them: rows of a list, or of a table with a column `uid`; those of other
    sequences are only known when they are read. Raises UidError for a wrong uid and for repeated ones."""
    if isinstance(rows, list):
        uids = [row.get("uid") for row in rows]
    elif "uid" in (getattr(rows, "column_names", None) or ()):
        uids = list(rows["uid"])
    else:
        return
    first: dict[str, int] = {}
    repeated = []
    for index, uid in enumerate(uids):
        text = uid_text(uid, f"{task}:{index}")
        if (earlier := first.setdefault(text, index)) != index:
            repeated.append(f"row {index}: its uid {text!r} is that of row {earlier}")
    if repeated:
        raise UidError(repeated_uids(repeated))


def repeated_uids(rows: list[str]) -> str:
    """Return the error message for rows with the uids of earlier ones."""
    return (
        f"uids must be unique, since a prompt's fate is recorded under its uid; {'; '.join(rows[:3])}"
        + (f", and {len(rows) - 3} more" if len(rows) > 3 else "")
        + ". Leave `uid` out to have the rows numbered"
    )
