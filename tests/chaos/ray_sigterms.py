"""One run under Ray that SIGTERM ends at random times, and that is resumed each time, as a preempted job is.

    python -m tests.chaos.ray_sigterms TASK MODEL OUT SEED ...

One signal for each seed. Each start must end with exit code 143 and a checkpoint of every trained step; the next start
goes on from it. At last the run is left in peace for some steps. Its metrics must be those of a run that nobody
disturbed.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.random_runs import Disturbance, check, outcome, run
from tests.functional.preload import preload
from tests.functional.runs import Task, grpo_recipe

START_S, LOOP_S = 30.0, 8.0
"""Seconds from which a signal's time is drawn: after the start of the command, and after the first ledger entry."""

LAST_STEPS = 2


def sigterms(task: Task, model: Path, out: Path, seeds: Sequence[int], say: Callable[[str], None]) -> None:
    """Send the signals. Raises AssertionError at the first of them that costs anything."""
    preload()
    folder, saved = out / "disturbed", 0
    recipe = grpo_recipe(task, model)
    recipe["grpo"] |= {"max_num_steps": 10_000, "max_num_epochs": 10_000}
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": 1}
    for seed in seeds:
        draw = random.Random(seed)
        in_loop = draw.random() < 0.75
        disturbed = Disturbance("TERM", in_loop, draw.uniform(0.0, LOOP_S if in_loop else START_S), 0.0, (143,))
        # The signal finds a checkpoint of every step that is still being written, or makes the only one.
        often = seed % 2 == 0
        recipe["checkpointing"] = {"save_period": 1 if often else 10_000, "metric_name": None, "is_async": often}
        recipe["cluster"]["max_restarts"] = int(seed % 4 == 3)  # then a process of its own passes the signal on
        code = run(folder, recipe, disturbed, str(seed), "--resume=auto")
        assert code == 143, f"signal {seed}: exit code {code} after {disturbed}"
        before, saved = saved, check(folder, disturbed, code)
        assert saved >= before
        where = "loop" if in_loop else "start"
        say(f"signal {seed} after {disturbed.at_s:.2f} s of the {where}: {code}, steps {before} to {saved}")
    steps = recipe["grpo"]["max_num_steps"] = saved + LAST_STEPS
    assert run(folder, recipe, None, "last", "--resume=auto") == 0
    check(folder, disturbed, 0, steps)
    assert run(out / "calm", recipe, None, "calm") == 0
    assert outcome(folder) == outcome(out / "calm"), "other numbers than an undisturbed run"
    say(f"{steps} steps with the numbers of an undisturbed run")


if __name__ == "__main__":
    task_folder, model_folder, out_folder = map(Path, sys.argv[1:4])
    words = [int(word) for word in sys.argv[4:]]
    sigterms(Task(task_folder), model_folder, out_folder, words, lambda text: print(text, flush=True))
