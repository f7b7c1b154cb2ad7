"""Where metrics go besides the run's JSONL file: TensorBoard, Weights & Biases, MLflow, SwanLab, Prometheus. A
package is imported only where the recipe asks for it."""

import inspect
import json
import logging
import re
import secrets
import string
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from grpo_mcore.observe.exit_codes import INTERRUPTED, STOPPED_EARLY, TERMINATED
from grpo_mcore.recipe import GRPOLoggerConfig

log = logging.getLogger(__name__)


class MissingPackage(RuntimeError):
    """The recipe asks for a logger whose package is not installed."""


class NoLogin(RuntimeError):
    """A tracker has no credentials."""


class Backend(Protocol):
    """One destination of metrics."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step by their full names."""

    def params(self, plain: dict[str, Any]) -> None:
        """Log the resolved recipe."""

    def close(self, code: int) -> None:
        """Write what is left, and say how the run ended. `code`: its exit code."""


def run_id(folder: Path, tracker: str, make: Callable[[], str]) -> tuple[str, bool]:
    """Return the id under which a tracker knows the run of this log folder, and whether it was there before: then the
    run is resumed, and goes on under it. `make`: returns a new id. One that cannot be kept is used all the same: each
    further attempt would make another run."""
    path = folder / f"{tracker}_run.txt"
    if path.exists() and (known := path.read_text(encoding="utf-8").strip()):
        return known, True
    new = make()
    try:
        path.write_text(new + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("%s cannot be written: %s; when this run is resumed, %s shows a new one", path, error, tracker)
    return new, False


class TensorBoard:
    """Event files in the run's folder. On a full disk a writer gives up for good; the next attempt gets a new one. A
    resumed run takes back what is there of its first step and later ones."""

    def __init__(self, package: Any, config: GRPOLoggerConfig, folder: Path) -> None:
        where = folder / (config.tensorboard.log_dir or "tensorboard")
        self._package, self._folder = package, str(where)
        self._resumes = where.is_dir() and any(where.iterdir())
        self._writer: Any = None if self._resumes else package.SummaryWriter(self._folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        try:
            if self._writer is None:
                self._writer = self._package.SummaryWriter(self._folder, purge_step=step if self._resumes else None)
                self._resumes = False
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError:
            self._writer = None
            raise

    def params(self, plain: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.add_text("hyperparams", f"```json\n{json.dumps(plain, indent=2)}\n```")

    def close(self, code: int) -> None:
        if self._writer is not None:
            with suppress(OSError):  # a full disk: metrics.jsonl has said so
                self._writer.close()


class Wandb:
    """A run of Weights & Biases. Its own step counts calls: W&B drops what has an older one, such as the steps that a
    resumed run repeats. The charts' axis is the metric `step`."""

    def __init__(self, package: Any, config: GRPOLoggerConfig, folder: Path) -> None:
        where = config.wandb
        if not _has_wandb_login(package):
            raise NoLogin(
                "there is no login: run `wandb login` in another shell, or start again with WANDB_API_KEY or "
                "WANDB_MODE=offline"
            )
        number, _ = run_id(folder, "wandb", lambda: secrets.token_hex(8))
        self._run = package.init(
            project=where.project, name=where.name, entity=where.entity, dir=str(folder), id=number, resume="allow"
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def params(self, plain: dict[str, Any]) -> None:
        self._run.config.update(plain, allow_val_change=True)  # a resumed run may have other values

    def close(self, code: int) -> None:
        self._run.finish(exit_code=code)


def _has_wandb_login(package: Any) -> bool:
    """Return whether W&B has credentials, or needs none as it is offline. Without them `init` asks for them, unseen
    among the lines of a run that goes on."""
    if package.setup().settings.mode in ("offline", "disabled", "dryrun"):
        return True
    if "prompt" not in inspect.signature(package.login).parameters:  # an older version always asks
        return True
    return bool(package.login(prompt=False, verify=False))


class MLflow:
    """A run of MLflow, through a client of its own, so that a run that the process has open stays as it is."""

    def __init__(self, package: Any, config: GRPOLoggerConfig, folder: Path) -> None:
        where = config.mlflow
        self._client = package.MlflowClient(tracking_uri=where.tracking_uri)
        self._metric, self._run_id = package.entities.Metric, where.run_id
        if self._run_id is None:
            name = where.experiment_name or "grpo"
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                number = self._client.create_experiment(name, where.artifact_location)
            else:
                number = experiment.experiment_id
            name = where.run_name or folder.name
            self._run_id, known = run_id(
                folder, "mlflow", lambda: str(self._client.create_run(number, run_name=name).info.run_id)
            )
            if known:
                self._client.update_run(self._run_id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        by_name = {_mlflow_name(name): value for name, value in values.items()}
        metrics = [self._metric(_file_of(name, by_name), float(value), now, step) for name, value in by_name.items()]
        for first in range(0, len(metrics), 1000):  # the server's limit
            self._client.log_batch(self._run_id, metrics=metrics[first : first + 1000])

    def params(self, plain: dict[str, Any]) -> None:
        self._client.log_dict(self._run_id, plain, "hyperparams.json")

    def close(self, code: int) -> None:
        stopped = code in (STOPPED_EARLY, TERMINATED, INTERRUPTED)
        self._client.set_terminated(self._run_id, "KILLED" if stopped else "FAILED" if code else "FINISHED")


def _mlflow_name(name: str) -> str:
    """Return a metric's name with what MLflow refuses replaced by `_`: signs, and what is no file's name, such as the
    empty part of `reward/by/source/` or of an address. One name refuses all metrics of its step."""
    parts = re.sub(r"[^\w\-./: ]", "_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[:250].rstrip("/")


def _file_of(name: str, names: Collection[str]) -> str:
    """Return a metric's name for MLflow, whose stores of files keep `a/b` in a folder `a`: beside a metric `a` it is
    `a_b`."""
    parts = name.split("/")
    signs = ["_" if "/".join(parts[:depth]) in names else "/" for depth in range(1, len(parts))]
    return parts[0] + "".join(sign + part for sign, part in zip(signs, parts[1:], strict=True))


class SwanLab:
    """An experiment of SwanLab, which a resumed run continues."""

    def __init__(self, package: Any, config: GRPOLoggerConfig, folder: Path) -> None:
        where, self._package = config.swanlab, package
        names = {"project": where.project, "experiment_name": where.name, "workspace": where.workspace}
        options = {key: value for key, value in (names | {"mode": where.mode}).items() if value is not None}
        number, _ = run_id(folder, "swanlab", _swanlab_id)
        self._run = package.init(logdir=str(folder / "swanlab"), id=number, resume="allow", **options)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._package.log(dict(values), step=step)

    def params(self, plain: dict[str, Any]) -> None:
        self._package.config.update(plain)

    def close(self, code: int) -> None:
        self._package.finish(**({"state": "crashed", "error": f"the run ended with exit code {code}"} if code else {}))


def _swanlab_id() -> str:
    """Return a new id: SwanLab takes 21 lower-case letters and digits."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(21))


class Prometheus:
    """Serves the latest value of each metric at http://HOST:PORT/metrics, as gauges: `train/reward` of the run exp_001
    is `grpo_mcore_train_reward{run="exp_001",metric="train/reward"}`, which `train_reward` shares."""

    def __init__(self, package: Any, config: GRPOLoggerConfig, folder: Path) -> None:
        self._gauge, self._run, self._values = package.metrics_core.GaugeMetricFamily, folder.name, dict[str, float]()
        registry = package.CollectorRegistry()
        registry.register(self)
        where = config.prometheus
        self._server, self._thread = package.start_http_server(where.port, where.host, registry)

    def collect(self) -> Iterator[Any]:
        """Yield a family of gauges for each name that metrics have in Prometheus."""
        families: dict[str, Any] = {}
        for name, value in sorted(self._values.items()):  # one dictionary, replaced as a whole: no lock is needed
            gauge = "grpo_mcore_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            if gauge not in families:
                families[gauge] = self._gauge(gauge, name, labels=["run", "metric"])
            families[gauge].add_metric([self._run, name], value)
        yield from families.values()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._values = self._values | {name: float(value) for name, value in values.items()} | {"step": float(step)}

    def params(self, plain: dict[str, Any]) -> None:
        """Prometheus holds numbers alone."""

    def close(self, code: int) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


BACKENDS: dict[str, tuple[str, str, Callable[[Any, GRPOLoggerConfig, Path], Backend]]] = {
    "tensorboard_enabled": ("torch.utils.tensorboard", "tensorboard", TensorBoard),
    "wandb_enabled": ("wandb", "wandb", Wandb),
    "mlflow_enabled": ("mlflow", "mlflow", MLflow),
    "swanlab_enabled": ("swanlab", "swanlab", SwanLab),
    "prometheus_enabled": ("prometheus_client", "prometheus-client", Prometheus),
}
"""Key of `logger`: (module, package to install, class)."""


def chosen_backends(
    config: GRPOLoggerConfig,
) -> list[tuple[str, Any, Callable[[Any, GRPOLoggerConfig, Path], Backend]]]:
    """Return (key of the recipe, module, class) of each destination that it asks for. Raises MissingPackage."""
    chosen = []
    for key, (module, package, cls) in BACKENDS.items():
        if getattr(config, key):
            try:
                imported = import_module(module)
                if hasattr(imported, "__path__") and getattr(imported, "__file__", None) is None:
                    raise ImportError(f"{module} is a mere folder, {list(imported.__path__)}")  # as W&B makes one
                chosen.append((f"logger.{key}", imported, cls))
            except ImportError as error:
                raise MissingPackage(
                    f"logger.{key} needs {package}: pip install {package}, or set it to false"
                ) from error
    return chosen
