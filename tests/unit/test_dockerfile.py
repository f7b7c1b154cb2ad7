"""The image's pins are the project's, it holds no secret, and it does not run as root."""

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
LOCKED = dict(
    line.split("==") for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if line[:1].isalnum()
)
ASKED = [Requirement(line) for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]]
STAGES = dict(zip(*[iter(re.split(r"^FROM \S+ AS (\w+)$", TEXT, flags=re.M)[1:])] * 2, strict=True))


@pytest.mark.parametrize("name", sorted(set(PINS) - {"TRANSFORMER_ENGINE"}))
def test_a_pin_agrees_with_pyproject(name: str) -> None:
    package = canonicalize_name(name)
    (asked,) = [wanted for wanted in ASKED if canonicalize_name(wanted.name) == package]
    assert asked.specifier.contains(PINS[name]), f"{name} {PINS[name]}, pyproject asks for {asked}"
    assert f"{asked.name}" in STAGES["gpu"] and f"${{{name}_VERSION}}" in STAGES["gpu"]


@pytest.mark.parametrize("name", ["TORCH", "RAY", "MEGATRON_CORE", "TRANSFORMERS", "MATH_VERIFY"])
def test_both_images_have_one_version(name: str) -> None:
    assert LOCKED[canonicalize_name(name)].removesuffix("+cpu") == PINS[name]


def test_what_pyproject_pins_is_pinned() -> None:
    exact = {canonicalize_name(w.name) for w in ASKED if str(w.specifier).startswith("==")}
    assert exact <= {canonicalize_name(name) for name in PINS}


def test_transformer_engine_is_the_one_that_pyproject_names() -> None:
    (version,) = re.findall(r"transformer-engine\[pytorch,core_cu13\]==([\d.]+)", PROJECT_TEXT)
    assert PINS["TRANSFORMER_ENGINE"] == version


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
        assert re.search(r":[\w.-]+$", image) and not image.endswith(":latest")
