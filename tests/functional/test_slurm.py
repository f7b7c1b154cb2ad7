"""launchers/slurm/grpo_2n8g.sh, unchanged, on a real Slurm of two nodes: to the end, cancelled, out of time, a lost
node.

They take minutes and run only on request:
pytest --slurm -o faulthandler_timeout=1600 tests/functional/test_slurm.py
"""

import os
import re
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.base.orphan_reaper import marked
from tests.functional.runs import Run, Task, grpo_recipe, write_recipe
from tests.functional.slurm import Slurm, wait_for

SCRIPT = Path(__file__).resolve().parents[2] / "launchers" / "slurm" / "grpo_2n8g.sh"
START_S = 420.0  # mostly the start of the engine, which shares the cores with everything else

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class Job:
    """One submitted run of a tiny model, tensor parallel over both nodes."""

    def __init__(
        self,
        slurm: Slurm,
        task: Task,
        folder: Path,
        steps: int,
        *options: str,
        engines: int = 1,
        save_period: int = 2,
        **variables: str,
    ) -> None:
        self.slurm, self.folder, self.mark = slurm, folder, uuid.uuid4().hex
        path = write_recipe(folder, _recipe(task, steps, engines, save_period))
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(SCRIPT.parents[2]),
            "COMMAND": f"python -m grpo_mcore.cli.main train {path.name} --resume=auto",
            "OBJECT_STORE_GB": "0.1",
            "HF_HOME": self.mark,  # marks every process of the job; nothing is read there
        } | variables
        self.number = slurm.submit(SCRIPT, folder, *options, **variables)

    @property
    def out(self) -> str:
        return "".join(file.read_text() for file in self.folder.glob(f"*-{self.number}.out"))

    @property
    def run(self) -> Run:
        return Run(self.folder, 0, self.out, "")

    def until(self, text: str, seconds: float = START_S) -> None:
        def there() -> bool:
            state = self.slurm.job(self.number)["JobState"]
            assert state not in ("FAILED", "TIMEOUT"), f"{state}\n{self.out}{self.logs()}{self.slurm.logs()}"
            return re.search(text, self.out) is not None

        wait_for(there, seconds, text, lambda: self.out + self.logs() + self.slurm.logs())

    def logs(self) -> str:
        return "".join(f"\n== {file}\n{file.read_text()[-1500:]}" for file in self.folder.glob("logs/slurm/*/*.log"))

    def nothing_is_left(self, within: float = 60.0) -> None:
        wait_for(lambda: not marked(f"HF_HOME={self.mark}"), within, "the end of every process")
        assert not list(self.folder.glob("logs/slurm/*/token"))

    def was_restarted(self) -> bool:
        return self.slurm.job(self.number)["Restarts"] != "0"

    def start_again(self) -> None:
        """Start a requeued job as soon as its nodes are free; Slurm itself waits two minutes. Not in the second in
        which a node's part of the job ended: slurmd would mistake the new start for the old one and reject it."""
        wait_for(lambda: self.slurm.job(self.number)["JobState"] == "PENDING", 60, "the requeued job")
        self.slurm.wait_until_idle(90)
        self.slurm.run("scontrol", "update", f"jobid={self.number}", "timelimit=240", "starttime=now+5")

    def cancel(self) -> None:
        self.slurm.run("scancel", self.number)
        self.slurm.wait(self.number, "CANCELLED", seconds=150)
        wait_for(lambda: "everything has ended" in self.out, 60, "the script's last words", lambda: self.out)
        self.nothing_is_left()

    def steps_saved(self) -> list[int]:
        return sorted(int(folder.name[5:]) for folder in self.run.checkpoints.glob("step_*"))


def _recipe(task: Task, steps: int, engines: int, save_period: int) -> dict[str, Any]:
    recipe = grpo_recipe(task, task.untrained)
    recipe["grpo"] |= {"max_num_steps": steps, "max_num_epochs": 10**6}
    recipe["policy"]["megatron_cfg"] |= {"tensor_model_parallel_size": 2}
    recipe["policy"]["generation"] |= {"num_engines": engines}
    recipe["checkpointing"] = {"save_period": save_period, "metric_name": None}
    recipe["cluster"] = {"platform": "cpu", "num_nodes": 2, "gpus_per_node": 1}
    return recipe


