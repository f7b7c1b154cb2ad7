"""The metrics file, the run's folder, and the optional loggers."""

import errno
import json
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from grpo_mcore.observe.alarms import Alarm
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.observe.logger import (
    CustomLoggerError,
    Logger,
    check_custom_logger,
    check_loggers,
    run_folder,
    write_summary,
)
from grpo_mcore.observe.run_folder import read_metrics
from grpo_mcore.observe.trackers.backends import MissingPackage, Wandb, _file_of, _mlflow_name, run_id
from grpo_mcore.observe.trackers.tracker import Tracker
from grpo_mcore.recipe import CustomCode
from grpo_mcore.recipe.schema.outputs import PrometheusConfig
from tests.failing import failing
from tests.waiting import wait_until


def config(folder: Path, **values: Any) -> SimpleNamespace:
    trackers = ("wandb", "tensorboard", "mlflow", "swanlab", "prometheus")
    defaults: dict[str, Any] = {f"{name}_enabled": False for name in trackers} | {"log_dir": str(folder), "custom": []}
    defaults["alarms"] = SimpleNamespace(webhook=None, stop_after=None)
    defaults["wandb"] = SimpleNamespace(project="p", name="n", entity=None)
    defaults["tensorboard"] = SimpleNamespace(log_dir=None)
    return SimpleNamespace(**(defaults | values))


def test_a_call_is_a_line(tmp_path):
    logger = Logger(config(tmp_path))
    values = {"loss": torch.tensor(0.5), "n": 3, "f": np.float32(0.25), "none": None, "seconds": {"train": 1.5}}
    logger.log_metrics(values, step=7, prefix="train")
    # not closed: what is logged is on disk, whatever happens next
    line = json.loads((tmp_path / "exp_001" / "metrics.jsonl").read_text())
    assert line.pop("unix_time") > 1e9
    assert line == {
        "step": 7, "prefix": "train", "loss": 0.5, "n": 3, "f": 0.25, "none": None, "seconds/train": 1.5,
    }  # fmt: skip
    logger.close()
    logger.close()


def test_the_file_stays_json_when_a_metric_is_not_finite(tmp_path):
    logger = Logger(config(tmp_path))
    logger.log_metrics({"loss": float("nan"), "norm": torch.tensor(float("inf"))}, step=1)
    text = (logger.log_dir / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert (line["loss"], line["norm"]) == (None, None)


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"names": ["a"]}, TypeError, "'names' is no number but list"),
        ({"outer": {"inner": "text"}}, TypeError, "'outer/inner' is no number but str"),
        ({"vector": torch.ones(2)}, TypeError, "'vector' has more than one element"),
        ({"array": np.ones(2)}, TypeError, "'array' has more than one element"),
        ({"step": 3}, ValueError, r"\['step'\] cannot be names"),
    ],
)
def test_what_is_no_metric_is_refused(tmp_path, metrics, error, message):
    logger = Logger(config(tmp_path))
    with pytest.raises(error, match=message):
        logger.log_metrics(metrics, step=1)
    assert (logger.log_dir / "metrics.jsonl").read_text() == ""


def test_each_run_has_its_own_folder_and_a_resumed_one_goes_on(tmp_path):
    (tmp_path / "exp_of_mine").mkdir()
    assert run_folder(tmp_path).name == "exp_001"
    assert run_folder(tmp_path).name == "exp_002"
    assert run_folder(tmp_path, "exp_001").name == "exp_001"
    assert run_folder(tmp_path, "exp_017").name == "exp_003"
    (tmp_path / "exp_999").mkdir()
    assert run_folder(tmp_path).name == "exp_1000"


