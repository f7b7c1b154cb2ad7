"""Run a recipe through NeMo-Run: on this machine, on Slurm or on Kubernetes.

    make launch-env                                             # once: .venv-launch
    .venv-launch/bin/python launchers/nemo_run/grpo.py --yes job=grpo_math_1B to=slurm \\
        job.overrides="['launch.time_limit=08:00:00']"

`--dryrun` prints the script that would run, `--detach` does not wait (Slurm). Exits with 1 if the job fails, and prints
the end of its log.
"""

import sys
from pathlib import Path
from typing import NoReturn

import fiddle as fdl
import nemo_run as run
from jobs import Job, executor, register_recipes, script
from nemo_run.config import get_nemorun_home

from grpo_mcore.recipe import RecipeError, load_recipe
from grpo_mcore.tools.launch import LaunchSpec, launch_spec, nemo_run
from grpo_mcore.tools.launch.spec import Target

TARGETS = ("local", "slurm", "k8s")

finished = False


@run.cli.entrypoint(type="experiment")
def grpo(ctx: run.cli.RunContext, job: Job, to: str = "local") -> None:
    """Submit the job of a recipe. to: local, slurm or k8s."""
    global finished
    if to not in TARGETS:
        fail(f"to={to}: expected one of {', '.join(TARGETS)}")
    try:
        spec = launch_spec(load_recipe(job.recipe, job.overrides), to)
    except RecipeError as error:
        fail(str(error))
    if ctx.dryrun:
        print(nemo_run.script(spec, to), end="")
    else:
        submit(spec, to, ctx.detach and to == "slurm")
    finished = True


def submit(spec: LaunchSpec, to: Target, detach: bool) -> None:
    if to == "slurm" and "/nemo_run" in get_nemorun_home():
        # NeMo-Run writes the job's folder over every "/nemo_run" in the batch script.
        fail(f"NEMORUN_HOME {get_nemorun_home()}: choose a folder without /nemo_run in its path")
    with run.Experiment(spec.name, enable_goodbye_message=detach) as experiment:
        experiment.add(fdl.build(script(spec, to)), executor=fdl.build(executor(spec, to)), name=nemo_run.TASK)
        experiment.run(detach=detach, tail_logs=not detach)
    if not detach:
        exit_if_failed(experiment)


def exit_if_failed(experiment: run.Experiment) -> None:
    """Exit with 1 if a task has failed: NeMo-Run itself reports it and exits with 0."""
    failed = [task for task in experiment.status(return_dict=True).values() if str(task["status"]) != "SUCCEEDED"]
    for task in failed:
        words = log_tail(Path(task["local_dir"]))
        print(f"grpo: {task['name']} (job {task['job_id']}) ended as {task['status']}; {words}", file=sys.stderr)
    if failed:
        sys.exit(1)


def log_tail(folder: Path, lines: int = 15) -> str:
    """Return the end of the task's log."""
    logs = [file for pattern in ("sbatch_*.out", "**/combined.log") for file in folder.glob(pattern)]
    if not logs:
        return f"it left no log in {folder}"
    newest = max(logs, key=lambda file: file.stat().st_mtime)
    return "\n".join([f"the end of {newest}:", *newest.read_text(errors="replace").splitlines()[-lines:]])


def fail(message: str, code: int = 2) -> NoReturn:
    print(f"grpo: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    register_recipes()
    run.cli.main(grpo)
    # NeMo-Run prints what it could not parse or submit, and exits with 0.
    if not finished and "--help" not in sys.argv and not any(word.startswith("--to-") for word in sys.argv):
        fail("nothing was submitted, or it was not followed to its end", code=1)
