"""The images install what the lock files name, hold no secret, and do not run as root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_mcore.tools.launch.kubernetes import UID

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT_TEXT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PROJECT_TEXT)["project"]
PINS = dict(re.findall(r"^ARG ([A-Z_]+)_VERSION=(\S+)$", TEXT, flags=re.M))
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
    """TransformerEngine and the extra `kernels`, which the image compiles, and the project itself have none."""
    installs = re.findall(r"pip install (.+?)(?: \\| &&|;|$)", TEXT, flags=re.M)
    free = [words for words in installs if "--require-hashes" not in words]
    assert len(installs) == 7
    here = ("transformer-engine[", "--no-deps --no-build-isolation ${KERNELS}", "--no-deps --no-build-isolation /opt")
    assert all(any(part in words for part in here) for words in free)
    assert PINS.keys() == {"TRANSFORMER_ENGINE"}


def test_transformer_engine_is_the_one_that_pyproject_names() -> None:
    (version,) = re.findall(r"transformer-engine\[pytorch,core_cu13\]==([\d.]+)", PROJECT_TEXT)
    assert PINS["TRANSFORMER_ENGINE"] == version


def test_kernels_are_those_that_pyproject_names() -> None:
    (found,) = re.findall(r'^ARG KERNELS="(.+)"$', TEXT, flags=re.M)
    assert found.split() == PROJECT["optional-dependencies"]["kernels"]
    needed = {"torch", "transformers", "triton", "einops", "ninja", "packaging", "setuptools"}  # by all three together
    assert needed <= GPU.keys()


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
