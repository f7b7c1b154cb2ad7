"""Runs that are disturbed at random times tell the truth and lose nothing: see random_runs.py, ray_*.py."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.functional.runs import Task


@pytest.mark.timeout(3700)
@pytest.mark.every_state  # `make test` sends SIGTERM and fills a disk in functional/test_train_local.py
@pytest.mark.parametrize(
    ("program", "seeds"),
    [("random_runs", range(38)), ("ray_sigterms", range(4)), ("ray_deaths", range(14))],
    ids=["thirty-eight seeds", "SIGTERM under Ray", "deaths under Ray"],
)
def test_disturbed_runs_lose_nothing(
    tmp_path: Path, task: Task, model: Path, program: str, seeds: Sequence[int]
) -> None:
    """Two seeds of each kind of disturbance, and signals to a run under Ray; further seeds by hand."""
    words = [str(task.folder), str(model), str(tmp_path / "out"), *map(str, seeds)]
    command = [sys.executable, "-m", f"tests.chaos.{program}", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=3600)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith(("seed ", "signal ")) for line in done.stdout.splitlines()) == len(seeds)
