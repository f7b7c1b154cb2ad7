"""The kit for a bare GPU machine, on CPU at tiny sizes, without what such a machine lacks (docs/gpu.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.tools.demo.tiny_models import FAMILIES
from tests.functional.preload import preload

ROOT = Path(__file__).resolve().parents[2]
MISSING = (
    "ray",
    "vllm",
    "transformer_engine",
    "mamba_ssm",
    "causal_conv1d",
    "fla",
    "datasets",
    "torchdata",
    "pebble",
    "math_verify",
    "jsonschema",
)
"""Packages of the project that a machine with torch alone does not have and that the kit does not carry."""
WITHOUT_THEM = f"""
import sys
from importlib.machinery import PathFinder

found = PathFinder.find_spec
carried = ("transformer_engine",) if any("stand_ins" in folder for folder in sys.path) else ()
PathFinder.find_spec = staticmethod(lambda name, path=None, target=None: (
    None if name.partition(".")[0] in {MISSING} and name.partition(".")[0] not in carried else found(name, path, target)
))
"""
GPU_TESTS = "import " + ", ".join(f"tests.gpu.{file.stem}" for file in sorted((ROOT / "tests/gpu").glob("test_*.py")))


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python, and of its child processes, that finds none of MISSING."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_THEM)
    return os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


WITHOUT_A_GPU = """
words, sys.argv[1:] = sys.argv[1:], []
try:
    main()
except SystemExit as refused:
    assert refused.code == 2
else:
    raise AssertionError("it starts without a GPU")
sys.argv[1:] = words
"""
"""First asks for the GPU, which is not there, and is refused."""

KERNELS = {"stack": 1, "scan": 1, "delta rule": 1, "experts": 2, "attention": 1, "refit": 1}
WHOLE = KERNELS | {"families": len(FAMILIES), "cycle": 2, "nanov3 slice": 3, "dense 1.5B": 3}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("stack,kernels,refit", KERNELS),
        pytest.param("stack,families,refit,cycle,kernels,slices", WHOLE, marks=pytest.mark.every_state),
    ],
    ids=["kernels", "all"],
)
def test_everything_is_measured_and_what_is_compared_agrees(
    tmp_path: Path, bare: dict[str, str], parts: str, expected: dict[str, int]
) -> None:
    code = f"import sys\n{GPU_TESTS}\nfrom benchmarks.gpu.proof import main\n{WITHOUT_A_GPU}\nsys.exit(main())"
    out = tmp_path / "out"
    command = [sys.executable, "-W", "ignore", "-c", code, "--device", "cpu", "--tiny", "--out", str(out)]
    command += ["--parts", parts]
    bare |= {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "torch sees no GPU here; --device cpu --tiny tries the same code" in run.stderr
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    compared = [row["part"] for row in rows if row["ok"]]
    assert {part: compared.count(part) for part in compared} == expected
    if "slices" in parts:
        kinds = {row["what"].partition(":")[0] for row in rows if row["part"] == "nanov3 slice"}
        assert kinds >= {"Mamba layer", "expert layer", "attention layer", "the update", "MFU (without recomputation)"}
    assert run.stdout == (out / "table.txt").read_text()


def test_an_engine_takes_a_policys_weights(tmp_path: Path) -> None:
    preload()
    from benchmarks.gpu import stack
    from benchmarks.gpu.kit import Setting

    rows = {row.what: row for row in stack.engine(Setting("cpu", True, tmp_path))}
    compared = {what for what, row in rows.items() if row.ok}
    assert compared == {"engine: samples after it", "engine: refit after a sleep", "engine: log-probs after it"}
    assert all(row.ok is not False for row in rows.values()), rows
