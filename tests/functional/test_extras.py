"""Every extra of pyproject.toml resolves, and the image's pins exist.

These tests ask the package index and run only on request: pytest --registry tests/functional/test_extras.py
"""

import faulthandler
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETUP = (ROOT / "scripts/setup_gpu.sh").read_text()
PINS = {"TRANSFORMER_ENGINE": re.findall(r"^TRANSFORMER_ENGINE=(\S+)$", SETUP, flags=re.M)[0]}
PACKAGES = {"RAY": "ray[default]", "TRANSFORMER_ENGINE": "transformer-engine"}  # else the name of the pin

pytestmark = [pytest.mark.registry, pytest.mark.timeout(4200)]


@pytest.fixture(autouse=True)
def only_its_own_deadline() -> None:
    """Cancel the ini file's timeout of calls into libraries: several gigabytes are fetched."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an interpreter with the newest pip; skip the tests if no package index can be reached."""
    folder = tmp_path_factory.mktemp("resolver")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "-q", "--upgrade", "pip"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    return python


def resolve(python: Path, *wanted: str) -> None:
    words = ["install", "-q", "--dry-run", "--ignore-installed", "--only-binary=:all:", *wanted]
    done = subprocess.run([python, "-m", "pip", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"].keys() - {"kernels"}))
def test_an_extra_resolves(python: Path, extra: str) -> None:
    """Resolve the extra together with the dependencies of the project; `launch` alone, as in `make launch-env`. Not
    `kernels`: these are sources that import torch to say what they need."""
    own = [] if extra == "launch" else PROJECT["dependencies"]
    resolve(python, *own, *PROJECT["optional-dependencies"][extra])


def test_every_pin_of_the_image_exists(python: Path) -> None:
    for name, version in PINS.items():
        package = PACKAGES.get(name, name.lower().replace("_", "-"))
        resolve(python, "--no-deps", f"{package}=={version}")


SOURCES = ("causal_conv1d_fwd.cu", "selective_scan_fwd_bf16.cu")


def test_the_gpu_set_up_ends(tmp_path: Path) -> None:
    """All of it but FlashInfer's own index, for one architecture: TransformerEngine's C++ whole, and of each package of
    kernels one source in CUDA; what is linked is imported."""
    python = shutil.which("python3.12")  # it may be there and start none: a shim of pyenv
    if python is None or subprocess.run([python, "--version"]).returncode or shutil.which("g++") is None:
        pytest.skip("python3.12 or g++ is not here")
    env = {**os.environ, "VENV": str(tmp_path / "venv"), "MAX_JOBS": "2", "ONLY": " ".join(SOURCES)}
    steps = re.findall(r"set -- (.+)", SETUP)[0].replace(" prefetch", "").split()
    done = subprocess.run([ROOT / "scripts/setup_gpu.sh", *steps], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    compiled = re.findall(r"^\[setup\] compiled (\S+) in \d+ s$", done.stdout, flags=re.M)
    print(*re.findall(r"^\[setup\] .+", done.stdout, flags=re.M), sep="\n")
    assert sorted(compiled) == list(SOURCES)
