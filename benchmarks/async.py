"""How much time does generation ahead of training save? The schedule of a run under a simulated clock.

    python benchmarks/async.py [--json] [--train-seconds 20] [--engines 4] ...

Engines, lengths and the policy are durations: an engine generates all its samples at once, each token of each takes
`--token-seconds` plus `--sample-seconds` for every sample beside it; lengths are lognormal (long-tailed) and cut at
`--longest`. Take the durations from a run: timing/train, timing/refit and the engines' tokens per second.

bound: 1 / max(g, t), with g and t the seconds that generation and training take in the run of age 0, where they follow
each other. It leaves out that a later step's samples fill the engines while the longest of this one are awaited: shares
above 1 are that.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from grpo_mcore.rollout import schedule as s


@dataclass(frozen=True)
class Durations:
    """Seconds, and the distribution of lengths in tokens."""

    train: float
    refit: float
    token: float
    sample: float
    median: float
    sigma: float
    longest: int

    def length(self, draw: random.Random) -> float:
        return min(self.longest, draw.lognormvariate(0.0, self.sigma) * self.median)


@dataclass
class Engine:
    """Samples under way: [tokens left, uid]."""

    durations: Durations
    samples: list[list] = field(default_factory=list)

    @property
    def token_seconds(self) -> float:
        return self.durations.token + self.durations.sample * len(self.samples)

    def next_end(self) -> float:
        """Seconds until one of its samples ends, if nothing comes in between."""
        return min((left for left, _ in self.samples), default=float("inf")) * self.token_seconds

    def run(self, seconds: float) -> Iterator[str]:
        """The uids of samples that have ended by then."""
        if not self.samples:
            return
        tokens = seconds / self.token_seconds
        for sample in self.samples:
            sample[0] -= tokens
        yield from (uid for left, uid in self.samples if left <= 1e-9)
        self.samples = [sample for sample in self.samples if sample[0] > 1e-9]


@dataclass
class Cluster:
    """Engines on devices of their own, under one clock."""

    engines: list[Engine]
    missing: dict[str, int] = field(default_factory=dict)  # uid -> samples that are still generated
    finished: list[str] = field(default_factory=list)
    clock: float = 0.0
    idle: float = 0.0  # engine seconds without a sample

    def pass_time(self, until: float) -> None:
        """Until the clock shows `until`, or, with infinity, until a group has finished."""
        while self.clock < until and not (until == float("inf") and self.finished):
            step = min(until - self.clock, min(engine.next_end() for engine in self.engines))
            assert step < float("inf"), "nothing is generated, and somebody waits for it"
            self.clock += step
            for engine in self.engines:
                self.idle += 0.0 if engine.samples else step
                for uid in engine.run(step):
                    self.missing[uid] -= 1
                    if not self.missing[uid]:
                        self.finished.append(uid)

    def dispatch(self, uid: str, lengths: list[float]) -> None:
        engine = min(self.engines, key=lambda engine: len(engine.samples))
        engine.samples += [[length, uid] for length in lengths]
        self.missing[uid] = len(lengths)


def simulate(config: s.ScheduleConfig, generations: int, engines: int, durations: Durations, seed: int) -> dict:
    """Seconds of the whole run, of waiting for generation, of refits; idle shares."""
    schedule, cluster = s.Schedule(config), Cluster([Engine(durations) for _ in range(engines)])
    draw, numbers = random.Random(seed), count()
    waited = refits = 0.0
    while not isinstance(command := schedule.next(), s.Finish):
        began = cluster.clock
        match command:
            case s.Refit(version):
                cluster.clock += durations.refit  # the engines stand still for all of it
                refits += durations.refit
                schedule.record(s.Refitted(version))
            case s.Dispatch(prompts):
                uids = tuple(str(next(numbers)) for _ in range(prompts))
                for uid in uids:
                    cluster.dispatch(uid, [durations.length(draw) for _ in range(generations)])
                schedule.record(s.Dispatched(uids))
            case s.Await():
                cluster.pass_time(float("inf"))
                waited += cluster.clock - began
                schedule.record(s.GroupFinished(cluster.finished.pop(0)))
            case s.Train(step):
                cluster.pass_time(cluster.clock + durations.train)
                schedule.record(s.Trained(step))
    total = cluster.clock
    return {"seconds": total, "waited": waited, "refits": refits, "engines_idle": cluster.idle / total / engines}


def rows(args: argparse.Namespace) -> list[dict]:
    durations = Durations(
        args.train_seconds, args.refit_seconds, args.token_seconds, args.sample_seconds, args.median, args.sigma,
        args.longest,
    )  # fmt: skip
    found, bound = [], 0.0
    for age in args.ages:
        for mode in ("idle engines", "in flight") if age else ("idle engines",):
            config = s.ScheduleConfig(
                args.prompts, args.steps, max_trajectory_age=age, refit_in_flight=mode == "in flight"
            )
            run = simulate(config, args.generations, args.engines, durations, args.seed)
            per_step = {name: value / args.steps for name, value in run.items() if name != "engines_idle"}
            if not age:
                bound = 1 / max(per_step["waited"], durations.train)
            found.append(
                {
                    "age": age,
                    "mode": mode,
                    "steps_per_second": 1 / per_step["seconds"],
                    "bound": bound,
                    "share_of_bound": 1 / per_step["seconds"] / bound,
                    "wait_seconds": per_step["waited"],
                    "engines_idle": run["engines_idle"],
                    "simulated": True,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "train-seconds": 20.0, "refit-seconds": 0.5, "token-seconds": 0.01, "sample-seconds": 0.0002,
        "median": 500.0, "sigma": 0.6,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, number in {
        "longest": 2048, "prompts": 32, "generations": 8, "engines": 4, "steps": 100, "seed": 0
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.ages = sorted({0, *args.ages})  # the bound is that of age 0
    found = rows(args)
    if args.json:
        print(json.dumps({"rows": found, **vars(args)}))
        return
    print(f"{'age':>3}  {'refit with':<13} {'steps/s':>8} {'bound':>8} {'share':>6} {'waits s':>8} {'idle':>6}")
    for row in found:
        print(
            f"{row['age']:>3}  {row['mode']:<13} {row['steps_per_second']:8.4f} {row['bound']:8.4f} "
            f"{row['share_of_bound']:6.1%} {row['wait_seconds']:8.1f} {row['engines_idle']:6.1%}"
        )


if __name__ == "__main__":
    main()
