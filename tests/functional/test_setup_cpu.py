"""scripts/setup_cpu.sh where something is wrong: it says what, and calls no half-made environment ready."""

from __future__ import annotations

import ensurepip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the set-up reads of the repository, without an environment."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def set_up(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / "setup_cpu.sh"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_python(checkout: Path) -> None:
    done = set_up(checkout, PYTHON="/bin/false")
    assert done.returncode == 1
    assert "Python 3.11 to 3.13 is needed and /bin/false is not that" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_network(checkout: Path) -> None:
    done = set_up(checkout, **OFFLINE)
    assert done.returncode == 1
    assert "FAILED: pip==" in done.stderr and "setup.log" in done.stderr
    assert not (checkout / ".venv" / ".ready").exists()
    assert (checkout / ".venv" / ".unfinished").exists()


def test_no_cpu_build_of_torch(checkout: Path) -> None:
    """Neither pip's configuration nor the index has it: the CUDA build is not taken instead."""
    lock = checkout / "requirements" / "cpu.lock"
    lock.write_text(re.sub(r"^pip==.*$", f"pip=={ensurepip.version()}", lock.read_text(), flags=re.M))
    done = set_up(checkout, **OFFLINE, TORCH_CPU_INDEX="http://127.0.0.1:9/nothing")
    assert done.returncode == 1
    assert "FAILED: torch, CPU build (torch==2.13.0+cpu)" in done.stderr
    assert "http://127.0.0.1:9/nothing" in done.stderr


def test_a_finished_one_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    files = ("pyproject.toml", "requirements/cpu.lock", "scripts/setup_cpu.sh")
    made_from = f"{checkout}\n".encode() + b"".join((checkout / name).read_bytes() for name in files)
    digest = subprocess.run(["sha256sum"], input=made_from, capture_output=True, check=True).stdout
    (checkout / ".venv" / ".ready").write_bytes(digest)
    done = set_up(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
