"""How much time does generation ahead of training save? Real runs on CPU, and their schedule under a simulated clock.

    python benchmarks/async.py [--steps 8] [--ages 0 1 2] [--layouts disaggregated colocated] [--json]
    python benchmarks/async.py --simulate-only [--train-seconds 20] [--engines 4] ... [--json]

The runs (async_runs.py): a policy rank and an engine with a core each ("disaggregated"), at each age; and both on the
same cores, without and with partial rollouts. In the run of age 0, where they follow each other, generation takes g
seconds a step and everything else t. bound: 1 / max(g, t) steps per second, which is (g + t) / max(g, t) times as fast.
It leaves out that samples of later steps fill the engines while the longest of this one are awaited: shares above 1 are
that. On the same cores nothing can overlap; partial rollouts gain what no step waits for its longest samples.

Below each run with engines of their own, and each that takes turns, stands the same schedule simulated with the
durations measured at age 0: a token of an engine takes a + b x samples seconds, fitted to g = a x longest + b x tokens
over its steps. Where cores are too few to overlap (other programs run on them), that is what the schedule is worth.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import async_runs as runs
import numpy as np
from async_simulation import Durations, geometric, lognormal, simulate

from grpo_mcore.recipe import load_recipe
from grpo_mcore.rollout.schedule import ScheduleConfig

Row = dict[str, Any]
LAYOUTS = ("disaggregated", "colocated")


def row(age: int, mode: str, seconds: float, bound: float, simulated: bool, **more: float) -> Row:
    speed = 1 / seconds
    return {
        "age": age, "mode": mode, "steps_per_second": speed, "bound": bound, "share_of_bound": speed / bound,
        "simulated": simulated, **more,
    }  # fmt: skip


def real_rows(steps: int, ages: Sequence[int], layouts: Sequence[str], seed: int) -> Iterator[Row]:
    """A row for each run, and after it one for its simulation."""
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        task = runs.prepare(folder)
        for layout in layouts:
            chosen, first = [mode for mode in runs.modes(ages) if mode.layout == layout], None
            for mode, seen in zip(chosen, runs.measure(folder, task, chosen, steps), strict=True):
                first = first or seen
                bound = 1 / max(first.waited, first.busy)
                more = {"g": first.waited, "t": first.busy, "wait_seconds": seen.waited}
                yield row(mode.age, mode.name, seen.total, bound, False, **more)
                if mode.name == "colocated" and mode.age:
                    continue  # both at the same time on the same cores: no duration of age 0 tells how long that takes
                schedule, durations = schedule_of(mode, steps=200), durations_of(first)
                pauses = mode.layout == "colocated"
                told = simulate(schedule, runs.GENERATIONS, 1, durations, seed, pauses=pauses)
                yield row(mode.age, mode.name, told["seconds"], bound, True, **more | {"wait_seconds": told["waited"]})


def schedule_of(mode: runs.Mode, steps: int) -> ScheduleConfig:
    sizes = ("policy.megatron_cfg.tensor_model_parallel_size=1", "loss_fn.use_importance_sampling_correction=true")
    ahead = load_recipe("grpo-arithmetic-cpu", [*sizes, *mode.overrides]).config.grpo.async_grpo
    return ScheduleConfig(
        runs.PROMPTS, steps, max_trajectory_age=ahead.max_age, group_order=ahead.group_order,
        max_groups_in_flight=ahead.max_groups_in_flight if ahead.max_age else None,
        refit_in_flight=ahead.in_flight_weight_updates,
    )  # fmt: skip


def durations_of(seen: runs.Measured) -> Durations:
    """Fit the durations of a run of age 0. Where one would be negative it is 0, and the other gets all."""
    tokens, waits = np.array(seen.tokens), np.array(seen.waits)
    (token, sample), *_ = np.linalg.lstsq(np.stack([seen.longest, tokens], 1), waits, rcond=None)
    if sample < 0:
        token, sample = waits.sum() / sum(seen.longest), 0.0
    if token < 0:
        token, sample = 0.0, waits.sum() / tokens.sum()
    lengths = geometric(seen.stop, runs.LONGEST)
    return Durations(seen.busy - seen.refit, seen.refit, float(token), float(sample), lengths)


def simulated_rows(args: argparse.Namespace) -> list[Row]:
    """With the durations of the command line, and lognormal lengths."""
    lengths: Callable[[Random], float] = lognormal(args.median, args.sigma, args.longest)
    durations = Durations(args.train_seconds, args.refit_seconds, args.token_seconds, args.sample_seconds, lengths)
    found, bound = [], 0.0
    for age in args.ages:
        for mode in ("idle engines", "in flight") if age else ("idle engines",):
            config = ScheduleConfig(args.prompts, 100, max_trajectory_age=age, refit_in_flight=mode == "in flight")
            told = simulate(config, args.generations, args.engines, durations, args.seed)
            bound = bound or 1 / max(told["waited"], durations.train)
            more = {"wait_seconds": told["waited"], "engines_idle": told["engines_idle"]}
            found.append(row(age, mode, told["seconds"], bound, True, **more))
    return found


HEAD = f"{'age':>3}  {'mode':<28} {'':<9} {'steps/s':>8} {'bound':>8} {'share':>6} {'waits s':>8}"


def line(one: Row) -> str:
    return (
        f"{one['age']:>3}  {one['mode']:<28} {'simulated' if one['simulated'] else 'run':<9} "
        f"{one['steps_per_second']:8.4f} {one['bound']:8.4f} {one['share_of_bound']:6.1%} {one['wait_seconds']:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="that are counted, of each run")
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--seed", type=int, default=0, help="of the simulated lengths")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--simulate-only", action="store_true", help="no runs: with the durations that follow")
    for name, default in {
        "train-seconds": 20.0, "refit-seconds": 0.5, "token-seconds": 0.01, "sample-seconds": 0.0002,
        "median": 500.0, "sigma": 0.6,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, number in {"longest": 2048, "prompts": 32, "generations": 8, "engines": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args()
    args.ages = sorted({0, *args.ages})  # the bound is that of age 0
    printed = sys.stdout
    sys.stdout = sys.stderr  # what the runs say
    found = (
        iter(simulated_rows(args)) if args.simulate_only else real_rows(args.steps, args.ages, args.layouts, args.seed)
    )
    rows = []
    for one in found:  # a run takes minutes
        rows.append(one)
        print(line(one), flush=True)
    sys.stdout = printed
    print(json.dumps({"rows": rows}) if args.json else "\n".join([HEAD, *map(line, rows)]))


if __name__ == "__main__":
    main()
