"""`grpo-mcore demo`, interrupted. What it does when it is left alone takes minutes, and is the README's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from grpo_mcore.algorithms.sft import SFT
from grpo_mcore.cli.main import main
from tests.functional.preload import preload


def test_a_sigterm_in_the_warm_up_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = SFT.train

    def interrupted(*arguments: object) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return train(*arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SFT, "train", interrupted)
    preload()
    assert main(["demo"]) == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    assert "stopped after step 1\n" in out and "3/4" not in out
