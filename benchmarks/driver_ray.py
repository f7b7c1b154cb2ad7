"""The driver under real Ray: processor time of a round of worker calls, of the calls of an environment, and of a
sample; and its memory of a sample.

Engines and environment answer at once, so samples come in batches of an engine's step. Processor time is that of the
driver's whole process, Ray's own threads included; that of a round, and of a sample, is the least of three passes. The
first row says how fast the machine is just now. Memory is what Python frees (tracemalloc) when the groups of a step
are given up, with prompts of half the tokens: no length is among the small numbers of which Python has one object
each.

    python -m benchmarks.driver_ray --json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.driver import exponent, least
from benchmarks.rollouts import Tokenizer
from grpo_mcore.base.processes import rare_collections
from grpo_mcore.cluster import Parcel, Worker, call_all, gather, remote_call
from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.driver.engines.engine_group import PARCELS, EngineGroup, EngineSlot
from grpo_mcore.driver.rollouts.rollouts import Rollouts
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.life import TurnLimits
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Sampling, Trajectory, TrajectoryRef, Turn

GENERATIONS, ENGINES, CALLED, CROWD, CALLS_A_PASS = 16, 2, 2, 64, 1024


class Engine:
    """Hands over samples of `max_new_tokens` tokens, `together` at a time."""

    def __init__(self, together: int) -> None:
        self.together = together

    def generate_refs(self, requests: list[GenerationRequest], sampling: Sampling, name: str) -> Iterator[list[Parcel]]:
        count = sampling.max_new_tokens
        said = Turn("assistant", torch.arange(count), torch.zeros(count), loss_mask=True, text="")
        for first in range(0, len(requests), self.together):
            samples = [
                Trajectory(one.uid, one.generation_index, (*one.turns, said), ((1, 0, 1),), "stop", False, 7)
                for one in requests[first : first + self.together]
            ]
            yield [Parcel(TrajectoryRef.of(sample, None), sample) for sample in samples]


class Environment:
    def advance(self, metadata: Any, *trajectories: Any) -> list[Outcome]:
        return [Outcome(1.0, None, "", 0.0) for _ in trajectories]

    def nothing(self) -> None:
        pass

    def processor_seconds(self) -> float:
        return time.process_time()


def us_a_call(cluster: RayCluster, worker: Worker, calls: int, rounds: int) -> dict[str, float]:
    """Return the microseconds of processor time of the driver and of the worker that one of `calls` calls takes, which
    start at one time."""
    theirs = remote_call(worker, Environment.processor_seconds)
    before, began = theirs().result(), time.process_time()
    for _ in range(rounds):
        pending = [remote_call(worker, Environment.advance)([{}], number) for number in range(calls)]
        gather(cluster, pending, timeout_s=60.0, purpose="the calls")
    seconds = {"driver": time.process_time() - began, "worker": theirs().result() - before}
    return {name: round(value / calls / rounds * 1e6, 1) for name, value in seconds.items()}


def run_step(rollouts: Rollouts, samples: int, tokens: int, step: int) -> list[Group]:
    message = {"role": "user", "content": "?", "token_ids": torch.arange(max(1, tokens // 2))}
    rows: Any = [
        {"uid": f"{step}-{n}", "task_name": "task", "length": 3, "extra_env_info": {}, "message_log": [message]}
        for n in range(samples // GENERATIONS)
    ]
    rollouts.dispatch(rows, Sampling(max_new_tokens=tokens), generations=GENERATIONS, step=step)
    return [rollouts.next_group() for _ in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--samples", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--together", nargs="+", type=int, default=[1, 8, PARCELS])
    parser.add_argument("--rounds", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 128 * 1024])
    options = parser.parse_args()

    def show(row: dict[str, Any]) -> None:
        print(json.dumps(row) if options.json else " ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    began = time.process_time()
    sum(range(10**7))
    show({"what": "machine", "ns_an_addition": round((time.process_time() - began) * 100, 2)})
    cluster = RayCluster(Path(tempfile.mkdtemp()), num_cpus=8, start_timeout_s=600.0)
    with cluster, rare_collections():

        def start() -> Any:
            return cluster.spawn("environment", Environment, cpus=0.1, concurrency=CALLED)

        environment = EnvironmentWorker(cluster, start, calls=CALLED, timeout_s=600.0)
        environment.worker.ready().result()
        call_all(cluster, [environment.worker] * 64, Environment.nothing)()

        def us_a_call_of_a_round(calls: int) -> float:
            rounds = -(-CALLS_A_PASS // calls)
            began = time.process_time()
            for _ in range(rounds):
                call_all(cluster, [environment.worker] * calls, Environment.nothing)()
            return (time.process_time() - began) / calls / rounds * 1e6

        costs = least(us_a_call_of_a_round, options.rounds)
        rounded = dict(zip(options.rounds, (round(cost, 1) for cost in costs), strict=True))
        show({"what": "rounds", "us_a_call": rounded, "exponent": round(exponent(options.rounds, costs), 3)})

        crowd = cluster.spawn("crowd", Environment, cpus=0.1, concurrency=CROWD)
        us_a_call(cluster, crowd, CROWD, 5)  # its threads start
        show({"what": "calls", "at_a_time": CROWD, "us_a_call": us_a_call(cluster, crowd, CROWD, 50)})

        def rollouts(together: int) -> Rollouts:
            engines = [
                cluster.spawn(f"engine-{together}-{number}", Engine, together, cpus=0.1, streams=8)
                for number in range(ENGINES)
            ]
            for engine in engines:
                engine.ready().result()
            limits = TurnLimits(1, 10**9, together=False)
            group = EngineGroup(cluster, list(map(EngineSlot, engines)), sleeps=False)
            made = Rollouts(group, {"task": environment}, Tokenizer(), limits, seed=0)
            run_step(made, 256, 8, 0)
            return made

        steps = itertools.count(1)

        def us_a_sample(samples: int, made: Rollouts) -> float:
            began = time.process_time()
            run_step(made, samples, 100, next(steps))
            return (time.process_time() - began) / samples * 1e6

        for samples_together in options.together:
            made = rollouts(samples_together)
            costs = least(partial(us_a_sample, made=made), options.samples)
            show({"what": "samples", "together": samples_together, "us_a_sample": [round(cost, 1) for cost in costs]})
        samples = 256
        for tokens in options.tokens:
            tracemalloc.start()
            groups = run_step(made, samples, tokens, next(steps))
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            del groups
            held -= tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            show({"what": "memory", "tokens": tokens, "bytes_a_sample": round(held / samples)})


if __name__ == "__main__":
    main()
