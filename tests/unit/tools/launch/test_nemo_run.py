"""The values and scripts that NeMo-Run gets, tested without NeMo-Run."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_mcore.recipe import RecipeError, load_recipe
from grpo_mcore.tools.launch import launch_spec, nemo_run
from grpo_mcore.tools.launch.kubernetes import documents
from grpo_mcore.tools.launch.slurm import job_script

ROOT = Path(__file__).resolve().parents[4]
TWO_NODES = "grpo-llama3.1-8B-2n8g"
ON_K8S = ("launch.container=ghcr.io/you/grpo-mcore:0.1", "launch.k8s.volume_claim=runs")


@pytest.mark.slow
def test_only_the_launcher_imports_nemo_run() -> None:
    for file in [file for folder in ("grpo_mcore", "scripts", "benchmarks") for file in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "nemo_run"], file


def test_jobs_are_written_by_the_packages_of_the_environment_that_submits() -> None:
    """By those of requirements/launch.lock alone, in which NeMo-Run is and what trains is not."""
    program = """
import re, sys
from importlib.metadata import packages_distributions
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
locked = {normal(line.split("==")[0]) for line in open("requirements/launch.lock") if "==" in line}
absent = {m for m, names in packages_distributions().items() if not locked & {*map(normal, names)}} - {"grpo_mcore"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not in requirements/launch.lock")
sys.meta_path.insert(0, Absent())
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.launch import launch_spec, nemo_run
job = launch_spec(load_recipe(sys.argv[1], []), "slurm")
print(len(nemo_run.script(job, "slurm")), nemo_run.slurm_fields(job)["nodes"])
"""
    done = subprocess.run([sys.executable, "-c", program, TWO_NODES], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_slurm_gets_the_same_options_and_hands_over_to_our_script() -> None:
    spec = launch_spec(
        load_recipe(TWO_NODES, ["launch.slurm.options=['--qos high', '--exclusive', '--comment=a b']"]), "slurm"
    )
    fields = nemo_run.slurm_fields(spec)
    assert (fields["nodes"], fields["gpus_per_node"], fields["time"]) == (2, 8, "04:00:00")
    assert fields["signal"] == "B:USR1@600" and fields["account"] is None
    further = fields["additional_parameters"]
    assert (
        further["comment"] == "a b"
        and further["qos"] == "high"
        and further["exclusive"] is True
        and "HF_TOKEN" in further["export"].split(",")
    )
    assert fields["setup_lines"] == "exec bash /nemo_run/scripts/train.sh"
    assert nemo_run.script(spec, "slurm") == job_script(spec)


def test_what_cannot_resume_is_not_requeued() -> None:
    spec = launch_spec(load_recipe(TWO_NODES, ["checkpointing.enabled=false"]), "slurm")
    assert nemo_run.slurm_fields(spec)["setup_lines"].startswith('scontrol update jobid="$SLURM_JOB_ID" requeue=0\n')


def test_here_there_is_one_node_and_no_image() -> None:
    with pytest.raises(RecipeError, match="this machine is one node, not 2"):
        launch_spec(load_recipe(TWO_NODES), "local")
    with pytest.raises(RecipeError, match="runs in its environment, not in an image"):
        launch_spec(load_recipe("grpo_math_1B", ["launch.container=a:1"]), "local")


def test_here_the_run_is_the_program_itself(tmp_path: Path) -> None:
    program = tmp_path / "grpo-mcore"
    program.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS: $*"\nexit 7\n')
    program.chmod(0o755)
    words = ['+launch.env.OMP_NUM_THREADS="3"', "grpo.max_num_steps=7"]
    spec = launch_spec(load_recipe("grpo_math_1B", words), "local")
    done = bash(nemo_run.script(spec, "local"), tmp_path)
    assert (done.returncode, done.stdout.split()[:2]) == (7, ["3:", "train"]) and "grpo.max_num_steps=7" in done.stdout
    program.unlink()
    done = bash(nemo_run.script(spec, "local"), tmp_path)
    assert done.returncode == 127 and "activate the environment that trains" in done.stderr


# The RayJob's status by kubectl, call by call; "" is a call that fails.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        (["Initializing ", "Running RUNNING", "Complete SUCCEEDED"], 0, "Complete SUCCEEDED"),
        (["Running RUNNING", "", "", "Running RUNNING", "Complete SUCCEEDED"], 0, "Running RUNNING"),
        (["Running RUNNING", "Failed FAILED AppFailed exit code 1"], 1, "AppFailed exit code 1"),
        (["Complete FAILED"], 1, "Complete FAILED"),
        (["ValidationFailed  "], 1, "ValidationFailed"),
        ([""] * 30, 1, "kubectl has not answered 30 times in a row"),
    ],
)
def test_a_rayjob_is_followed_to_its_end(tmp_path: Path, answers: list[str], code: int, said: str) -> None:
    """A script stands in for kubectl."""
    (tmp_path / "answers").write_text("\n".join(answers) + "\n")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"""#!/bin/bash
cd {tmp_path}
if [[ $1 == create ]]; then cat >made.yaml; echo configmap/x; echo rayjob.ray.io/x; exit; fi
[[ "$*" == "get --namespace=team rayjob.ray.io/x "* ]] || exit 9
answer=$(head -n 1 answers); sed -i 1d answers; [[ -n $answer ]] && echo "$answer"
"""
    )
    kubectl.chmod(0o755)
    spec = launch_spec(load_recipe(TWO_NODES, [*ON_K8S, "launch.k8s.namespace=team"]), "k8s")
    done = bash(nemo_run.script(spec, "k8s"), tmp_path, POLL_SECONDS="0")
    assert done.returncode == code and said in done.stdout + done.stderr, done
    assert list(yaml.safe_load_all((tmp_path / "made.yaml").read_text())) == documents(spec)


def test_a_manifest_that_is_refused_ends_it(tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho forbidden >&2\nexit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    done = bash(nemo_run.script(launch_spec(load_recipe(TWO_NODES, ON_K8S), "k8s"), "k8s"), tmp_path)
    assert done.returncode == 1 and "forbidden" in done.stderr


def bash(script: str, programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=30)
