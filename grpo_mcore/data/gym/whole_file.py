"""A file that appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from grpo_mcore.data.interfaces import DataError


class WholeFile:
    """A file that is written beside `target` and replaces it when the `with` block ends without an error. After
    `discard()`, `target` stays as it was."""

    def __init__(self, target: Path) -> None:
        self.target = target.resolve()
        if self.target.exists() and not self.target.is_file():
            raise DataError(f"{target}: the output must be a file")
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self.target.with_name(f".{self.target.name}.{os.getpid()}.partial")
        self._file = self._partial.open("wb", buffering=1 << 20)
        self.write = self._file.write
        self._keep = True

    def discard(self) -> None:
        self._keep = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and self._keep:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self.target)
        finally:
            self._partial.unlink(missing_ok=True)
            self._file.close()