def test_a_resumed_run_appends_and_its_repeated_steps_count(tmp_path):
    first = Logger(config(tmp_path))
    for step in (1, 2, 3):
        first.log_metrics({"reward": step}, step, "train")
    first.log_metrics({"accuracy": 0.5}, 2, "validation")
    first.close()
    write_summary(first.log_dir / "summary.json", {"end": "all 3 steps are done"})
    second = Logger(config(tmp_path), run=first.log_dir.name)
    assert not (second.log_dir / "summary.json").exists()  # it is not over any more
    second.log_metrics({"reward": 30}, 3, "train")
    second.log_metrics({"extra": 1}, 3, "train")
    second.close()
    path = second.log_dir / "metrics.jsonl"
    assert [(row["step"], row["reward"]) for row in read_metrics(path, "train")] == [(1, 1), (2, 2), (3, 30)]
    assert read_metrics(path, "train")[-1]["extra"] == 1
    assert [row["accuracy"] for row in read_metrics(path, "validation")] == [0.5]


def test_steps_that_a_run_went_back_from_do_not_count(tmp_path):
    first = Logger(config(tmp_path))
    first.log_metrics({"loss": 9.0}, 0, "validation")
    for step in range(1, 21):
        first.log_metrics({"loss": 1.0 / step}, step, "train")
        if step % 4 == 0:
            first.log_metrics({"loss": 1.0 / step}, step, "validation")
    first.close()
    path = first.log_dir / "metrics.jsonl"
    second = Logger(config(tmp_path), run=first.log_dir.name)
    assert read_metrics(path, "train")[-1]["step"] == 20  # until it has trained
    for step in range(11, 14):
        second.log_metrics({"loss": 5.0}, step, "train")
    second.log_metrics({"loss": 5.0}, 13, "validation")
    second.close()
    assert [row["step"] for row in read_metrics(path, "train")] == list(range(1, 14))
    assert {row["step"]: row["loss"] for row in read_metrics(path, "validation")} == {0: 9, 4: 1 / 4, 8: 1 / 8, 13: 5}


def test_a_run_that_goes_on_without_a_step_keeps_the_summary(tmp_path):
    first = Logger(config(tmp_path))
    first.close()
    write_summary(first.log_dir / "summary.json", {"end": "all 3 steps are done"})
    second = Logger(config(tmp_path), run=first.log_dir.name)
    second.put_summary_back()
    second.close()
    assert json.loads((first.log_dir / "summary.json").read_text()) == {"end": "all 3 steps are done"}
    Logger(config(tmp_path)).put_summary_back()  # of a new run there is none


def test_a_line_cut_off_by_a_crash_is_left_out_also_after_a_resume(tmp_path, package_log):
    """A version before this one has appended the next line to it."""
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "prefix": "train"}\n'
    path.write_text(whole + '{"step": 2, "pre')
    assert len(read_metrics(path, "train")) == 1
    path.write_text('{"step": 2, "pre' + whole + whole)
    assert len(read_metrics(path, "train")) == 1
    assert "metrics.jsonl, line 1 is left out: it is not JSON" in package_log.text


def test_a_resumed_run_begins_a_new_line_after_one_that_was_cut_off(tmp_path):
    folder = tmp_path / "exp_001"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "prefix": "train"}\n{"step": 2, "pre')
    logger = Logger(config(tmp_path), run="exp_001")
    logger.log_metrics({"reward": 1.0}, 2, "train")
    logger.close()
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl", "train")] == [1, 2]


def test_hyperparams_on_a_full_disk_do_not_end_the_run(tmp_path, monkeypatch, package_log):
    logger = Logger(config(tmp_path))
    monkeypatch.setattr(Path, "write_text", failing(errno.ENOSPC))
    logger.log_hyperparams({"grpo": {"seed": 1}})
    assert "hyperparams.json cannot be written: No space left on device; the run goes on" in package_log.text


def test_hyperparams_of_a_model_or_a_mapping(tmp_path):
    logger = Logger(config(tmp_path))
    logger.log_hyperparams({"grpo": {"seed": 1}, "path": tmp_path})
    assert json.loads((logger.log_dir / "hyperparams.json").read_text())["grpo"] == {"seed": 1}
    logger.log_hyperparams(SimpleNamespace(model_dump=lambda mode: {"mode": mode}))
    assert json.loads((logger.log_dir / "hyperparams.json").read_text()) == {"mode": "json"}


def test_tensorboard_holds_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = Logger(config(tmp_path, tensorboard_enabled=True))
    logger.log_metrics({"loss": 0.5, "skipped": None}, step=1, prefix="train")
    logger.log_metrics({"loss": 0.25}, step=2, prefix="train")
    logger.close()
    assert logger.tensorboard_dir == logger.log_dir / "tensorboard"
    events = accumulator.EventAccumulator(str(logger.tensorboard_dir))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]


