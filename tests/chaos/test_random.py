"""Runs that are disturbed at random times tell the truth and lose nothing (see random_runs.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import Task

QUICK = (0, 3, 6)
"""SIGTERM, SIGKILL, a full disk."""


@pytest.mark.timeout(7300)
@pytest.mark.every_state
@pytest.mark.parametrize("seeds", [QUICK, range(100)], ids=["three", "hundred"])
def test_disturbed_runs_lose_nothing(tmp_path: Path, task: Task, model: Path, seeds: range | tuple[int, ...]) -> None:
    words = [str(path) for path in (task.folder, model, tmp_path / "out")]
    program = [sys.executable, "-m", "tests.chaos.random_runs", *words, *map(str, seeds)]
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ, timeout=7200)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nseed ") + done.stdout.startswith("seed ") == len(seeds)
