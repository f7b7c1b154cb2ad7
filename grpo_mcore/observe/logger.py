"""Metrics by step: always as JSONL, optionally to TensorBoard and Weights & Biases."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_mcore.imports import import_by_path
from grpo_mcore.observe.append_file import AppendFile
from grpo_mcore.recipe import GRPOLoggerConfig, OwnLoggerConfig

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
HYPERPARAMS_FILE = "hyperparams.json"
RESERVED = ("step", "prefix", "unix_time")


class MissingPackage(RuntimeError):
    """The recipe asks for a logger whose package is not installed."""


class OwnLoggerError(ValueError):
    """A class under logger.own that is no logger."""


def check_own_logger(own: OwnLoggerConfig) -> Any:
    """Return the class of a logger of the user's own. It is built as `Class(log_dir, **options)` and has
    `log_metrics(metrics, step, prefix)`, `log_hyperparams(params)` and `close()`. Raises OwnLoggerError for another."""
    what = f"logger.own {own.path}"
    cls = import_by_path(own.path, "logger", OwnLoggerError)
    try:
        inspect.signature(cls).bind("log_dir", **own.options)
        inspect.signature(cls.log_metrics).bind(None, {}, 1, "train")
        inspect.signature(cls.log_hyperparams).bind(None, {})
        inspect.signature(cls.close).bind(None)
    except (AttributeError, TypeError) as error:
        raise OwnLoggerError(
            f"{what}: {error}; a logger is a class, built as Class(log_dir, **options), with "
            "log_metrics(metrics, step, prefix), log_hyperparams(params) and close()"
        ) from error
    return cls


class Logger:
    """Writes to a run's own folder, `log_dir`: the next free exp_001, exp_002, ... in `config.log_dir`.

    `config`: the recipe's `logger` section. `run`: the folder of an earlier run (exp_NNN) to go on in, if it is there.
    Raises MissingPackage.
    """

    def __init__(self, config: GRPOLoggerConfig, *, run: str | None = None) -> None:
        wandb = _import_wandb() if config.wandb_enabled else None
        self.log_dir = run_folder(Path(config.log_dir), run)
        self._file = AppendFile(self.log_dir / METRICS_FILE)
        self._tensorboard: Any = None
        self._wandb: Any = None
        self.tensorboard_dir: Path | None = None
        if config.tensorboard_enabled:
            self.tensorboard_dir = self.log_dir / (config.tensorboard.log_dir or "tensorboard")
            self._tensorboard = _open_tensorboard(self.tensorboard_dir)
        self._own = [check_own_logger(own)(self.log_dir, **own.options) for own in config.own]
        if wandb is not None:
            where = config.wandb
            self._wandb = wandb.init(project=where.project, name=where.name, entity=where.entity, dir=str(self.log_dir))

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """One line of `metrics.jsonl`: {"step", "prefix", "unix_time", and the metrics}. Values are numbers,
        tensors or arrays of one element, None, or mappings of these (joined with "/"). NaN and infinities are null
        there.

        Raises TypeError for another value, ValueError for a name that the line itself uses.
        """
        values = dict(_flat(metrics))
        if taken := [name for name in RESERVED if name in values]:
            raise ValueError(f"{taken} cannot be names of metrics: the lines of {METRICS_FILE} use them")
        head = {"step": step, "prefix": prefix, "unix_time": round(time.time(), 3)}
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(head | finite))
        named = {f"{prefix}/{name}" if prefix else name: v for name, v in values.items() if v is not None}
        if self.tensorboard_dir is not None:
            self._to_tensorboard(named, step)
        if self._wandb is not None:
            self._wandb.log(named, step=step)
        for own in self._own:
            own.log_metrics(dict(values), step, prefix)

    def _to_tensorboard(self, metrics: Mapping[str, float], step: int) -> None:
        """Write to TensorBoard. On a full disk its writer gives up for good: these values are left out there, and the
        next ones get a new writer."""
        assert self.tensorboard_dir is not None
        try:
            if self._tensorboard is None:
                self._tensorboard = _open_tensorboard(self.tensorboard_dir)
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        except OSError as error:
            self._tensorboard = None
            log.warning("TensorBoard lacks step %d: %s; %s has it", step, error.strerror or error, METRICS_FILE)

    def log_hyperparams(self, params: Any) -> None:
        """The resolved recipe: a mapping or a pydantic model, to `hyperparams.json` and the other loggers."""
        plain = params.model_dump(mode="json") if hasattr(params, "model_dump") else dict(params)
        text = json.dumps(plain, indent=2, default=str)
        (self.log_dir / HYPERPARAMS_FILE).write_text(text + "\n")
        if self._tensorboard is not None:
            self._tensorboard.add_text("hyperparams", f"```json\n{text}\n```")
        if self._wandb is not None:
            self._wandb.config.update(json.loads(text))
        for own in self._own:
            own.log_hyperparams(json.loads(text))

    def close(self) -> None:
        """Write what is left and close all loggers. Idempotent."""
        self._file.close()
        if self._tensorboard is not None:
            with suppress(OSError):  # a full disk: metrics.jsonl has said so
                self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
        while self._own:
            self._own.pop().close()


def run_folder(parent: Path, run: str | None = None) -> Path:
    """The folder `run` in `parent` where it exists; else makes the next free exp_NNN there, from exp_001 on."""
    parent.mkdir(parents=True, exist_ok=True)
    taken = sorted(int(path.name[4:]) for path in parent.glob("exp_*") if path.name[4:].isdigit())
    if run is not None and (parent / run).is_dir():
        return parent / run
    number = taken[-1] + 1 if taken else 1
    while True:
        folder = parent / f"exp_{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run was quicker
            number += 1
        else:
            return folder


def read_metrics(path: Path, prefix: str) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` with this prefix, by step. A resumed run repeats steps: the last counts.

    A line that a crash has cut off is left out with a warning.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            log.warning("%s:%d is left out, it is not JSON: %s", path, number, error)
            continue
        if isinstance(row, dict) and row.get("prefix") == prefix and "step" in row:
            by_step[row["step"]] = by_step.get(row["step"], {}) | row
    return [by_step[step] for step in sorted(by_step)]


def _flat(metrics: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float | int | None]]:
    for name, value in metrics.items():
        name = f"{path}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
            continue
        if hasattr(value, "item"):
            try:
                value = value.item()
            except (ValueError, RuntimeError) as error:
                raise TypeError(f"metric {name!r} has more than one element") from error
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"metric {name!r} is no number but {type(value).__name__}: {value!r}")
        yield name, value


def _open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingPackage(
            "logger.tensorboard_enabled needs tensorboard: pip install tensorboard, or set it to false"
        ) from error
    return SummaryWriter(str(folder))


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingPackage("logger.wandb_enabled needs wandb: pip install wandb, or set it to false") from error
    return wandb


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, whole or not at all. Raises ValueError for NaN and infinities."""
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
