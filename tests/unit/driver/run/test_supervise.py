"""A run that is lost starts again from its newest checkpoint; any other end is its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest

from grpo_mcore.driver.run import supervise as module
from grpo_mcore.driver.run.supervise import supervise, until_over
from grpo_mcore.recipe import MasterConfig
from tests.clocks import StandingClock
from tests.unit.driver.run import attempts
from tests.waiting import wait_until

pytestmark = pytest.mark.slow  # processes that are started and killed


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
    ("number", "expected", "when"),
    [
        (signal.SIGINT, 1, "runs"),
        (signal.SIGTERM, 1, "imports"),
        (signal.SIGHUP, 1, "runs"),
        (signal.SIGUSR1, 75, "runs"),
        (signal.SIGUSR1, 75, "starts"),
    ],
)
def test_signals_are_passed_on_once(
    config: MasterConfig, tmp_path: Path, number: int, expected: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the process of the run is being started and imports its modules. One that is over but does not end is
    killed."""
    monkeypatch.setattr(module, "EXIT_S", 0.5)
    start = SpawnProcess.start
    threads: list[threading.Thread] = []

    def in_a_thread(function: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=function))
        threads[-1].start()

    def ask() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # as in a thread from before the start
        if when == "runs":
            wait_until(lambda: [*tmp_path.glob("[0-9]*")], "the attempt")
        os.kill(os.getpid(), number)

    def asked_around_the_start(process: SpawnProcess) -> None:
        if when == "starts":
            in_a_thread(ask)
            threads[-1].join()
        start(process)
        if when != "starts":
            in_a_thread(ask)

    monkeypatch.setattr(SpawnProcess, "start", asked_around_the_start)
    began = time.monotonic()
    code = supervise(attempts.waiting, config, None, 0.0)
    for thread in threads:
        thread.join()
    assert code == expected and time.monotonic() - began < 60


def test_signals_that_the_starting_program_had_blocked_are_heard() -> None:
    child = module._Child()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, module.FORWARDED)
    try:
        with module._forward_signals(child):
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            assert child.asked == signal.SIGUSR1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.slow
def test_the_run_ends_with_its_supervisor(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from tests.unit.driver.run import attempts;"
        "from grpo_mcore.driver.run.supervise import supervise;"
        "supervise(attempts.waiting, attempts.config_for(pathlib.Path(sys.argv[1])), None, 0.0)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    wait_until(lambda: [*tmp_path.glob("[0-9]*")] or parent.poll() is not None, "the attempt")
    (attempt,) = tmp_path.glob("[0-9]*")
    child = psutil.Process(int(attempt.name))
    parent.kill()
    parent.wait()
    child.wait(30)


def test_a_signal_ends_the_wait_for_the_next_attempt(config: MasterConfig) -> None:
    clock = StandingClock()
    cluster = config.cluster.model_copy(update={"retry_wait_s": 60.0})
    code = until_over(
        lambda resume: (69, "a lost node"),
        config.model_copy(update={"cluster": cluster}),
        None,
        lambda: signal.SIGTERM if clock.at > 3 else None,
        clock=clock,
    )
    assert code == 143 and 3 < clock.at < 5
