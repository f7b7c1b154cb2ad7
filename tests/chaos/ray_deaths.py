"""Runs under Ray in which one process is killed, or stopped for longer than its deadline, at a random time, by seed.

    python -m tests.chaos.ray_deaths TASK MODEL OUT SEED ...

Each run must reach its end by itself, with a ledger without flaw.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from grpo_mcore.cluster.inspection import workers_here
from tests.chaos import random_runs
from tests.chaos.random_runs import Disturbance, check, run
from tests.functional.preload import preload
from tests.functional.runs import Task, grpo_recipe

STEPS = 5
LOOP_S = 20.0
"""Seconds after the first ledger entry from which the time is drawn."""

PATIENCE_S, STOPPED_S = 40.0, 60.0
"""Deadline of a call, and how long a process is stopped."""

VICTIMS = ("raylet", "gcs_server", "agent", "driver", "policy-0", "engine-0", "environment-math")


def processes_of(victim: str, pid: int, folder: Path) -> list[int]:
    """Return the processes of a run that are the victim; nothing if it has ended. `pid`: of the command."""
    if victim in VICTIMS[4:]:
        places = {
            name: place for logs in folder.glob("logs/exp_*/workers") for name, place in workers_here(logs).items()
        }
        return [places[victim].pid] if victim in places else []
    found = []
    for process in psutil.Process(pid).children(recursive=victim != "driver"):
        try:
            words = " ".join(process.cmdline())
            matches = process.name() == victim
            if victim == "driver":
                matches = "spawn_main" in words
            elif victim == "agent":  # a raylet's words name its agents
                matches = process.name() != "raylet" and ("agent.py" in words or "agent/main.py" in words)
        except psutil.Error:  # it has ended
            continue
        found += [process.pid] if matches else []
    return found


def act(disturbed: Disturbance, pid: int, folder: Path) -> None:
    """Kill or stop the victim."""
    sign, victim = disturbed.kind.split(" ", 1)
    pids = processes_of(victim, pid, folder)
    for each in pids:
        os.kill(each, signal.Signals[f"SIG{sign}"])
    if sign == "STOP":
        time.sleep(STOPPED_S)
        for each in pids:
            if psutil.pid_exists(each):
                os.kill(each, signal.SIGCONT)


def deaths(task: Task, model: Path, out: Path, seeds: Sequence[int], say: Callable[[str], None]) -> None:
    """Run all seeds. Raises AssertionError at the first that does not reach its end."""
    preload()
    random_runs.act, random_runs.DEADLINE_S = act, 1200.0
    recipe = grpo_recipe(task, model)
    recipe["grpo"]["max_num_steps"] = STEPS
    recipe["checkpointing"] = {"save_period": 1, "metric_name": None, "keep_top_k": 2}
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 1, "max_restarts": 2, "retry_wait_s": 0.1}
    recipe["cluster"] |= {"step_timeout_s": PATIENCE_S, "start_timeout_s": 300.0}
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"  # else Ray looks for a dead head for a minute
    for seed in seeds:
        draw = random.Random(seed)
        kind = f"{('KILL', 'STOP')[seed // len(VICTIMS) % 2]} {VICTIMS[seed % len(VICTIMS)]}"
        disturbed = Disturbance(kind, True, draw.uniform(0.0, LOOP_S), 0.0, ())
        code = run(out / f"seed_{seed}", recipe, disturbed, "disturbed")
        say(f"seed {seed}: {kind} after {disturbed.at_s:.2f} s of the loop: {code}")
        check(out / f"seed_{seed}", disturbed, code, STEPS)


if __name__ == "__main__":
    task_folder, model_folder, out_folder = map(Path, sys.argv[1:4])
    deaths(Task(task_folder), model_folder, out_folder, [int(word) for word in sys.argv[4:]],
           lambda text: print(text, flush=True))  # fmt: skip
