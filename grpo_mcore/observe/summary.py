"""`summary.json`: a run's outcome for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary` to `path`, whole or not at all. Raises ValueError for NaN and infinities."""
    text = json.dumps(dict(summary), indent=2, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
