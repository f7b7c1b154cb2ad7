"""JSONL read line by line, so that an error names its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_mcore.data.interfaces import DataError


def read_jsonl(path: Path, check: Callable[[dict[str, Any], str], None]) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects and their line numbers (from 1). Blank lines are passed over.

    `check(row, where)` raises DataError for a row that lacks what it must have. Raises DataError for a
    missing file, an empty one, and a line that is not a JSON object.
    """
    if not path.is_file():
        raise DataError(f"data file not found: {path}")
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = _parse(line, f"{path}:{number}")
                check(row, f"{path}:{number}")
                rows.append(row)
                lines.append(number)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{len(rows) + 1} or later: not UTF-8 text ({error.reason})") from error
    if not rows:
        raise DataError(f"{path}: the dataset is empty")
    return rows, lines


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip("\n"))
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno}); one JSON object a line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}; one JSON object a line")
    return row
