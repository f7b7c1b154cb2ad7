"""scripts/setup_cpu.sh when something is wrong: it says what, and does not mark an unfinished environment as ready."""

import ensurepip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy what the set-up reads of the repository, without an environment."""
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


def test_no_network_and_then_no_cpu_build_of_torch(checkout: Path) -> None:
    """Neither pip's configuration nor the index has the CPU build: the CUDA build is not taken instead. The second
    set-up takes the environment of the first one for finished, and brings it up to date."""
    done = set_up(checkout, **OFFLINE)
    assert done.returncode == 1
    assert "FAILED: pip==" in done.stderr and "setup.log" in done.stderr
    assert not (checkout / ".venv" / ".ready").exists()
    unfinished = checkout / ".venv" / ".unfinished"
    assert unfinished.exists()

    unfinished.unlink()
    lock = checkout / "requirements" / "cpu.lock"
    lock.write_text(re.sub(r"^pip==.*$", f"pip=={ensurepip.version()}", lock.read_text(), flags=re.M))
    done = set_up(checkout, **OFFLINE, TORCH_CPU_INDEX="http://127.0.0.1:9/nothing")
    assert done.returncode == 1 and "bringing .venv up to date" in done.stdout
    assert "FAILED: torch, CPU build (torch==2.13.0+cpu)" in done.stderr
    assert "http://127.0.0.1:9/nothing" in done.stderr
    assert unfinished.exists()


def test_a_package_with_another_hash_is_refused(tmp_path: Path) -> None:
    """The lock holds for Python 3.11; other versions have other files."""
    wheel = tmp_path / "harmless-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("harmless-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: harmless\nVersion: 1.0\n")
        file.writestr("harmless-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("harmless-1.0.dist-info/RECORD", "")
    lock = tmp_path / "some.lock"
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for digest, code in ((found, 0), ("0" * 64, int(sys.version_info[:2] == (3, 11)))):
        lock.write_text(f"# a comment\nharmless==1.0 --hash=sha256:{digest}\n")
        words = [sys.executable, lock, "all", "--dry-run", "--no-index", "--find-links", tmp_path]
        done = subprocess.run([ROOT / "scripts" / "install_locked.sh", *words], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert ("DO NOT MATCH THE HASHES" in done.stderr) == bool(code)


def test_a_finished_one_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    files = ("pyproject.toml", "requirements/cpu.lock", "scripts/setup_cpu.sh", "scripts/install_locked.sh")
    made_from = f"{checkout}\n".encode() + b"".join((checkout / name).read_bytes() for name in files)
    digest = subprocess.run(["sha256sum"], input=made_from, capture_output=True, check=True).stdout
    (checkout / ".venv" / ".ready").write_bytes(digest)
    done = set_up(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def install_bubblewrap(folder: Path, **programs: str) -> tuple[int, str, str]:
    """Run one function of the script with only these programs in PATH. Return exit code, output and log."""
    text = (ROOT / "scripts" / "setup_cpu.sh").read_text()
    [function] = re.findall(r"^install_bubblewrap\(\) \{\n.*?^\}\n", text, flags=re.M | re.S)
    for name, body in {"timeout": 'shift\n"$@"\n', **programs}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}")
        (folder / name).chmod(0o755)
    script = (
        f'set -euo pipefail\nPATH={folder} LOG={folder}/log\nsay() {{ echo "$*"; }}\n{function}install_bubblewrap\n'
    )
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=60)
    log = folder / "log"
    return done.returncode, done.stdout, log.read_text() if log.exists() else ""


ROOT_USER, NOT_ROOT = "echo 0\n", "echo 1000\n"


def test_bubblewrap_is_installed_where_that_is_possible(tmp_path: Path) -> None:
    code, said, log = install_bubblewrap(tmp_path, id=ROOT_USER, **{"apt-get": 'echo "$@"\n'})
    assert (code, said.count("\n")) == (0, 1) and "bubblewrap, the sandbox" in said
    assert log == "update\ninstall -y --no-install-recommends bubblewrap\n"


@pytest.mark.parametrize(
    "programs",
    [
        {"id": ROOT_USER, "apt-get": "echo no network >&2; exit 100\n"},
        {"id": NOT_ROOT, "apt-get": "exit 100\n"},
        {"id": ROOT_USER},
    ],
)
def test_without_bubblewrap_the_set_up_goes_on(tmp_path: Path, programs: dict[str, str]) -> None:
    code, said, _ = install_bubblewrap(tmp_path, **programs)
    assert code == 0 and "could not be installed: env.code will refuse" in said


def test_bubblewrap_that_is_there_is_not_installed(tmp_path: Path) -> None:
    assert install_bubblewrap(tmp_path, bwrap="exit 1\n", id="exit 1\n") == (0, "", "")
