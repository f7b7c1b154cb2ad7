"""The rows of one or several tasks as prompts: `build_task_data` loads them from a recipe's entries.

Unusable rows are excluded and counted. A dataset of up to `CHECK_AT_ONCE` rows is tokenised when it is made, so that
the count is known before training. Rows of a larger one are checked when a loader first reaches them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from torch.utils.data import Dataset

from grpo_mcore.data.datasets import DEFAULT_PROCESSOR, Entry, ResponseData, load_response_dataset, setting
from grpo_mcore.data.datasets.rows import Joined
from grpo_mcore.data.interfaces import DataError, TaskDataProcessFnCallable, TaskDataSpec, uid_text
from grpo_mcore.rollout.datum import DatumSpec

CHECK_AT_ONCE = 20_000
# Limits of the tokenised rows that are kept for the next epoch: about 100 MB.
KEEP_ROWS = 50_000
KEEP_TOKENS = 5_000_000
_UIDS_SHOWN = 5
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
        why = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items()))
        why = next(iter(self.reasons)) if len(self.reasons) == 1 else f"unusable ({why})"
        return f"{self.count} of {self.checked} prompts excluded as {why}: {names}"


class AllTaskProcessedDataset(Dataset[DatumSpec]):
    """The dataset that loaders read: `dataset[i]` is row i as a DatumSpec, `usable(i)` whether a loader may take it.

    `task_data_processors` maps task names to (task spec, processor), or is one processor for all rows, used with
    `default_task_data_spec`. `max_seq_length` is in tokens; None means no limit.
    """

    def __init__(
        self,
        dataset: Sequence[dict[str, Any]],
        tokenizer: Any,
        default_task_data_spec: TaskDataSpec | None,
        task_data_processors: Mapping[str, tuple[TaskDataSpec, TaskDataProcessFnCallable]] | TaskDataProcessFnCallable,
        max_seq_length: int | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise DataError("the dataset is empty")
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec or TaskDataSpec()
        self.task_data_processors = task_data_processors
        self.max_seq_length = max_seq_length
        self._state = bytearray(len(dataset))
        self._first_excluded: list[str] = []
        self._reasons: Counter[str] = Counter()
        self._kept: dict[int, DatumSpec] = {}
        self._kept_tokens = 0
        self._fingerprint: str | None = None
        self._uids: dict[str, int] = {}  # of the rows that are checked -> the first of them
        if len(dataset) <= CHECK_AT_ONCE:
            self._check_all()

    def __len__(self) -> int:
        """Number of rows, including excluded ones."""
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        datum = self._kept.get(idx)
        if datum is None:
            datum = self._process(idx)
            if len(self._kept) < KEEP_ROWS and self._kept_tokens + datum["length"] <= KEEP_TOKENS:
                self._kept[idx] = datum
                self._kept_tokens += datum["length"]
        # The caller may change its copy of the lists and dicts; tensors are never written to.
        log_copy = [message.copy() for message in datum["message_log"]]
        return {**datum, "message_log": log_copy, "extra_env_info": dict(datum["extra_env_info"])}

    def _process(self, idx: int) -> DatumSpec:
        row = self.dataset[idx]
        if "unusable" in row:  # marked by its dataset
            return DatumSpec(
                message_log=[],
                length=0,
                extra_env_info={"unusable": row["unusable"]},
                loss_multiplier=0.0,
                idx=idx,
                task_name=row["task_name"],
                uid=uid_text(row.get("uid"), f"{row['task_name']}:{idx}"),
            )
        processors = self.task_data_processors
        name: Any = row.get("task_name")
        if callable(processors):
            spec, processor = self.default_task_data_spec, processors
        else:
            try:
                spec, processor = processors[name]  # a defaultdict has one for every name
            except KeyError:
                message = f"row {idx}: no processor for task_name {name!r}, only {sorted(processors)}"
                raise DataError(message) from None
        spec = spec or self.default_task_data_spec
        datum = processor(row, spec, self.tokenizer, self.max_seq_length, idx)
        task = datum.get("task_name") or name or spec.task_name
        given = datum.get("uid")
        uid = uid_text(row.get("uid") if given is None or given == "" else given, f"{task}:{idx}")
        return cast(DatumSpec, {**datum, "task_name": task, "uid": uid})

    def usable(self, idx: int) -> bool:
        """Return False where the row is too long or invalid. The answer is kept: a row is checked only once."""
        if self._state[idx] == _UNCHECKED:
            datum = self[idx]
            excluded = datum["loss_multiplier"] == 0
            if not excluded and (first := self._uids.setdefault(datum["uid"], idx)) != idx:
                repeated = {"unusable": f"its uid {datum['uid']!r} is that of row {first}"}
                self._kept[idx] = datum = {**datum, "loss_multiplier": 0.0, "extra_env_info": repeated}
                excluded = True
            self._state[idx] = _EXCLUDED if excluded else _USABLE
            if excluded:
                self._reasons[datum["extra_env_info"].get("unusable", "too long or invalid")] += 1
                self._report_excluded(datum)
        return self._state[idx] == _USABLE

    def fingerprint(self, rows: int) -> str:
        """Return a digest of at most `rows` rows, evenly spread, before a processor has changed them."""
        if self._fingerprint is None:
            digest = hashlib.sha256(str(len(self)).encode())
            for index in range(0, len(self), -(-len(self) // rows)):
                row = {name: value for name, value in self.dataset[index].items() if name not in ("uid", "task_name")}
                digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

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
        self._refuse_repeated_uids()
        if self.usable_at_most() == 0:
            shortest = min((self[idx]["length"] for idx in range(len(self))), default=0)
            raise DataError(
                f"no usable prompt is left: {self.excluded}; the limit is {self.max_seq_length} tokens, and the "
                f"shortest prompt has {shortest}, with chat template and prompt_file (null: none); raise "
                "policy.max_total_sequence_length (data.max_input_seq_length, where it is set)"
            )
        if self.excluded.count:
            log.warning("%s; the limit is %s tokens", self.excluded, self.max_seq_length)

    def _refuse_repeated_uids(self) -> None:
        """Raise DataError for rows with the same uid. In data that is too large to be checked at once, a row whose uid
        was seen before is excluded."""
        repeated = [
            f"row {idx}: {datum['extra_env_info']['unusable']}"
            for idx, datum in self._kept.items()
            if "its uid" in str(datum["extra_env_info"].get("unusable", ""))
        ]
        if repeated:
            raise DataError(
                f"uids must be unique, since a prompt's fate is recorded under its uid; {'; '.join(repeated[:3])}"
                + (f", and {len(repeated) - 3} more" if len(repeated) > 3 else "")
                + ". Leave `uid` out to have the rows numbered"
            )

    def _report_excluded(self, datum: DatumSpec) -> None:
        if len(self._first_excluded) < _UIDS_SHOWN:
            self._first_excluded.append(datum["uid"])
        if len(self) > CHECK_AT_ONCE and self._state.count(_EXCLUDED) == 1:
            reason = datum["extra_env_info"].get("unusable", f"it has {datum['length']} tokens")
            log.warning("prompt %s is excluded: %s; if more follow, they are counted per epoch", datum["uid"], reason)


@dataclass(frozen=True)
class TaskData:
    """The data of a run. `train` is one dataset, or one per task name. `env_names` and `val_env_names` map task names
    to the entry's env_name; None stands for the recipe's only environment."""

    train: AllTaskProcessedDataset | Mapping[str, AllTaskProcessedDataset]
    validation: AllTaskProcessedDataset | None
    env_names: dict[str, str | None]
    val_env_names: dict[str, str | None]

    def first_rows(self, count: int = 1) -> list[DatumSpec]:
        """Return the first usable rows of each dataset."""
        train = list(self.train.values()) if isinstance(self.train, Mapping) else [self.train]
        datasets = train if self.validation is None else [*train, self.validation]
        usable = [islice(filter(one.usable, range(len(one))), count) for one in datasets]
        return [one[index] for one, indices in zip(datasets, usable, strict=True) for index in indices]


def build_task_data(
    train: Sequence[Entry],
    validation: Sequence[Entry],
    tokenizer: Any,
    max_seq_length: int | None,
    default_processor: str = DEFAULT_PROCESSOR,
    *,
    separate: bool = False,
    load: Callable[[Entry, str], ResponseData] = load_response_dataset,
) -> TaskData:
    """Load all entries of `data.train` and `data.validation`. The rows that `split_validation_size` takes from training
    datasets are added to the validation data.

    The validation data has one row of each dataset in turn, so that its first grpo.max_val_samples rows have an equal
    share of each. `separate` keeps the training datasets apart, for data.use_multiple_dataloader. `load` loads the
    dataset of an entry, given the name of the default processor.
    """
    if not train:
        raise DataError("data.train is empty: name at least one dataset")
    loaded = _load(train, default_processor, load)
    held_out = [data for data in loaded if data.val_dataset is not None]
    loaded_val = _load(validation, default_processor, load, taken={data.task_name for data in loaded})

    def processed(rows: Sequence[dict[str, Any]], datasets: list[ResponseData]) -> AllTaskProcessedDataset:
        processors = {data.task_name: (data.task_spec, data.processor) for data in datasets}
        return AllTaskProcessedDataset(rows, tokenizer, None, processors, max_seq_length=max_seq_length)

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
