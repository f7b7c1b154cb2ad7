"""Conversations that are published as trees of messages, one message a row (OpenAssistant)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from grpo_mcore.data.interfaces import DataError
from grpo_mcore.data.source import Source, missing

_COLUMNS = ("message_id", "parent_id", "role", "deleted")


def threads(source: Source) -> Source:
    """A row {"thread": messages} for every way from a first message to a last answer. Raises DataError."""
    ids, parents, roles, deleted = _columns(source)
    paths = conversation_paths(ids, parents, roles, deleted)
    if not paths:
        raise DataError(f"{source.place(0)} and later: no conversation with an answer in it")
    last = [path[-1] for path in paths]
    return Source(Threads(source.rows, paths), last, lambda index: source.place(last[index]))


class Threads(Sequence[dict[str, Any]]):
    """The rows along each path."""

    def __init__(self, rows: Sequence[dict[str, Any]], paths: Sequence[tuple[int, ...]]) -> None:
        self._rows, self._paths = rows, paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return {"thread": [self._rows[at] for at in self._paths[index]]}


def conversation_paths(
    ids: Sequence[str], parents: Sequence[str | None], roles: Sequence[str], deleted: Sequence[bool | None]
) -> list[tuple[int, ...]]:
    """The row numbers from each root down to each leaf, without questions that nobody answered, each way once.

    A deleted message ends the way above it. Roots, and the replies to a message, are in the order of their rows.
    """
    replies: dict[str | None, list[int]] = defaultdict(list)
    for row, parent in enumerate(parents):
        if not deleted[row]:
            replies[parent].append(row)
    found: dict[tuple[int, ...], None] = {}
    open_ways = [(row,) for row in reversed(replies[None])]
    while open_ways:
        way = open_ways.pop()
        further = replies.get(ids[way[-1]], [])
        open_ways += [(*way, row) for row in reversed(further)]
        answered = way if roles[way[-1]] == "assistant" else way[:-1]
        if not further and answered:
            found.setdefault(answered)
    # A way that ends above an unanswered question may be the beginning of a longer one.
    beginnings = {way[:end] for way in found for end in range(1, len(way))}
    return [way for way in found if way not in beginnings]


def _columns(source: Source) -> list[list[Any]]:
    """The columns that make the tree, of a table without reading its other columns."""
    first = source.rows[0]
    for name in _COLUMNS:
        if name not in first:
            raise DataError(f"{source.place(0)}: {missing(first, name)}")
    if source.columns is not None:
        table = source.rows.select_columns(list(_COLUMNS))  # type: ignore[attr-defined]
        return [list(table[name]) for name in _COLUMNS]
    return [[row.get(name) for row in source.rows] for name in _COLUMNS]
