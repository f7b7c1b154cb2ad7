"""ray.sub and launchers/slurm/grpo_2n8g.sh: sbatch's options, and where they find the script that they source."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.launch import launch_spec
from grpo_mcore.tools.launch.slurm import OTHERS, PASSED, SETTINGS, sbatch_options
from grpo_mcore.tools.launch.spec import FOR_MIRROR, FOR_TRACKERS, FROM_SUBMITTER
from tests.unit.tools.launch.jobs import ROOT, TWO_NODES

RAY_SUB, TWO_NODE_JOB = ROOT / "ray.sub", ROOT / "launchers/slurm/grpo_2n8g.sh"
BODY = "grpo_mcore/tools/launch/slurm_body.sh"


def options(file: Path) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in file.read_text().splitlines() if line.startswith("#SBATCH")]
    return dict(line.partition("=")[::2] for line in lines)


def test_the_job_of_two_nodes_has_the_options_of_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = launch_spec(load_recipe(TWO_NODES), "slurm")
    expected = {name: str(value) for name, value in sbatch_options(spec).items()}
    exported, shipped = expected.pop("export"), options(TWO_NODE_JOB)
    assert {*shipped.pop("export").split(",")} == {*exported.split(","), "GRPO_MCORE_ROOT"}
    assert shipped == expected
    assert f"START_TIMEOUT={spec.start_timeout_s} " in TWO_NODE_JOB.read_text()


def test_ray_sub_hands_on_what_any_command_may_need() -> None:
    trackers = [name for names in FOR_TRACKERS.values() for name in names]
    expected = {*PASSED, *SETTINGS, *OTHERS, *FROM_SUBMITTER, *trackers, *FOR_MIRROR, "GRPO_MCORE_ROOT"}
    assert {*options(RAY_SUB)["export"].split(",")} == expected


def checkout(folder: Path, name: str) -> Path:
    """Make a checkout whose script prints its name, the command and the seconds until all nodes must have joined."""
    body = folder / name / BODY
    body.parent.mkdir(parents=True)
    (folder / name / "launchers/slurm").mkdir(parents=True)
    body.write_text(f'echo "{name}: $COMMAND ${{START_TIMEOUT:-600}}"\n')
    return folder / name


def run(script: Path, folder: Path, submitted: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of a job's script, as Slurm does, which knows which file of `submitted` it was."""
    spool = folder / "spool"
    spool.mkdir(exist_ok=True)
    (scontrol := spool / "scontrol").write_text(f"#!/bin/sh\necho '   Command={submitted}'\n")
    scontrol.chmod(0o755)
    shutil.copy(script, spool / "slurm_script")
    settings = {"PATH": f"{spool}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(folder)}
    words = ["bash", str(spool / "slurm_script")]
    return subprocess.run(words, env=settings | variables, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", [RAY_SUB, TWO_NODE_JOB])
def test_a_job_finds_the_checkout(script: Path, tmp_path: Path) -> None:
    command = {"COMMAND": "true", "START_TIMEOUT": "9"}
    own, other = checkout(tmp_path, "own checkout"), checkout(tmp_path, "other")
    there, copied = own / script.relative_to(ROOT), tmp_path / "a.sh"
    assert run(script, tmp_path, there, **command).stdout == "own checkout: true 9\n"
    assert run(script, tmp_path, copied, **command, SLURM_SUBMIT_DIR=str(other)).stdout == "other: true 9\n"
    assert run(script, tmp_path, there, **command, GRPO_MCORE_ROOT=str(other)).stdout == "other: true 9\n"
    lost = run(script, tmp_path, copied, **command)
    assert lost.returncode == 2 and lost.stderr.startswith(f"{script.name}: no checkout of grpo-mcore: submit from one")


def test_commands(tmp_path: Path) -> None:
    own = checkout(tmp_path, "own")
    nothing = run(RAY_SUB, tmp_path, own / "ray.sub")
    assert nothing.returncode == 2 and "give the command in the variable COMMAND" in nothing.stderr
    default = run(TWO_NODE_JOB, tmp_path, own / "launchers/slurm/grpo_2n8g.sh")
    assert default.stdout == f"own: grpo-mcore train {TWO_NODES} --resume=auto 1800\n"
