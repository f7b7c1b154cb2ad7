"""A logger of your own: metrics as one CSV file for each prefix (train, validation), in the run's log folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CsvLogger:
    """Writes train.csv, validation.csv and recipe.json. Columns are those of a file's first line."""

    def __init__(self, log_dir: Path, *, delimiter: str = ",") -> None:
        self.log_dir, self.delimiter = log_dir, delimiter
        self._columns: dict[str, list[str]] = {}

    def log_metrics(self, metrics: Mapping[str, float | None], step: int, prefix: str) -> None:
        """Append a line."""
        first = prefix not in self._columns
        columns = self._columns.setdefault(prefix, ["step", *metrics])
        with (self.log_dir / f"{prefix}.csv").open("a", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", delimiter=self.delimiter)
            if first:
                writer.writeheader()
            writer.writerow({"step": step, **metrics})

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved recipe."""
        (self.log_dir / "recipe.json").write_text(json.dumps(params, indent=2))

    def close(self) -> None:
        """Do nothing: each line is already written."""
