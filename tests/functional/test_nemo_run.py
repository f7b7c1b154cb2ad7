"""launchers/nemo_run through NeMo-Run itself: its local executor, and its Slurm executor on a real Slurm of two nodes.

Makes .venv-launch (0.5 GB) and takes minutes, so it runs only on request:
pytest --nemo-run -o faulthandler_timeout=1600 tests/functional/test_nemo_run.py
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.functional.runs import Run, Task, grpo_recipe, write_recipe
from tests.functional.slurm import Slurm

ROOT = Path(__file__).resolve().parents[2]
# A folder below /tmp would be rejected: it is on one node only.
OVERRIDES = "job.overrides=['grpo.max_num_steps=2', 'checkpointing.checkpoint_dir=checkpoints']"
pytestmark = [pytest.mark.nemo_run, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of the environment that submits."""
    done = subprocess.run([ROOT / "scripts" / "setup_launch.sh"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no environment for NeMo-Run: {done.stderr[-500:]}")
    return ROOT / ".venv-launch" / "bin" / "python"


def submit(python: Path, folder: Path, recipe: dict[str, Any], *words: str, **variables: str) -> Run:
    """Run `python launchers/nemo_run/grpo.py` in the folder of the recipe."""
    path = write_recipe(folder, recipe)
    env = os.environ | {
        "PATH": f"{Path(__file__).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",  # sacct, grpo-mcore
        "PYTHONPATH": str(ROOT),
        "NEMORUN_HOME": str(folder / "state"),
        "OBJECT_STORE_GB": "0.1",
        **variables,
    }
    done = subprocess.run(
        [python, ROOT / "launchers/nemo_run/grpo.py", "--yes", f"job.recipe={path}", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    return Run(folder, done.returncode, done.stdout, done.stderr)


def test_here_to_the_end(python: Path, task: Task, tmp_path: Path) -> None:
    run = submit(python, tmp_path, grpo_recipe(task, task.untrained), "job.overrides=['grpo.max_num_steps=2']")
    assert run.code == 0, run.out + run.err
    assert [line["step"] for line in run.metrics()] == [1, 2] and "predicted against measured" in run.out


def test_a_failure_here_ends_it_with_its_reason(python: Path, task: Task, tmp_path: Path) -> None:
    run = submit(python, tmp_path, grpo_recipe(task, tmp_path / "nowhere"))
    assert run.code == 1 and "ended as FAILED; the end of" in run.err
    assert "policy.model_name" in run.err


def test_on_slurm_to_the_end_over_both_nodes(python: Path, slurm: Slurm, task: Task, tmp_path: Path) -> None:
    run = submit(python, tmp_path, of_two_nodes(task), "to=slurm", OVERRIDES, SLURM_CONF=str(slurm.conf))
    assert run.code == 0, run.out + run.err
    assert [line["step"] for line in run.metrics()] == [1, 2]
    logs = [file.read_text() for file in tmp_path.glob("state/**/sbatch_*.out")]  # the job's, and NeMo-Run's copy
    assert logs and all("2 of 2 nodes" in log and "the run is over" in log for log in logs)


def test_a_failure_on_slurm_ends_it_with_its_reason(python: Path, slurm: Slurm, task: Task, tmp_path: Path) -> None:
    command = "echo the reason; exit 5"
    run = submit(
        python, tmp_path, of_two_nodes(task), "to=slurm", OVERRIDES, SLURM_CONF=str(slurm.conf), COMMAND=command
    )
    assert run.code == 1 and "ended as FAILED" in run.err
    assert "the run failed with exit code 5" in run.err


def of_two_nodes(task: Task) -> dict[str, Any]:
    recipe = grpo_recipe(task, task.untrained)
    recipe["cluster"] = {"platform": "cpu", "num_nodes": 2, "gpus_per_node": 1}
    recipe["policy"]["megatron_cfg"] |= {"tensor_model_parallel_size": 2}
    recipe["launch"] = {"cpus_per_node": 2, "memory_gb_per_node": 8}
    return recipe
