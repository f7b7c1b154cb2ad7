"""docs/your_task.md, run as it is written: its files, and its commands in their order."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from tests.functional.preload import preload

PAGE = Path(__file__).parents[2] / "docs" / "your_task.md"
FILES = ("make_task.py", "sft.yaml", "reward.py", "task.yaml", "ask.py")


def blocks() -> list[str]:
    """Return the page's indented blocks: the files, and the commands."""
    found = re.findall(r"(?:^(?: {4}.*)?\n)+", PAGE.read_text(), re.MULTILINE)
    return [textwrap.dedent(block).strip("\n") + "\n" for block in found if block.strip()]


def write_files(folder: Path) -> list[str]:
    """Write the page's files into a folder, and return its commands."""
    *four, training, looking, ask = blocks()
    assert len(four) == 4
    for name, text in zip(FILES, [*four, ask], strict=True):
        assert f"`{name}`" in PAGE.read_text()
        (folder / name).write_text(text)
    return [*training.splitlines(), *looking.splitlines()]


def run(folder: Path, command: str) -> str:
    """Run a command of the page, and return what it prints."""
    words = shlex.split(command, comments=True)
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        [str(bin_folder / words[0]), *words[1:]], cwd=folder, text=True, timeout=560,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_files_of_the_page_are_a_task_that_passes_its_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, and without the warm-up and the training, which take a minute: the untrained model stands in."""
    preload()
    commands = write_files(tmp_path)
    assert (commands[0], commands[2]) == ("python make_task.py", "grpo-mcore train task.yaml --check")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make_task.py")
    assert main(["train", "task.yaml", "--check", "policy.model_name=task/untrained"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "env.sorting: the ground truth of the first row as the answer: reward 1 (in_place 1)" in out
    assert "all checks passed; 40 steps are left" in out


@pytest.mark.every_state  # two minutes on two cores
def test_the_page_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    commands = write_files(tmp_path)
    for command in commands:
        run(tmp_path, command)
    summary = json.loads((tmp_path / "task/logs/exp_001/summary.json").read_text())
    assert summary["val_reward_before"] < 0.8 and summary["val_reward_after"] > 0.9
    assert (tmp_path / "task/logs/exp_001/report.html").is_file()
    assert run(tmp_path, "python ask.py").split()[-1] == "237"
