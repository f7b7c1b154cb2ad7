"""The signals of a sweep are passed on to its run."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from grpo_mcore.cli.train.sweep import FORWARDED, STOPPED, Stop, forwarding, run_command
from tests.waiting import wait_until

RUN = """#!/bin/sh
for name in INT TERM HUP USR1; do trap "echo got $name; exit 75" $name; done
echo up
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", FORWARDED)
def test_a_signal_is_passed_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    (program := tmp_path / "run").write_text(RUN)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    output = tmp_path / "run_folder" / "output.txt"

    def ask() -> None:
        wait_until(lambda: output.exists() and "up" in output.read_text(), "the run")
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # the tests may have been started to ignore it
    try:
        threading.Thread(target=ask).start()
        with forwarding() as stop:
            assert run_command(["sft"], output, stop) == 75
        assert signal.getsignal(number) == signal.SIG_DFL and stop.signals == [number]
    finally:
        signal.signal(number, before)
    assert output.read_text() == f"up\ngot {number.name.removeprefix('SIG')}\n"
    assert f"{number.name} is passed on to the run, which stops" in capsys.readouterr().out


def test_a_signal_before_the_run_handles_any_ends_it_and_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program := tmp_path / "run").write_text("#!/bin/sh\nkill -USR1 $PPID; exec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with forwarding() as stop:
        assert run_command(["sft"], tmp_path / "output.txt", stop) in STOPPED
    assert stop.signals == [signal.SIGUSR1]


def test_a_signal_between_two_runs_ends_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := tmp_path / "run").write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    stop = Stop()
    stop.forward(signal.SIGTERM, None)
    assert run_command(["sft"], tmp_path / "output.txt", stop) == -signal.SIGTERM
