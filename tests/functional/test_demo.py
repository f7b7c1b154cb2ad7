"""`grpo-mcore demo`, interrupted. What it does when it is left alone takes minutes, and is the README's."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.algorithms import sft
from grpo_mcore.cli.main import main
from grpo_mcore.driver.checkpoints.lease import Lease
from tests.functional.preload import preload


def test_a_sigterm_in_the_warm_up_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_step = sft.build_step

    def interrupted(*arguments: Any) -> sft.SFTStep:
        os.kill(os.getpid(), signal.SIGTERM)
        return build_step(*arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sft, "build_step", interrupted)
    preload()
    assert main(["demo"]) == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    assert "stopped after step 1; its model is" in out and "3/4" not in out


def test_a_run_that_goes_on_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = tmp_path / "results" / "demo" / "checkpoints"
    (checkpoints / "step_10").mkdir(parents=True)
    with Lease(checkpoints):
        assert main(["demo"]) == 1
        assert (checkpoints / "step_10").is_dir()
    error = capsys.readouterr().err
    assert f"is in use by process {os.getpid()} on" in error and "the demo replaces everything" in error
