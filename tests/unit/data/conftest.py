"""The arithmetic task's tokenizer, made once, and a writer of JSONL files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.data import load_tokenizer
from grpo_mcore.tools.demo.arithmetic import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(str(folder))


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Return a function write_jsonl(name, rows) -> path. Text rows are written unchanged."""

    def write(name: str, rows: Iterable[dict[str, Any] | str]) -> str:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines))
        return str(path)

    return write


def sums(count: int, **extra: Any) -> list[dict[str, Any]]:
    """Return rows "n+1=" -> "n+1"."""
    return [{"input": f"{n}+1=", "output": str(n + 1), **extra} for n in range(count)]
