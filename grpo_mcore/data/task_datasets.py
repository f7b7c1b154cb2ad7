"""Rows of one or several tasks as prompts. What cannot be used is excluded and counted.

Up to `CHECK_AT_ONCE` rows, all are tokenised when the dataset is made, so that the count is known before
training; beyond that, each is checked when a loader first comes to it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from grpo_mcore.data.interfaces import DataError, TaskDataProcessFnCallable, TaskDataSpec
from grpo_mcore.rollout.datum import DatumSpec

CHECK_AT_ONCE = 20_000
# Tokenised rows are kept for the next epoch up to here: some 100 MB at most.
KEEP_ROWS = 50_000
KEEP_TOKENS = 5_000_000
_UIDS_SHOWN = 5
_UNCHECKED, _USABLE, _EXCLUDED = 0, 1, 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Excluded:
    """What was left out so far: `count` of `checked` rows, of `total` in the dataset; the first few uids; how many for
    each reason."""

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
    """`dataset[i]` is row i as a DatumSpec; `usable(i)` says whether a loader may take it.

    `task_data_processors`: task name -> (task spec, processor), or one processor for all with
    `default_task_data_spec`. `max_seq_length`: tokens; None for no limit.
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
        if len(dataset) <= CHECK_AT_ONCE:
            self._check_all()

    def __len__(self) -> int:
        """Rows, excluded ones included."""
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        datum = self._kept.get(idx)
        if datum is None:
            datum = self._process(idx)
            if len(self._kept) < KEEP_ROWS and self._kept_tokens + datum["length"] <= KEEP_TOKENS:
                self._kept[idx] = datum
                self._kept_tokens += datum["length"]
        # The caller may add messages and notes to its own copy; the tensors are never written to.
        log_copy = [message.copy() for message in datum["message_log"]]
        return {**datum, "message_log": log_copy, "extra_env_info": dict(datum["extra_env_info"])}

    def _process(self, idx: int) -> DatumSpec:
        row = self.dataset[idx]
        if "unusable" in row:
            return _nothing(row, idx)
        if callable(self.task_data_processors):
            spec, processor = self.default_task_data_spec, self.task_data_processors
        else:
            spec, processor = self._of_task(row, idx)
        return processor(row, spec, self.tokenizer, self.max_seq_length, idx)

    def usable(self, idx: int) -> bool:
        """False where the row is too long or invalid. Remembered: it is tokenised for this only once."""
        if self._state[idx] == _UNCHECKED:
            datum = self[idx]
            excluded = datum["loss_multiplier"] == 0
            self._state[idx] = _EXCLUDED if excluded else _USABLE
            if excluded:
                self._reasons[datum["extra_env_info"].get("unusable", "too long or invalid")] += 1
                self._note(datum)
        return self._state[idx] == _USABLE

    def usable_at_most(self) -> int:
        """Usable rows, counting those not checked yet."""
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

    def _of_task(self, row: dict[str, Any], idx: int) -> tuple[TaskDataSpec, TaskDataProcessFnCallable]:
        try:
            return self.task_data_processors[row["task_name"]]  # type: ignore[index]
        except KeyError as error:
            known = sorted(self.task_data_processors)  # type: ignore[arg-type]
            raise DataError(f"row {idx}: no processor for task_name {row.get('task_name')!r}, only {known}") from error

    def _check_all(self) -> None:
        for idx in range(len(self)):
            self.usable(idx)
        if self.usable_at_most() == 0:
            raise DataError(f"no usable prompt is left: {self.excluded}; the limit is {self.max_seq_length} tokens")
        if self.excluded.count:
            log.warning("%s; the limit is %s tokens", self.excluded, self.max_seq_length)

    def _note(self, datum: DatumSpec) -> None:
        if len(self._first_excluded) < _UIDS_SHOWN:
            self._first_excluded.append(datum["uid"])
        if len(self) > CHECK_AT_ONCE and self._state.count(_EXCLUDED) == 1:
            reason = datum["extra_env_info"].get("unusable", f"it has {datum['length']} tokens")
            log.warning("prompt %s is excluded: %s; if more follow, they are counted per epoch", datum["uid"], reason)


def _nothing(row: dict[str, Any], idx: int) -> DatumSpec:
    """Stands for a row that its dataset calls unusable."""
    return DatumSpec(
        message_log=[],
        length=0,
        extra_env_info={"unusable": row["unusable"]},
        loss_multiplier=0.0,
        idx=idx,
        task_name=row["task_name"],
        uid=row["uid"],
    )
