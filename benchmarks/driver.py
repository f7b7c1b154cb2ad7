"""Microseconds of the driver's processor time, for growing runs: of the schedule an event, of the rollouts a sample;
and the bytes that it reads of a checkpoint.

Each cost is the least of three passes through all sizes, as whatever else the machine does only adds to it; a small
step of rollouts runs several times in each. The schedule and the rollouts are the real classes; engines and
environments answer at once. Groups finish in an order drawn at random. A fitted exponent is that of the total: 1.0
means that the cost of one event or sample does not grow with the groups in flight, the samples or the engines. What
Ray costs is not in these figures. Of a checkpoint the driver gets the ranks' file with its digest; it completes the
checkpoint, and checks it as a resume does.

    python -m benchmarks.driver --json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.rollouts import Answer, Case, Stream, World
from grpo_mcore.base.files import digest_of, leave_digests
from grpo_mcore.base.processes import rare_collections
from grpo_mcore.cluster import Parcel
from grpo_mcore.driver.checkpoints.checkpoint_files import INFO, POLICY, damage, write_digests
from grpo_mcore.driver.engines.engine_group import EngineSlot
from grpo_mcore.rollout import schedule as s
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, TrajectoryRef

GENERATIONS, PASSES, SAMPLES_A_PASS = 16, 3, 8192


def schedule_us(groups: int, age: int, order: s.GroupOrder = "in_order") -> float:
    """Return microseconds an event, with this many groups in flight."""
    per_step = max(1, groups // (1 + age))
    config = s.ScheduleConfig(per_step, max_steps=10**6, max_trajectory_age=age, group_order=order)
    schedule = s.Schedule(config)
    open_groups: list[str] = []
    draw = random.Random(groups)
    taken = events = 0
    began = time.process_time()
    while events < 3 * groups:
        event: s.Event
        match schedule.next():
            case s.Refit(version):
                event = s.Refitted(version)
            case s.Dispatch(prompts):
                uids = tuple(str(taken + number) for number in range(prompts))
                taken += prompts
                open_groups.extend(uids)
                event = s.Dispatched(uids)
            case s.Await():
                place = draw.randrange(len(open_groups))
                open_groups[place], open_groups[-1] = open_groups[-1], open_groups[place]
                event = s.GroupFinished(open_groups.pop())
            case s.Train(step):
                event = s.Trained(step)
            case other:
                raise AssertionError(f"{other}: neither validation nor checkpoint is configured")
        schedule.record(event)
        events += 1
    return (time.process_time() - began) / events * 1e6


class InstantEngine:
    """All samples of a call are there when it is made."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stream(
        self, method: str, requests: Sequence[GenerationRequest], sampling: Sampling, name: str, purpose: str
    ) -> Stream:
        stream = Stream(self.name, purpose, 0)
        for request in requests:
            sample = TrajectoryRef(request.uid, request.generation_index, 9, 3, 8, 1, False, "stop", None, 1)
            stream.parcels.append(Parcel(sample, 1))
        return stream


class InstantEnvironment:
    name = "tool"

    def __init__(self, world: World) -> None:
        self.world = world

    def call(self, method: str, metadata: Any, *turns: int, timeout_s: float, purpose: str) -> Answer:
        answer = self.world.answer_of(turns)
        answer.is_ready = True
        return answer


class InstantWorld(World):
    def __init__(self, engines: int) -> None:
        super().__init__(Case(1, 0.0), 0, together=False, engines=engines)
        self.engines.slots = [EngineSlot(InstantEngine(f"engine-{number}")) for number in range(engines)]  # type: ignore[arg-type]

    def environment(self) -> Any:
        return InstantEnvironment(self)

    def ready(self, things: Any, timeout_s: float, purpose: str, watch: Any = None, *, patient: bool = False) -> Any:
        return things


def rollouts_us(samples: int, engines: int) -> float:
    """Return microseconds a sample, with this many in flight."""
    message = {"role": "user", "content": "?", "token_ids": torch.tensor([1, 2, 3])}
    rows: Any = [
        {"uid": str(n), "task_name": "task", "length": 3, "extra_env_info": {}, "message_log": [message]}
        for n in range(samples // GENERATIONS)
    ]
    world, steps = InstantWorld(engines), -(-SAMPLES_A_PASS // samples)
    began = time.process_time()
    for step in range(1, steps + 1):
        world.rollouts.dispatch(rows, Sampling(max_new_tokens=8), generations=GENERATIONS, step=step)
        for _ in rows:
            world.rollouts.next_group()
    return (time.process_time() - began) / samples / steps * 1e6


def least(cost: Callable[[int], float], sizes: Sequence[int]) -> list[float]:
    """Return the least cost of each size."""
    passes = [[cost(size) for size in sizes] for _ in range(PASSES)]
    return [min(costs) for costs in zip(*passes, strict=True)]


def checkpoint_bytes_read(size: int) -> int:
    """Return the bytes that the driver reads to save, and to resume from, a checkpoint with so many bytes of weights.
    The driver's own files are among them."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "step_1")
        (folder / POLICY).mkdir(parents=True)
        (folder / POLICY / "weights").write_bytes(bytes(size))
        leave_digests(folder / POLICY, "rank_0", ["weights"])
        info = json.dumps({"save_state": {"current_step": 1}}).encode()
        (folder / INFO).write_bytes(info)
        before = _bytes_read()
        write_digests(folder, {INFO: digest_of(info)})
        if (problem := damage(folder, whole=False)) is not None:
            raise RuntimeError(f"the checkpoint just written is damaged: {problem}")
        return _bytes_read() - before


def _bytes_read() -> int:
    """Return what this process has read so far, from whatever file."""
    first, _, _ = Path("/proc/self/io").read_text().partition("\n")
    return int(first.removeprefix("rchar:"))


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the exponent of the total cost, size * cost of one, fitted to the logarithms by least squares."""
    x = [math.log(size) for size in sizes]
    y = [math.log(size * cost) for size, cost in zip(sizes, costs, strict=True)]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--samples", nargs="+", type=int, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--engines", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--groups", nargs="+", type=int, default=[256, 1024, 4096, 10000])
    parser.add_argument("--ages", nargs="+", type=int, default=[0, 1, 4])
    options = parser.parse_args()

    def show(row: dict[str, Any]) -> None:
        print(json.dumps(row) if options.json else " ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    def fitted(sizes: Sequence[int], costs: Sequence[float], unit: str) -> dict[str, Any]:
        us = dict(zip(sizes, (round(cost, 1) for cost in costs), strict=True))
        return {unit: us, "exponent": round(exponent(sizes, costs), 3)}

    for order, age in itertools.product(get_args(s.GroupOrder), options.ages):
        costs = least(partial(schedule_us, age=age, order=order), options.groups)
        show({"what": "schedule", "order": order, "age": age, **fitted(options.groups, costs, "us_an_event")})
    with rare_collections():  # as in a run under Ray
        by_engines = {
            engines: least(partial(rollouts_us, engines=engines), options.samples) for engines in options.engines
        }
    for engines, costs in by_engines.items():
        show({"what": "samples", "engines": engines, **fitted(options.samples, costs, "us_a_sample")})
    for samples, costs in zip(options.samples, zip(*by_engines.values(), strict=True), strict=True):
        show({"what": "engines", "samples": samples, **fitted(options.engines, costs, "us_a_sample")})
    for size in (2**20, 2**28):
        show({"what": "checkpoint", "bytes_of_ranks": size, "bytes_read": checkpoint_bytes_read(size)})


if __name__ == "__main__":
    main()
