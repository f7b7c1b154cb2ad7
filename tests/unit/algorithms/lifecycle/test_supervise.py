"""A run that is lost starts again from its newest checkpoint; any other end is its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from grpo_mcore import processes
from grpo_mcore.algorithms.lifecycle import supervise as module
from grpo_mcore.algorithms.lifecycle.supervise import supervise
from grpo_mcore.recipe import MasterConfig
from tests.unit.algorithms.lifecycle import attempts


@pytest.fixture
def config(tmp_path: Path) -> MasterConfig:
    return attempts.config_for(tmp_path)


@pytest.mark.slow
def test_it_goes_on_from_the_newest_checkpoint_as_often_as_there_is_a_new_one(
    config: MasterConfig, tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    assert supervise(attempts.lost, config, "auto", 0.0) == 7
    assert (tmp_path / "resumed.txt").read_text().split() == ["auto", "True", "True", "True"]
    assert not psutil.pid_exists(int((tmp_path / "orphan.txt").read_text()))
    told = package_log.text
    for text in (
        f"the run was lost: its driver was killed by SIGKILL; it goes on from {tmp_path / 'step_1'}\n",
        f"the run was lost: Ray ended its driver; it goes on from {tmp_path / 'step_2'}\n",
        f"policy-1: train failed: its process ended; it goes on from {tmp_path / 'step_3'}\n",
    ):
        assert text in told


@pytest.mark.slow
def test_without_progress_it_ends(config: MasterConfig, package_log: pytest.LogCaptureFixture) -> None:
    assert supervise(attempts.stuck, config, None, 0.0) == 1
    told = package_log.text
    assert told.count("it goes on from the start") == 1
    assert "that was 2 times in a row (cluster.max_restarts) without a new checkpoint, so it ends" in told


def test_a_mistake_is_not_tried_again(config: MasterConfig, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(attempts.mistaken, config, None, 0.0) == 1
    told = capfd.readouterr().err
    assert told.count("ValueError: a mistake") == 1 and "it goes on" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected", "early"),
    [(signal.SIGINT, 1, False), (signal.SIGTERM, 1, True), (signal.SIGUSR1, 75, False), (signal.SIGUSR1, 75, True)],
)
def test_signals_are_passed_on_once(
    config: MasterConfig, tmp_path: Path, number: int, expected: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the process of the run still imports its modules. One that is over but does not end is killed."""
    monkeypatch.setattr(module, "EXIT_S", 0.5)

    others = set(processes.descendants())  # of earlier tests

    def ask() -> None:
        while not any(path.name.isdigit() for path in tmp_path.iterdir()) and not (
            early and set(processes.descendants()) - others
        ):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask)
    thread.start()
    began = time.monotonic()
    code = supervise(attempts.waiting, config, None, 0.0)
    thread.join()
    assert code == expected and time.monotonic() - began < 60


@pytest.mark.slow
def test_the_run_ends_with_its_supervisor(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from tests.unit.algorithms.lifecycle import attempts;"
        "from grpo_mcore.algorithms.lifecycle.supervise import supervise;"
        "supervise(attempts.waiting, attempts.config_for(pathlib.Path(sys.argv[1])), None, 0.0)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    while not (found := [path for path in tmp_path.iterdir() if path.name.isdigit()]):
        time.sleep(0.02)
        assert parent.poll() is None
    child = psutil.Process(int(found[0].name))
    parent.kill()
    parent.wait()
    child.wait(30)
