"""`grpo-mcore demo`, interrupted. What it does when it is left alone takes minutes, and is the README's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.algorithms import sft
from grpo_mcore.cli.main import main
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
