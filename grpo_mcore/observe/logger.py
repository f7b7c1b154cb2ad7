"""Metrics by step: always as JSONL, and to the backends that the recipe asks for (backends.py)."""

import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.base.imports import import_by_path
from grpo_mcore.observe.alarms import Alarm, post_alarm
from grpo_mcore.observe.append_file import AppendFile
from grpo_mcore.observe.band import read_band
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.observe.trackers.backends import chosen_backends
from grpo_mcore.observe.trackers.tracker import Tracker
from grpo_mcore.recipe import CustomCode, GRPOLoggerConfig, without_secrets

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
HYPERPARAMS_FILE = "hyperparams.json"
CONSOLE_FILE = "console.txt"
RESERVED = ("step", "prefix", "unix_time")


class CustomLoggerError(ValueError):
    """A class under logger.custom that is no logger."""


def check_custom_logger(code: CustomCode) -> Any:
    """Return the class of a custom logger. It is built as `Class(log_dir, **options)` and has
    `log_metrics(metrics, step, prefix)`, `log_hyperparams(params)` and `close()`. Raises CustomLoggerError."""
    key = f"logger.custom {code.path}"
    cls = import_by_path(code.path, "logger", CustomLoggerError)
    try:
        inspect.signature(cls).bind("log_dir", **code.options)
        inspect.signature(cls.log_metrics).bind(None, {}, 1, "train")
        inspect.signature(cls.log_hyperparams).bind(None, {})
        inspect.signature(cls.close).bind(None)
    except (AttributeError, TypeError) as error:
        raise CustomLoggerError(
            f"{key}: {error}; a logger is a class, built as Class(log_dir, **options), with "
            "log_metrics(metrics, step, prefix), log_hyperparams(params) and close()"
        ) from error
    return cls


def check_loggers(config: GRPOLoggerConfig) -> None:
    """Raise MissingPackage, CustomLoggerError or BandError for what the recipe asks for and cannot be here."""
    chosen_backends(config)
    if config.alarms.band is not None:
        read_band(config.alarms.band)
    for code in config.custom:
        check_custom_logger(code)


