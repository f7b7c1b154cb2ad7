"""The schedule of a run under a simulated clock. `async.py` uses it, with durations that are given or measured.

Engines, lengths and the policy are durations: an engine generates all its samples at once, and each token of each takes
`token` plus `sample` seconds for every sample beside it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from grpo_mcore.rollout import schedule as s


@dataclass(frozen=True)
class Durations:
    """Seconds; `length` draws the tokens of a sample."""

    train: float
    refit: float
    token: float
    sample: float
    length: Callable[[random.Random], float]


def lognormal(median: float, sigma: float, longest: int) -> Callable[[random.Random], float]:
    """Long-tailed, cut at `longest`."""
    return lambda draw: min(longest, draw.lognormvariate(0.0, sigma) * median)


def geometric(stop: float, longest: int) -> Callable[[random.Random], float]:
    """Draw lengths of a model that ends an answer after each token with probability `stop`; cut at `longest`."""
    return lambda draw: min(longest, 1 + int(math.log(1 - draw.random()) / math.log(1 - stop)))


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

    def stand_still(self, seconds: float) -> None:
        self.clock += seconds
        self.idle += seconds * len(self.engines)

    def pass_time(self, until: float) -> None:
        """Run until the clock shows `until`, or, with infinity, until a group has finished."""
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


def simulate(
    config: s.ScheduleConfig, generations: int, engines: int, durations: Durations, seed: int, *, pauses: bool = False
) -> dict[str, float]:
    """Seconds a step, of waiting for generation and of refits in it; share of the engines' time without work. `pauses`:
    engines stand still while the policy trains."""
    schedule, cluster = s.Schedule(config), Cluster([Engine(durations) for _ in range(engines)])
    draw, numbers = random.Random(seed), count()
    waited = refits = 0.0
    while not isinstance(command := schedule.next(), s.Finish):
        began = cluster.clock
        match command:
            case s.Refit(version):
                if config.refit_in_flight and not pauses:
                    cluster.pass_time(cluster.clock + durations.refit)
                else:
                    cluster.stand_still(durations.refit)
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
                if pauses:
                    cluster.stand_still(durations.train)
                else:
                    cluster.pass_time(cluster.clock + durations.train)
                schedule.record(s.Trained(step))
    per_step = {"seconds": cluster.clock, "waited": waited, "refits": refits}
    found = {name: spent / config.max_steps for name, spent in per_step.items()}
    return found | {"engines_idle": cluster.idle / cluster.clock / engines}
