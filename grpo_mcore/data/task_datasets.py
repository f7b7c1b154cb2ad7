"""The rows of one or several tasks as prompts: `build_task_data` loads them from a recipe's entries.

Rows that are too long, or that their dataset marks, are excluded and counted. So are rows that cannot be made a prompt
(a null answer, a conversation that the chat template rejects), up to a share of all rows: beyond that the data is
refused. A dataset of up to `CHECK_AT_ONCE` rows is tokenised when it is made, so that the counts are known before
training. Of a larger one, `PROBED_ROWS` rows are tried then; all are checked when a loader first reaches them.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from torch.utils.data import Dataset

from grpo_mcore.base.imports import no_exit
from grpo_mcore.data.datasets import DEFAULT_PROCESSOR, Entry, ResponseData, load_response_dataset, setting
from grpo_mcore.data.datasets.rows import Joined
from grpo_mcore.data.interfaces import (
    DataError,
    RowError,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    UidError,
    check_uids,
    repeated_uids,
    uid_text,
)
from grpo_mcore.recipe import dataset_by_name
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.images import ImageReader

CHECK_AT_ONCE = 20_000
PROBED_ROWS = 1_000  # evenly spread over a larger dataset
MAX_UNUSABLE_SHARE = 0.05
# Limits of the tokenised rows that are kept for the next epoch: about 100 MB.
KEEP_ROWS = 50_000
KEEP_TOKENS = 5_000_000
_UIDS_SHOWN = 5
_ERRORS_SHOWN = 3
_REASONS_COUNTED = 20  # each by itself; the template's or processor's words may differ from row to row
_UNCHECKED, _USABLE, _EXCLUDED = 0, 1, 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Excluded:
    """The rows excluded so far: `count` of the `checked` rows, of `total` in the dataset; the first few uids; counts by
    reason."""

    count: int
    uids: tuple[str, ...]
    checked: int
    total: int
    reasons: Mapping[str, int]

    def __str__(self) -> str:
        if not self.count:
            return f"none of {self.checked} prompts excluded"
        names = ", ".join(self.uids) + (", ..." if self.count > len(self.uids) else "")
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items()))
        reasons = next(iter(self.reasons)) if len(self.reasons) == 1 else f"unusable ({reasons})"
        return f"{self.count} of {self.checked} prompts excluded as {reasons}: {names}"


class AllTaskProcessedDataset(Dataset[DatumSpec]):
    """The dataset that loaders read: `dataset[i]` is row i as a DatumSpec, `usable(i)` whether a loader may take it.

    `task_data_processors` maps task names to (task spec, processor), or is one processor for all rows, used with
    `default_task_data_spec`. `max_seq_length` is in tokens; None means no limit. `max_unusable_share` is the largest
    share of rows that may fail to become a prompt. Raises DataError beyond it, for wrong uids, and where no usable row
    is left.
    """

    def __init__(
        self,
        dataset: Sequence[dict[str, Any]],
        tokenizer: Any,
        default_task_data_spec: TaskDataSpec | None,
        task_data_processors: Mapping[str, tuple[TaskDataSpec, TaskDataProcessFnCallable]] | TaskDataProcessFnCallable,
        max_seq_length: int | None = None,
        max_unusable_share: float = MAX_UNUSABLE_SHARE,
    ) -> None:
        if len(dataset) == 0:
            raise DataError("the dataset is empty")
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec or TaskDataSpec()
        self.task_data_processors = task_data_processors
        self.max_seq_length = max_seq_length
        self.max_unusable_share = max_unusable_share
        self._state = bytearray(len(dataset))
        self._first_excluded: list[str] = []
        self._reasons: Counter[str] = Counter()
        self._failed = 0  # rows that cannot be made a prompt
        self._errors: list[Exception] = []  # of the first of them
        self._repeated: list[str] = []
        self._kept: dict[int, DatumSpec] = {}
        self._kept_tokens = 0
        self._fingerprint: str | None = None
        self._uids: dict[str, int] = {}  # uid -> the first of the checked rows that has it
        if len(dataset) <= CHECK_AT_ONCE:
            self._check_all()
        else:
            self._probe()

    def __len__(self) -> int:
        """Number of rows, including excluded ones."""
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        datum = self._kept.get(idx)
        if datum is None:
            datum = self._process(idx)
            fits = len(self._kept) < KEEP_ROWS and self._kept_tokens + datum["length"] <= KEEP_TOKENS
            if fits and "images" not in datum:  # their files stay on disk
                self._kept[idx] = datum
                self._kept_tokens += datum["length"]
        # The caller may change its copy of the lists and dicts; tensors are never written to.
        log_copy = [message.copy() for message in datum["message_log"]]
        return {**datum, "message_log": log_copy, "extra_env_info": dict(datum["extra_env_info"])}

    def _process(self, idx: int) -> DatumSpec:
        row = self.dataset[idx]
        if "unusable" in row:  # marked by its dataset
            uid = uid_text(row.get("uid"), f"{row['task_name']}:{idx}")
            return _excluded(idx, row["unusable"], row["task_name"], uid)
        processors = self.task_data_processors
        name: Any = row.get("task_name")
        if callable(processors):
            spec, processor = self.default_task_data_spec, processors
        else:
            try:
                spec, processor = processors[name]  # a defaultdict has one for every name
            except KeyError:
                message = f"row {idx}: no processor for task_name {name!r}, only {sorted(processors)}"
                raise _NoProcessor(message) from None
        spec = spec or self.default_task_data_spec
        with no_exit("the processor"):
            datum = processor(row, spec, self.tokenizer, self.max_seq_length, idx)
        task = datum.get("task_name") or name or spec.task_name
        own_uid = datum.get("uid")
        uid = uid_text(row.get("uid") if own_uid is None or own_uid == "" else own_uid, f"{task}:{idx}")
        stops = datum.get("stop_strings") or spec.stop_strings
        if stops:
            datum = {**datum, "stop_strings": stops}
        return cast(DatumSpec, {**datum, "task_name": task, "uid": uid})

    def usable(self, idx: int) -> bool:
        """Return False where the row is too long, marked as unusable, or cannot be made a prompt. The answer is kept: a
        row is checked only once."""
        if self._state[idx] == _UNCHECKED:
            datum, error = self._attempt(idx)
            if datum["loss_multiplier"] and (first := self._uids.setdefault(datum["uid"], idx)) != idx:
                reason = f"its uid {datum['uid']!r} is that of row {first}"
                self._repeated.append(f"row {idx}: {reason}")
                self._kept[idx] = datum = _excluded(idx, reason, datum["task_name"], datum["uid"])
            self._state[idx] = _USABLE if datum["loss_multiplier"] else _EXCLUDED
            if error is not None:
                self._kept[idx] = datum
                self._failed += 1
                self._errors += [error] if len(self._errors) < _ERRORS_SHOWN else []
            if self._state[idx] == _EXCLUDED:
                self._report_excluded(datum)
            if len(self) > CHECK_AT_ONCE:  # of a smaller one, all are counted first
                self._refuse_too_many(self._failed, len(self), self._errors)
        return self._state[idx] == _USABLE

    def _attempt(self, idx: int) -> tuple[DatumSpec, Exception | None]:
        """Return a row as a DatumSpec. If none can be made of it: an excluded one, and the error."""
        try:
            return self[idx], None
        except (_NoProcessor, OSError, MemoryError):  # not the row's fault
            raise
        except RowError as error:
            return _excluded(idx, error.reason, self.default_task_data_spec.task_name, error.row), error
        except Exception as error:  # a processor may be the user's own program
            if isinstance(error, UidError) and len(self) <= CHECK_AT_ONCE:
                raise
            return _excluded(idx, _in_words(error), self.default_task_data_spec.task_name, f"row {idx}"), error

    def fingerprint(self, rows: int) -> str:
        """Return a digest of at most `rows` rows, evenly spread, before a processor has changed them."""
        if self._fingerprint is None:
            digest = hashlib.sha256(str(len(self)).encode())
            for index in range(0, len(self), -(-len(self) // rows)):
                try:
                    values = self.dataset[index]
                except RowError as error:  # an excluded row
                    values = {"unusable": error.reason}
                row = {name: value for name, value in values.items() if name not in ("uid", "task_name")}
                digest.update(json.dumps(row, sort_keys=True, default=_fingerprint_of).encode())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def usable_rows(self, limit: int | None = None) -> Iterator[DatumSpec]:
        """Yield the usable rows, `limit` at most."""
        return (self[index] for index in islice(filter(self.usable, range(len(self))), limit))

    def usable_at_most(self) -> int:
        """Number of usable rows, counting those that are not checked yet."""
        return len(self) - self._state.count(_EXCLUDED)

    @property
    def excluded(self) -> Excluded:
        return Excluded(
            count=self._state.count(_EXCLUDED),
            uids=tuple(self._first_excluded),
            checked=len(self) - self._state.count(_UNCHECKED),
            total=len(self),
            reasons=dict(self._reasons),
        )

    def _check_all(self) -> None:
        for idx in range(len(self)):
            self.usable(idx)
        if self._repeated:
            raise UidError(repeated_uids(self._repeated))
        self._refuse_too_many(self._failed, len(self), self._errors)
        if self.usable_at_most() == 0:
            shortest = min((self[idx]["length"] for idx in range(len(self))), default=0)
            raise DataError(
                f"no usable prompt is left: {self.excluded}; the limit is {self.max_seq_length} tokens, and the "
                f"shortest prompt has {shortest}, with chat template and prompt_file (null: none); raise "
                "policy.max_total_sequence_length (data.max_input_seq_length, where it is set)"
            )
        if self.excluded.count:
            log.warning("%s; the limit is %s tokens", self.excluded, self.max_seq_length)

    def _probe(self) -> None:
        """Try rows that are spread over a large dataset, so that one that is no good is refused before the start."""
        check_uids(self.dataset, self.default_task_data_spec.task_name)
        indices = range(0, len(self), max(1, len(self) // PROBED_ROWS))
        errors = [error for _, error in map(self._attempt, indices) if error is not None]
        self._refuse_too_many(len(errors), len(indices), errors)

    def _refuse_too_many(self, failed: int, rows: int, errors: Sequence[Exception]) -> None:
        """Raise DataError if more of the rows could not be made a prompt than the recipe tolerates."""
        if errors and failed > self.max_unusable_share * rows:
            reasons = "; ".join(dict.fromkeys(_in_words(error) for error in errors[:_ERRORS_SHOWN]))
            raise DataError(
                f"{failed:,} of {rows:,} rows cannot be used, more than data.max_unusable_share "
                f"({self.max_unusable_share:g}) allows: {reasons}" + (", ..." if failed > _ERRORS_SHOWN else "")
            ) from errors[0]

    def _report_excluded(self, datum: DatumSpec) -> None:
        reason = str(datum["extra_env_info"].get("unusable", "too long or invalid"))
        counted = reason in self._reasons or len(self._reasons) < _REASONS_COUNTED
        self._reasons[reason if counted else "other reasons"] += 1
        if len(self._first_excluded) < _UIDS_SHOWN:
            self._first_excluded.append(datum["uid"])
        if len(self) > CHECK_AT_ONCE and self._state.count(_EXCLUDED) == 1:
            reason = datum["extra_env_info"].get("unusable", f"it has {datum['length']} tokens")
            log.warning("prompt %s is excluded: %s; if more follow, they are counted per epoch", datum["uid"], reason)


class _NoProcessor(DataError):
    """A task for which no processor is known: a mistake of the program, not of a row."""


def _excluded(idx: int, reason: str, task_name: str, uid: str) -> DatumSpec:
    return DatumSpec(
        message_log=[],
        length=0,
        extra_env_info={"unusable": reason},
        loss_multiplier=0.0,
        idx=idx,
        task_name=task_name,
        uid=uid,
    )


def _fingerprint_of(value: Any) -> str:
    """Return what stands for a value that JSON has no form for: of an image, a digest of its file."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else type(value).__name__


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class TaskData:
    """The data of a run. `train` is one dataset, or one per task name. `env_names` and `val_env_names` map task names
    to the entry's env_name; None stands for the recipe's only environment."""

    train: AllTaskProcessedDataset | Mapping[str, AllTaskProcessedDataset]
    validation: AllTaskProcessedDataset | None
    env_names: dict[str, str | None]
    val_env_names: dict[str, str | None]

    def first_rows(self, count: int = 1, *, validation: bool = True) -> list[DatumSpec]:
        """Return the first usable rows of each dataset; without `validation` only of those to train on."""
        train = list(self.train.values()) if isinstance(self.train, Mapping) else [self.train]
        datasets = train if self.validation is None or not validation else [*train, self.validation]
        return [row for dataset in datasets for row in dataset.usable_rows(count)]


