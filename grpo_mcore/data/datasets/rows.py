"""Views of the rows of a file or of a Hugging Face dataset. Rows are formatted when they are read, never copied."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo_mcore.data.interfaces import DataError

log = logging.getLogger(__name__)


class Rows(Sequence[dict[str, Any]]):
    """The rows `to_row(source[i], i)` for the given indices i, in their order."""

    def __init__(
        self,
        source: Sequence[dict[str, Any]],
        to_row: Callable[[dict[str, Any], int], dict[str, Any]],
        indices: Sequence[int] | None = None,
    ) -> None:
        self._source = source
        self._to_row = to_row
        self._indices = range(len(source)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = int(self._indices[index])
        return self._to_row(self._source[row], row)

    def split(self, size: float, seed: int) -> tuple[Rows, Rows]:
        """Return (the rest, a random part), both in order. `size` below 1 is a share of the rows, else their number.
        Rows with the prompt of one in the part go there too, so that no question of it is trained on."""
        count = round(size * len(self)) if size < 1 else int(size)
        if not 0 < count < len(self):
            raise DataError(
                f"split_validation_size {size:g} takes {count} of {len(self)} rows; both parts need at least one"
            )
        chosen = np.zeros(len(self), dtype=bool)
        chosen[np.random.default_rng(seed).permutation(len(self))[:count]] = True
        prompts = np.array([self._prompt_hash(index) for index in range(len(self))])
        with_repeated = chosen | np.isin(prompts, prompts[chosen])
        if with_repeated.all():
            log.warning("split_validation_size: every row has one of the prompts that it takes, so they are trained on")
            with_repeated = chosen
        if repeated := int(with_repeated.sum()) - count:
            log.warning(
                "split_validation_size: %d more rows are held out, which repeat a prompt of the %d that it takes",
                repeated, count,
            )  # fmt: skip
        indices: Any = np.asarray(self._indices)
        return (
            Rows(self._source, self._to_row, indices[~with_repeated]),
            Rows(self._source, self._to_row, indices[with_repeated]),
        )

    def _prompt_hash(self, index: int) -> int:
        """Return a hash of a row's messages before the answer; of the index where it has none, or cannot be read."""
        try:
            messages = self[index].get("messages")
        except DataError:  # it is counted, or refused, where it is used
            messages = None
        if not isinstance(messages, list):
            return hash((index,))
        prompt = [
            message for message in messages if not isinstance(message, dict) or message.get("role") != "assistant"
        ]
        return hash(json.dumps(prompt, default=lambda value: hash(value) if isinstance(value, bytes) else repr(value)))


class Repeated(Sequence[dict[str, Any]]):
    """All rows, `times` times over. Every occurrence is a prompt with its own uid."""

    def __init__(self, rows: Sequence[dict[str, Any]], times: int) -> None:
        self._rows = rows
        self._times = times

    def __len__(self) -> int:
        return len(self._rows) * self._times

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        repetition, position = divmod(range(len(self))[index], len(self._rows))
        row = self._rows[position]
        return {**row, "uid": f"{row['uid']}~{repetition}"} if repetition else row


class Joined(Sequence[dict[str, Any]]):
    """The rows of several datasets, one dataset after the other. With `in_turn`, one row of each in turn until all have
    ended, so that the first n rows are shared evenly."""

    def __init__(self, parts: Sequence[Sequence[dict[str, Any]]], *, in_turn: bool = False) -> None:
        self._parts = parts
        self._part = np.repeat(np.arange(len(parts)), [len(rows) for rows in parts])
        self._at = np.concatenate([np.arange(len(rows)) for rows in parts])
        if in_turn:
            order = np.lexsort((self._part, self._at))
            self._part, self._at = self._part[order], self._at[order]

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        part, position = self.locate(index)
        return self._parts[part][position]

    def locate(self, index: int) -> tuple[int, int]:
        """Return (index of the dataset, index in it)."""
        return int(self._part[index]), int(self._at[index])