def test_a_resumed_run_takes_back_its_repeated_steps_in_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in ((1, 2, 3), (3, 4)):  # killed after step 3, whose checkpoint is that of step 2
        logger = Logger(config(tmp_path, tensorboard_enabled=True), run="exp_001")
        for step in steps:
            logger.log_metrics({"loss": step + steps[0] / 10}, step=step, prefix="train")
        logger.close()
    events = accumulator.EventAccumulator(str(logger.tensorboard_dir))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(step + begun / 10)) for step, begun in ((1, 1), (2, 1), (3, 3), (4, 3))]


def wandb_package(
    init: Any, mode: str = "online", login: Any = lambda prompt=True, verify=True: True
) -> SimpleNamespace:
    settings = SimpleNamespace(settings=SimpleNamespace(mode=mode))
    return SimpleNamespace(init=init, setup=lambda: settings, login=login)


RUN = SimpleNamespace(log=lambda values: None, finish=lambda exit_code: None, define_metric=lambda *a, **b: None)


def test_a_resumed_run_is_the_same_run_of_wandb(tmp_path, monkeypatch):
    ids: list[tuple[str, str]] = []
    package = wandb_package(lambda **where: ids.append((where["id"], where["resume"])) or RUN)
    monkeypatch.setitem(sys.modules, "wandb", package)
    for run in ("exp_001", "exp_001", None):
        logger = Logger(config(tmp_path, wandb_enabled=True), run=run)
        logger.log_metrics({"loss": 0.5}, step=1)
        logger.close()
    (first, again, other) = ids
    assert first == again != other and first[1] == "allow"


def test_wandb_gets_the_same_numbers(tmp_path, monkeypatch):
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda values: calls.append(values),
        finish=lambda exit_code: calls.append(("finish", exit_code)),
        define_metric=lambda name, step_metric=None: calls.append((name, step_metric)),
        config=SimpleNamespace(update=lambda params, allow_val_change: calls.append((params, allow_val_change))),
    )
    package = wandb_package(lambda **where: calls.append(where["project"]) or run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    logger = Logger(config(tmp_path, wandb_enabled=True))
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"loss": 0.5}, step=1, prefix="train")
    logger.close()
    opened = ["p", ("step", None), ("*", "step")]
    assert calls == [*opened, ({"a": 1}, True), {"train/loss": 0.5, "step": 1}, ("finish", 0)]
    with pytest.raises(ValueError, match="rank"), Logger(config(tmp_path, wandb_enabled=True)) as logger:
        logger.log_metrics({"loss": 0.5}, step=1, prefix="train")
        raise ValueError("a rank died")
    assert calls[-1] == ("finish", 1)  # W&B shows the run as failed
    with Logger(config(tmp_path, wandb_enabled=True)) as logger:
        logger.end = RunEnd.in_order("SIGTERM", early=True, at_once=True, unsaved=0)
    assert calls[-1] == ("finish", 143)  # neither is a run finished that was stopped


@pytest.mark.parametrize(("mode", "opened"), [("online", False), ("offline", True), ("disabled", True)])
def test_wandb_without_a_login_asks_nobody_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture, mode: str, opened: bool
) -> None:
    """On a terminal `wandb.init` would ask for a key, among the lines of a run that does not wait for the answer."""
    inits: list[str] = []

    def login(prompt: bool = True, verify: bool = True) -> bool:
        assert not prompt
        return False

    package = wandb_package(lambda **where: inits.append(where["project"]) or RUN, mode, login)
    monkeypatch.setitem(sys.modules, "wandb", package)
    tracker = Tracker("logger.wandb_enabled", lambda: Wandb(package, config(tmp_path), tmp_path))
    tracker.call("step 1", lambda backend: backend.log({"loss": 0.5}, 1))
    tracker.close(lambda backend: backend.close(False), within_s=0.2)
    assert (inits == ["p"], tracker.missing == 0) == (opened, opened)
    assert ("there is no login: run `wandb login` in another shell" in package_log.text) is not opened