def build_task_data(
    train: Sequence[Entry],
    validation: Sequence[Entry],
    tokenizer: Any,
    max_seq_length: int | None,
    default_processor: str = DEFAULT_PROCESSOR,
    *,
    images: ImageReader | None = None,
    separate: bool = False,
    load: Callable[[Entry, str], ResponseData] = load_response_dataset,
    max_unusable_share: float = MAX_UNUSABLE_SHARE,
    stop_strings: Mapping[str, list[str] | None] = MappingProxyType({}),
) -> TaskData:
    """Load all entries of `data.train` and `data.validation`. The rows that `split_validation_size` takes from training
    datasets are added to the validation data.

    The validation data has one row of each dataset in turn, so that its first grpo.max_val_samples rows have an equal
    share of each. `images`: what prompts need of the model's images. `separate` keeps the training datasets apart, for
    data.use_multiple_dataloader. `load` loads the dataset of an entry, given the name of the default processor.
    `stop_strings`: those of each environment, for the rows of its tasks.
    """
    if not train:
        raise DataError("data.train is empty: name at least one dataset")
    _warn_of_shared_rows(train, validation)
    loaded = _load(train, default_processor, load)
    held_out = [data for data in loaded if data.val_dataset is not None]
    loaded_val = _load(validation, default_processor, load, taken={data.task_name for data in loaded})

    for data in (*loaded, *loaded_val):
        data.task_spec.images, data.task_spec.stop_strings = images, stop_strings.get(data.env_name or "")

    def processed(rows: Sequence[dict[str, Any]], datasets: list[ResponseData]) -> AllTaskProcessedDataset:
        processors = {data.task_name: (data.task_spec, data.processor) for data in datasets}
        return AllTaskProcessedDataset(rows, tokenizer, None, processors, max_seq_length, max_unusable_share)

    train_set: AllTaskProcessedDataset | dict[str, AllTaskProcessedDataset]
    if separate:
        train_set = {data.task_name: processed(data.dataset, [data]) for data in loaded}
    else:
        train_set = processed(Joined([data.dataset for data in loaded]), loaded)
    val_rows = [data.val_dataset for data in loaded if data.val_dataset is not None]
    val_rows += [data.dataset for data in loaded_val]
    val_datasets = [*held_out, *loaded_val]
    return TaskData(
        train=train_set,
        validation=processed(Joined(val_rows, in_turn=True), val_datasets) if val_rows else None,
        env_names={data.task_name: data.env_name for data in loaded},
        val_env_names={data.task_name: data.env_name for data in val_datasets},
    )