@pytest.mark.slurm
def test_to_the_end_over_both_nodes(slurm: Slurm, task: Task, tmp_path: Path) -> None:
    """An engine on each node gets the weights that only ranks of the other node hold over the network."""
    job = Job(slurm, task, tmp_path, 3, engines=2)
    end = slurm.wait(job.number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", seconds=START_S)
    assert end["JobState"] == "COMPLETED", job.out + job.logs() + slurm.logs()
    assert "2 policy ranks on 2 nodes, engines on 2" in job.out
    assert "2 of 2 nodes, 16 of 16 GPUs" in job.out and "TP 2 x PP 1 x DP 1" in job.out and "the run is over" in job.out
    assert [line["step"] for line in job.run.metrics()] == [1, 2, 3]
    assert max(line["token_mult_prob_error"] for line in job.run.metrics()) < 1.02
    assert {file.stem for file in tmp_path.glob("logs/slurm/*/ray-*.log")} == {"ray-node1", "ray-node2"}
    job.nothing_is_left()


@pytest.mark.slurm
def test_time_is_up_then_again_from_the_checkpoint_then_cancelled(slurm: Slurm, task: Task, tmp_path: Path) -> None:
    """The limit is moved near, so that Slurm itself sends the script's --signal=B:USR1@600."""
    job = Job(slurm, task, tmp_path, 100_000, save_period=10**6)
    job.until(r"(?m)^ *2/100000")
    hours, minutes, _ = map(int, slurm.job(job.number)["RunTime"].split(":"))
    slurm.run("scontrol", "update", f"jobid={job.number}", f"timelimit={60 * hours + minutes + 5}")
    job.until("the job is queued again", 240)
    assert "Slurm: the time limit is near" in job.out and "SIGUSR1 asked the run to stop" in job.out
    job.nothing_is_left()
    (saved,) = job.steps_saved()
    assert saved == job.run.metrics()[-1]["step"] >= 2  # the step that ran is the one that was saved

    job.start_again()
    job.until(rf"(?m)^ *{saved + 2}/100000")
    steps = [line["step"] for line in job.run.metrics()]
    assert steps == list(range(1, len(steps) + 1)), "each step once, over the restart"

    job.cancel()
    (newest,) = job.steps_saved()[-1:]
    assert newest in (saved, job.run.metrics()[-1]["step"]), "what was saved first, or in the time that Slurm gives"


@pytest.mark.slurm
def test_a_killed_slurmd_ends_it_all_and_the_job_goes_on_when_the_node_is_back(
    slurm: Slurm, task: Task, tmp_path: Path
) -> None:
    job = Job(slurm, task, tmp_path, 100_000)
    job.until(r"(?m)^ *3/100000")
    slurm.end("slurmd.node2", signal.SIGKILL)
    try:
        wait_for(job.was_restarted, 240, "the job to be queued again", lambda: job.out + slurm.logs())
        job.nothing_is_left(within=150)  # the lost node's processes find out by themselves
        assert "NODE FAILURE" in job.out
        assert "a Ray node ended before the run" in job.out or "goes on from its newest checkpoint" in job.out
    finally:
        slurm.start_node("node2")
    saved = job.steps_saved()[-1]
    assert saved >= 2
    job.start_again()
    job.until(rf"start 2: (?s:.*)\n *{saved + 2}/100000")
    again = job.out.partition("start 2: ")[2]
    assert re.findall(r"(?m)^ *(\d+)/100000", again)[0] == str(saved + 1)
    job.cancel()


@pytest.mark.slurm
def test_a_ray_node_that_hangs_is_ended_and_the_job_goes_on_without_it(
    slurm: Slurm, task: Task, tmp_path: Path
) -> None:
    job = Job(slurm, task, tmp_path, 100_000, SECRET_OF_THE_SUBMITTER=tmp_path.name)
    job.until("Ray is ready")
    assert not marked(f"SECRET_OF_THE_SUBMITTER={tmp_path.name}")  # a job gets what the script names, and no more
    commands = {pid: _command(pid) for pid in marked(f"HF_HOME={job.mark}")}
    raylets = {pid: words for pid, words in commands.items() if words[0].endswith("/raylet")}
    folders = {Path(*Path(word.partition("=")[2]).parts[:3]) for words in raylets.values() for word in words[1:2]}
    assert len(folders) == 2 and all(folder.is_dir() for folder in folders), raylets
    (other,) = (pid for pid, words in raylets.items() if "--head" not in words)
    os.kill(other, signal.SIGSTOP)
    job.until("is queued again .*, without node2")
    wait_for(lambda: slurm.job(job.number)["ExcNodeList"] == "node2", 30, "the node to be left out")
    assert "Ray ended by itself on node2" in job.out
    slurm.run("scancel", job.number)
    job.nothing_is_left()
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slurm
def test_two_jobs_on_one_node_do_not_meet(slurm: Slurm, task: Task, tmp_path: Path) -> None:
    half = ("--gpus-per-node=4", "--cpus-per-task=32", "--mem=200G")
    jobs = [Job(slurm, task, tmp_path / name, 2, *half) for name in ("a", "b")]
    for job in jobs:
        job.until("Ray is ready: 2 of 2 nodes, 8 of 8 GPUs", 2 * START_S)
    ends = [slurm.wait(job.number, "COMPLETED", "FAILED", seconds=2 * START_S) for job in jobs]
    assert [end["JobState"] for end in ends] == ["COMPLETED"] * 2, "".join(job.out + job.logs() for job in jobs)
    starts = [end["StartTime"] for end in ends]
    assert max(starts) < min(end["EndTime"] for end in ends), "they did not run at the same time"
    for job in jobs:
        job.nothing_is_left()


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.slurm
def test_ray_sub_runs_any_command(slurm: Slurm, tmp_path: Path) -> None:
    """`COMMAND=... sbatch --nodes=2 --gres=gpu:8 ray.sub`, as the documents write it."""
    count = (
        "import ray; ray.init(log_to_driver=False); print(len(ray.nodes()), ray.cluster_resources()['CPU'], 'cores')"
    )
    number = slurm.submit(
        SCRIPT.parents[2] / "ray.sub", tmp_path, "--nodes=2", "--gres=gpu:8",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH=str(SCRIPT.parents[2]),
        COMMAND=f'python -c "{count}"', OBJECT_STORE_GB="0.1",
    )  # fmt: skip
    slurm.wait(number, "COMPLETED", "FAILED", seconds=START_S)
    out = "".join(file.read_text() for file in tmp_path.glob(f"*-{number}.out"))
    assert "2 128.0 cores" in out and "the run is over" in out, out + slurm.logs()