class Logger:
    """Writes to a run's own folder, `log_dir`: the next free exp_001, exp_002, ... in `config.log_dir`.

    Trackers get the same values in threads of their own (tracker.py): none of them can slow or end a run.

    `config`: the recipe's `logger` section. `run`: the folder of an earlier run (exp_NNN) to go on in, if it is there.
    Raises MissingPackage.
    """

    def __init__(self, config: GRPOLoggerConfig, *, run: str | None = None, clock: Clock = REAL) -> None:
        chosen = chosen_backends(config)
        self.log_dir = run_folder(Path(config.log_dir), run)
        summary = self.log_dir / "summary.json"
        self._summary = summary.read_bytes() if summary.is_file() else None
        summary.unlink(missing_ok=True)  # a run that goes on is not over
        self._file = AppendFile(self.log_dir / METRICS_FILE)
        self.console = AppendFile(self.log_dir / CONSOLE_FILE)
        """The text of the run's console."""
        self._hyperparams = ""
        self.end: RunEnd | None = None
        """How the run has ended, once it has. The trackers show it."""
        self._clock, self.opened = clock, clock.now()
        """When the run began, before its cluster was started."""
        tensorboard = self.log_dir / (config.tensorboard.log_dir or "tensorboard")
        self.tensorboard_dir = tensorboard if config.tensorboard_enabled else None
        self._backends = [Tracker(name, partial(cls, package, config, self.log_dir)) for name, package, cls in chosen]
        custom = [(code, check_custom_logger(code)) for code in config.custom]
        self._custom = [
            Tracker[Any](f"logger.custom {code.path}", partial(cls, self.log_dir, **code.options))
            for code, cls in custom
        ]
        webhook = config.alarms.webhook
        self._webhook = None if webhook is None else Tracker("logger.alarms.webhook", lambda: webhook)
        self.machines: Callable[[], Mapping[str, float]] = dict
        """Returns the metrics of the run's machines since the last call; none unless logger.monitor_gpus is set."""
        self.not_copied: Callable[[], Mapping[str, str]] = dict
        """Returns which checkpoints checkpointing.mirror lacks at the moment, and why."""
        self.draws_curve = True
        """Whether the end of a run draws its reward curve: a rehearsal has no rewards worth a picture."""
        self.peak_flops: float | None = None
        """FLOP/s of a device, where it is known."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """One line of `metrics.jsonl`: {"step", "prefix", "unix_time", and the metrics}. Values are numbers,
        tensors or arrays of one element, None, or mappings of these (joined with "/"). NaN and infinities are null
        there.

        Raises TypeError for another value, ValueError for a name that the line itself uses.
        """
        values = dict(_flat(metrics))
        if taken := [name for name in RESERVED if name in values]:
            raise ValueError(f"{taken} cannot be names of metrics: the lines of {METRICS_FILE} use them")
        head = {"step": step, "prefix": prefix, "unix_time": round(self._clock.unix(), 3)}
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
        self._file.write_json(head | finite)
        full_names = {f"{prefix}/{name}" if prefix else name: v for name, v in values.items() if v is not None}
        for tracker in self._backends:
            tracker.call(f"step {step}", lambda backend: backend.log(full_names, step))
        for custom in self._custom:
            custom.call(f"step {step}", lambda logger: logger.log_metrics(dict(values), step, prefix))

    def log_hyperparams(self, params: Any) -> None:
        """The resolved recipe: a mapping or a pydantic model, to `hyperparams.json` and, without secrets,
        to the other loggers."""
        plain = params.model_dump(mode="json") if hasattr(params, "model_dump") else dict(params)
        text = msgspec.json.format(msgspec.json.encode(plain, enc_hook=str), indent=2).decode()
        self._hyperparams = text + "\n"
        self._write_hyperparams()
        if not (self._backends or self._custom):
            return
        shown = without_secrets(json.loads(text))
        for tracker in self._backends:
            tracker.call("the recipe", lambda backend: backend.params(shown))
        for custom in self._custom:
            custom.call("the recipe", lambda logger: logger.log_hyperparams(shown))

    def _write_hyperparams(self) -> None:
        path = self.log_dir / HYPERPARAMS_FILE
        try:
            path.write_text(self._hyperparams, encoding="utf-8")
        except OSError as error:  # observation must not stop training
            log.warning("%s cannot be written: %s; the run goes on without it", path, error.strerror or error)

    def restore(self) -> None:
        """Make the files of the log folder anew that were removed while the run goes on."""
        gone = self._file.restore()
        self.console.restore()
        if gone and self._hyperparams:
            self._write_hyperparams()

    def alarm(self, alarm: Alarm) -> None:
        """Log an alarm as the metric `alarm/KIND`, and send it to the recipe's webhook, if there is one."""
        for tracker in self._backends:
            tracker.call(f"the alarm of step {alarm.step}", lambda b: b.log({f"alarm/{alarm.kind}": 1.0}, alarm.step))
        if self._webhook is not None:
            run = str(self.log_dir)
            self._webhook.call(f"the alarm of step {alarm.step}", lambda url: post_alarm(url, run, alarm))

    def put_summary_back(self) -> None:
        """Restore the summary of the earlier run, since this one has ended without a step. Raises OSError."""
        if self._summary is not None:
            (self.log_dir / "summary.json").write_bytes(self._summary)

    def outages(self) -> dict[str, str]:
        """Return, by tracker or copy of the checkpoints that lacks something at the moment, how much and why."""
        lacking = {
            tracker.name: f"lacks {tracker.missing} calls: {tracker.outage}"
            for tracker in self._trackers()
            if tracker.outage is not None
        }
        return lacking | dict(self.not_copied())

    def log_surroundings(self, step: int) -> None:
        """Log the metrics of the run's machines."""
        if machines := self.machines():
            self.log_metrics(machines, step, "machine")

    def _trackers(self) -> list[Tracker[Any]]:
        return [*self._backends, *self._custom, *([] if self._webhook is None else [self._webhook])]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Write what is left and close all loggers; each tracker gets a few seconds. May be called again. `failed`: an
        error ended the run; the trackers show that, and an `end` in which the run is not finished."""
        code = int(failed) if self.end is None else self.end.exit_code
        self._file.close()
        for tracker in self._backends:
            tracker.close(lambda backend: backend.close(code))
        for custom in self._custom:
            custom.close(lambda logger: logger.close())
        if self._webhook is not None:
            self._webhook.close(lambda url: None)
        self.console.close()


class _Kept(logging.Handler):
    def __init__(self, file: AppendFile) -> None:
        super().__init__(logging.INFO)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record))


@contextmanager
def messages_kept(file: AppendFile) -> Iterator[None]:
    """Write the package's messages to `file` too, in the context."""
    package, handler = logging.getLogger("grpo_mcore"), _Kept(file)
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)


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


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, whole or not at all. Raises ValueError for NaN and infinities."""
    text = json.dumps(dict(summary), indent=2, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