def _warn_of_shared_rows(train: Sequence[Entry], validation: Sequence[Entry]) -> None:
    """Warn where an entry of the validation data reads what one of the training data reads: of a dataset with several
    splits, both read the one for training where they name none. Files are compared, however they are spelled."""
    trained = {table for entry in train for table in _tables_of(entry)}
    shared = {table for entry in validation for table in _tables_of(entry)} & trained
    for name, path, *_ in sorted(shared, key=str):
        log.warning(
            "data.validation reads the rows of %s that data.train reads, so that the policy is validated on what it is "
            "trained on; name another file or `split`, or set split_validation_size in data.train instead",
            path or name,
        )


def _tables_of(entry: Entry) -> list[tuple[str | None, ...]]:
    """Return what an entry reads, (dataset, path, subset, split): each of its files where it names files or a pattern
    of files without a part of their rows. Nothing where a custom class generates the rows."""
    name, path, split = (setting(entry, key) for key in ("dataset_name", "data_path", "split"))
    if not path and dataset_by_name(name or "") in (None, "SlidingPuzzle", "Verifiers"):
        return []
    files = [file for file in glob(str(path), recursive=True) if Path(file).is_file()] if path else []
    if files and str(split).isidentifier():
        return [(None, str(Path(file).resolve()), None, None) for file in files]
    return [(name, path, setting(entry, "subset"), split)]


def _load(
    entries: Sequence[Entry],
    default_processor: str,
    load: Callable[[Entry, str], ResponseData],
    taken: set[str] | None = None,
) -> list[ResponseData]:
    """Load every dataset and give it a unique task name, since prompts are named after it."""
    names = set(taken or ())
    loaded = []
    for entry in entries:
        data = load(entry, default_processor)
        if data.task_name in names:
            split = setting(entry, "split")
            further = [f"{data.task_name}-{split}"] if split and split.isidentifier() else []
            further += [f"{data.task_name}-{number}" for number in range(2, len(names) + 3)]
            data.task_name = data.task_spec.task_name = next(name for name in further if name not in names)
        names.add(data.task_name)
        loaded.append(data)
    return loaded
