"""The images install what the lock files name, hold no secret, and do not run as root."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_mcore.families.settings import SINKS_CUDNN
from grpo_mcore.tools.launch.kubernetes import UID

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETUP = (ROOT / "scripts/setup_gpu.sh").read_text()
CPU, GPU = (
    dict(re.findall(r"^([a-z0-9-]+)==(\S+) --hash=", (ROOT / f"requirements/{name}.lock").read_text(), flags=re.M))
    for name in ("cpu", "gpu")
)
ASKED = [Requirement(line) for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]]
STAGES = dict(zip(*[iter(re.split(r"^FROM \S+ AS (\w+)$", TEXT, flags=re.M)[1:])] * 2, strict=True))


@pytest.mark.parametrize("wanted", ASKED, ids=str)
def test_the_gpu_lock_fits_pyproject(wanted: Requirement) -> None:
    assert wanted.specifier.contains(GPU[canonicalize_name(wanted.name)])


@pytest.mark.parametrize("name", ["torch", "ray", "megatron-core", "transformers", "math-verify"])
def test_both_images_have_one_version(name: str) -> None:
    assert CPU[name].removesuffix("+cpu") == GPU[name]


def test_hashes_are_checked() -> None:
    """TransformerEngine, the extra `kernels`, which are compiled, and the project itself have none."""
    installs = re.findall(r"pip install (.+?)(?: \\| &&|;|$)", TEXT, flags=re.M)
    assert len(installs) == 3 and sum("--require-hashes" in words for words in installs) == 2, "of the CPU image"
    installs = re.findall(r"pip_install (--.+)", SETUP)
    free = [words for words in installs if "--require-hashes" not in words]
    assert len(installs) == 5 and len(free) == 3
    here = (
        "--no-cache-dir --no-build-isolation -c",
        "--no-deps --no-build-isolation $(kernel_packages)",
        '--no-deps --no-build-isolation "${edit',
    )
    assert all(any(part in words for part in here) for words in free)
    assert sum("--no-cache-dir" in words for words in free) == 2, "pip caches what was compiled for another torch"


def test_the_gpu_image_is_made_by_the_script_that_users_run() -> None:
    steps = re.search(r"set -- (.+)", SETUP)
    assert steps is not None
    lines = [line for line in STAGES["gpu"].splitlines() if not line.startswith(("#", "COPY"))]
    calls = [call for line in lines for call in line.split("scripts/setup_gpu.sh ")[1:]]
    run = [step for call in calls for step in re.split(r"[;\\]", call)[0].split()]
    assert run == steps.group(1).split()


def test_the_script_says_its_steps_and_refuses_others() -> None:
    script = str(ROOT / "scripts/setup_gpu.sh")
    done = subprocess.run([script, "everything"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no step everything" in done.stderr
    env = {**os.environ, "PYTHON": "false", "VENV": "/nowhere/venv"}
    done = subprocess.run([script, "venv"], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1 and "the lock is for Python 3.12 and false is not that" in done.stderr


def test_the_step_cudnn_installs_one_that_trains_sinks(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    env = {**os.environ, "VENV": str(tmp_path)}
    command = [str(ROOT / "scripts/setup_gpu.sh"), "cudnn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True)
    assert "install --no-deps --require-hashes" in done.stdout
    wanted = (tmp_path / "cudnn.txt").read_text()
    found = re.fullmatch(r"nvidia-cudnn-cu13==9\.(\d+)\.(\d+)\.\d+ --hash=sha256:[0-9a-f]{64}\n", wanted)
    assert found is not None and 90000 + 100 * int(found[1]) + int(found[2]) >= SINKS_CUDNN


@pytest.mark.parametrize("broken", ["transformer_engine.pytorch", "mamba_ssm", "fla"])
def test_the_script_ends_with_an_import_of_every_extension(broken: str, tmp_path: Path) -> None:
    """One that is installed and broken is named, and the others are imported all the same."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ncase "$4" in *"import {broken}") echo "OSError: undefined symbol"; exit 1;; esac\n')
    python.chmod(0o755)
    env = {**os.environ, "VENV": str(tmp_path)}
    script = [str(ROOT / "scripts/setup_gpu.sh"), "imports"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1 and done.stderr.strip().endswith(f"not importable: {broken}")
    assert f"{broken}: OSError: undefined symbol" in done.stdout and "grpo_mcore.tools.launch" in done.stdout


def test_what_compiled_kernels_need_is_locked() -> None:
    needed = {"torch", "transformers", "triton", "einops", "ninja", "packaging", "setuptools", "hatchling", "pybind11"}
    assert needed | {"nvidia-cuda-nvcc", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= GPU.keys()


def test_the_python_is_one_that_the_project_runs_on() -> None:
    asked = Requirement(f"python{PROJECT['requires-python']}").specifier
    found = set(re.findall(r"python:?(3\.\d+)", TEXT))
    assert found == {"3.12", "3.11"} and all(asked.contains(version) for version in found)


@pytest.mark.parametrize("stage", ["gpu", "cpu"])
def test_it_does_not_run_as_root(stage: str) -> None:
    assert re.findall(r"^USER (\S+)$", STAGES[stage], flags=re.M) == [str(UID)]
    assert STAGES[stage].index("USER ") > STAGES[stage].rindex("RUN ")
    assert "org.opencontainers.image.licenses" in STAGES[stage]


def test_no_secret_is_built_in() -> None:
    assert not re.search(r"TOKEN|PASSWORD|API_KEY|SECRET|--mount=type=secret", TEXT)
    assert not re.search(r"^COPY \. |^ADD ", TEXT, flags=re.M)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for source in re.findall(r"^COPY (.+) \S+$", TEXT, flags=re.M):
        for name in source.split():
            assert f"!{name}" in ignored and (ROOT / name).exists()


def test_base_images_have_a_tag() -> None:
    for image in re.findall(r"^ARG \w*BASE_IMAGE=(\S+)$", TEXT, flags=re.M):
        assert re.search(r":[\w.-]+(@sha256:[0-9a-f]{64})?$", image) and ":latest" not in image