def test_a_trackers_folder_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B makes a folder `wandb` where a program runs, which Python imports as an empty package."""
    (tmp_path / "swanlab").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "swanlab", None)  # what is there now comes back
        del sys.modules["swanlab"]
        with pytest.raises(MissingPackage, match="logger.swanlab_enabled needs swanlab: pip install swanlab"):
            check_loggers(config(tmp_path, swanlab_enabled=True))


def test_the_room_loads_without_torch_and_matplotlib():
    import subprocess

    code = "import sys, grpo_mcore.observe as o; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


EXAMPLE = "examples.custom_objective.csv_logger:CsvLogger"


class WithoutClose:
    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir

    def log_metrics(self, metrics: Any, step: int, prefix: str) -> None: ...

    def log_hyperparams(self, params: Any) -> None: ...


def test_a_custom_logger_gets_the_same_metrics(tmp_path: Path) -> None:
    custom = [CustomCode(path=EXAMPLE, options={"delimiter": ";"})]
    logger = Logger(config(tmp_path, custom=custom))
    logger.log_hyperparams({"grpo": {"seed": 3}})
    for step in (1, 2):
        logger.log_metrics({"loss": torch.tensor(step / 4), "timing": {"train": 1.5}}, step, "train")
    logger.close()
    logger.close()
    assert (logger.log_dir / "train.csv").read_text().split() == ["step;loss;timing/train", "1;0.25;1.5", "2;0.5;1.5"]
    assert json.loads((logger.log_dir / "recipe.json").read_text()) == {"grpo": {"seed": 3}}


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nowhere.at_all:Logger", {}, "cannot import the logger 'nowhere.at_all:Logger'"),
        (EXAMPLE, {"columns": 3}, "unexpected keyword argument 'columns'"),
        (f"{__name__}:WithoutClose", {}, "has no attribute 'close'; a logger is a class"),
    ],
)
def test_a_class_that_is_no_logger_is_refused(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CustomLoggerError, match=message):
        check_custom_logger(CustomCode(path=path, options=options))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_prometheus_scrapes_the_latest_numbers_and_alarms(tmp_path: Path) -> None:
    where = PrometheusConfig(port=free_port())
    logger = Logger(config(tmp_path, prometheus_enabled=True, prometheus=where))

    def scraped() -> dict[str, float]:
        try:
            text = urllib.request.urlopen(f"http://127.0.0.1:{where.port}/metrics", timeout=10).read().decode()
        except urllib.error.URLError:  # its thread opens it
            return {}
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert {sample.labels["run"] for sample in samples} <= {"exp_001"}
        assert len({(sample.name, *sample.labels.values()) for sample in samples}) == len(samples)
        return {f"{sample.name} {sample.labels['metric']}": sample.value for sample in samples}

    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"reward": 0.25, "reward/by/level/é": 1.0}, step=1, prefix="train")
    logger.log_metrics({"accuracy": 0.5}, step=2, prefix="validation")
    logger.log_metrics({"reward": 0.75, "lost": None, "reward_by_level__": 2.0}, step=2, prefix="train")
    logger.alarm(Alarm("mismatch", 2, "engine and policy disagree"))
    expected = {
        "grpo_mcore_train_reward train/reward": 0.75, "grpo_mcore_step step": 2.0,
        "grpo_mcore_train_reward_by_level__ train/reward/by/level/é": 1.0,
        "grpo_mcore_train_reward_by_level__ train/reward_by_level__": 2.0,
        "grpo_mcore_validation_accuracy validation/accuracy": 0.5, "grpo_mcore_alarm_mismatch alarm/mismatch": 1.0,
    }  # fmt: skip
    wait_until(lambda: scraped() == expected, str(expected), pause=0.1)
    logger.close()
    assert scraped() == {}


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_missing_package_is_named_before_a_folder_is_made(tmp_path, monkeypatch, name: str):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackage, match=f"logger.{name}_enabled needs {name}: pip install {name}"):
        Logger(config(tmp_path, **{f"{name}_enabled": True}))
    with pytest.raises(MissingPackage, match=f"logger.{name}_enabled needs {name}"):  # also in `train --check`
        check_loggers(config(tmp_path, **{f"{name}_enabled": True}))
    assert list(tmp_path.iterdir()) == []


def test_mlflow_has_the_same_numbers(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    uri = (tmp_path / "mlruns").as_uri()
    where = SimpleNamespace(
        experiment_name="e", run_name="r", run_id=None, tracking_uri=uri, artifact_location=str(tmp_path / "artifacts")
    )
    logger = Logger(config(tmp_path, mlflow_enabled=True, mlflow=where))
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"loss": 0.5, "pass@4": 1.0, "loss/age_0/x": 2.0, "by/x/": 3.0}, step=1, prefix="train")
    logger.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    others = {"train/pass_4": 1.0, "train/loss_age_0/x": 2.0, "train/by/x/_": 3.0}
    assert run.data.metrics == {"train/loss": 0.5, **others}
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")
    resumed = Logger(config(tmp_path, mlflow_enabled=True, mlflow=where), run=logger.log_dir.name)
    resumed.log_metrics({"loss": 0.25}, step=2, prefix="train")
    resumed.close(failed=True)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.data.metrics["train/loss"] == 0.25 and run.info.status == "FAILED"
    stopped = Logger(config(tmp_path, mlflow_enabled=True, mlflow=where), run=logger.log_dir.name)
    stopped.end = RunEnd.in_order("SIGTERM", early=True, at_once=True, unsaved=0)
    stopped.close()
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "KILLED"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("validation/pass@4", "validation/pass_4"),
        ("reward/by/source/", "reward/by/source/_"),
        ("reward/by/source/https://host/a", "reward/by/source/https:/_/host/a"),
        ("reward/by/level/..", "reward/by/level/_"),
        ("reward/by/level/v1.5", "reward/by/level/v1.5"),
        ("a/" * 200, "a/" * 124 + "a"),
    ],
)
def test_names_that_mlflow_refuses_are_replaced(name: str, shown: str) -> None:
    """One of them in a step, such as that of a column without a value, and MLflow takes none of its metrics."""
    assert _mlflow_name(name) == shown


def test_no_metric_of_mlflow_is_a_folder_of_others() -> None:
    names = ["train/kl", "train/kl/age_0", "train/a/b", "train/klx/y", "train/kl/age_0/c"]
    assert [_file_of(name, names) for name in names] == [
        "train/kl", "train/kl_age_0", "train/a/b", "train/klx/y", "train/kl_age_0_c",
    ]  # fmt: skip


def test_swanlab_takes_the_same_numbers(tmp_path):
    pytest.importorskip("swanlab")
    where = SimpleNamespace(project="p", name="n", workspace=None, mode="offline")
    logger, ids = Logger(config(tmp_path, swanlab_enabled=True, swanlab=where)), set()
    for run in (logger, Logger(config(tmp_path, swanlab_enabled=True, swanlab=where), run=logger.log_dir.name)):
        run.log_hyperparams({"a": 1})
        run.log_metrics({"loss": 0.5}, step=1, prefix="train")
        run.close()
        ids.add((run.log_dir / "swanlab_run.txt").read_text())
    assert list((logger.log_dir / "swanlab").glob(f"run-*{ids.pop().strip()}")) and not ids


def test_a_trackers_id_that_cannot_be_kept_is_used_all_the_same(tmp_path, package_log) -> None:
    ids = iter("ab")
    assert run_id(tmp_path / "gone", "mlflow", lambda: next(ids)) == ("a", False)
    assert "mlflow_run.txt cannot be written" in package_log.text
    assert [run_id(tmp_path, "mlflow", lambda: next(ids)) for _ in range(2)] == [("b", False), ("b", True)]
