"""Seconds in which a step's samples are scored by a judge that is slow and fails, beside the bound that its concurrency
sets: seconds of one call x samples / concurrency.

The judge is an HTTP server on this machine: it answers after a time, and a share of its answers is 503. The environment
is `rules` in a worker of Ray, asked by the queue of a run; no model takes part.

    python -m benchmarks.scoring --samples-per-slot 64 --concurrency 8 32

The bound has no repetitions. A sample that fails twice at the end takes 2.5 s more (attempts and backoff), whatever the
concurrency is: with few samples for each slot, that is a large part of the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web

from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.driver.record.run_report import scoring_notes
from grpo_mcore.driver.rollouts.scoring import BatchLimits, EnvironmentWorker, EnvQueue
from grpo_mcore.environments.rules.rule_environment import RuleEnvironment
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.life import OpenGroup, OpenSample, Rules, TurnLimits
from grpo_mcore.rollout.trajectory import Sampling, Score, Trajectory, TrajectoryRef, Turn

GENERATIONS = 16


async def judge(response: str, url: str) -> float:
    """Ask the judge at the row's `url`, over a connection of its own."""
    async with aiohttp.ClientSession() as session, session.post(url, data=response) as reply:
        reply.raise_for_status()
        return float(await reply.text())


def start_judge(seconds: float, fails: float) -> str:
    """Start the HTTP server in a thread. Return its URL."""
    draw = random.Random(0)
    addresses: list[str] = []
    ready = threading.Event()

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        return web.Response(status=503) if draw.random() < fails else web.Response(text="0.5")

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    ready.wait()
    return addresses[0]


def scored(cluster: RayCluster, url: str, samples: int, keys: dict[str, Any]) -> tuple[float, list[Group]]:
    """Return the seconds from the first request to the last reward, and the groups."""
    section = {"components": {"judge": {"type": "function", "path": "benchmarks.scoring:judge", **keys}}}
    calls, size = RuleEnvironment.call_limits(section)
    worker = EnvironmentWorker(
        cluster,
        lambda: cluster.spawn("environment-rules", RuleEnvironment, section, cpus=0.1, concurrency=calls),
        calls=calls,
        timeout_s=600.0,
        batch=BatchLimits(size),
    )
    worker.worker.ready().result()
    scores: dict[str, list[Score]] = {}

    def resume(sample: OpenSample, outcome: Score) -> None:
        sample.drop()
        scores.setdefault(sample.group.uid, []).append(outcome)

    queue = EnvQueue(worker, resume)
    turn = Turn("assistant", torch.arange(3), torch.zeros(3), loss_mask=True, text="7")
    refs: dict[str, list[TrajectoryRef]] = {}
    turns: list[OpenSample] = []
    for first in range(0, samples, GENERATIONS):
        uid = f"p{first // GENERATIONS}"
        row: Any = {"uid": uid, "length": 0, "message_log": [], "extra_env_info": {"url": url}}
        group = OpenGroup(row, 1, Sampling(8), Rules(TurnLimits(1, 99), 0), min(GENERATIONS, samples - first))
        for index in range(group.size):
            trajectory = Trajectory(uid, index, (turn,), ((1, 0, 3),), "stop", False)
            ref = TrajectoryRef.of(trajectory, cluster.store.put(trajectory))
            refs.setdefault(uid, []).append(ref)
            turns.append(OpenSample(group, index))
            turns[-1].wait = turns[-1].life.send(ref)
    began = time.perf_counter()
    for sample in turns:
        queue.add([sample])
    while sum(map(len, scores.values())) < samples:
        queue.send()
        if not queue.awaited():
            queue.send(hold=False)
        for ready in cluster.ready(queue.awaited(), 600.0, "rewards"):
            queue.take(ready)
    seconds = time.perf_counter() - began
    worker.stop()
    prompt: Any = {"uid": "p"}
    return seconds, [Group(prompt, tuple(refs[uid]), tuple(scores[uid])) for uid in refs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples-per-slot", type=int, default=64, help="samples: times the concurrency")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one call")
    parser.add_argument("--fails", type=float, default=0.05, help="share of the calls that fail")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--retries", type=int, default=3)
    args = parser.parse_args()
    url = start_judge(args.seconds, args.fails)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        cluster = RayCluster(Path(folder), num_cpus=2)
        try:
            for concurrency in args.concurrency:
                keys = {"concurrency": concurrency, "retries": args.retries}
                seconds, groups = scored(cluster, url, args.samples_per_slot * concurrency, keys)
                bound = args.seconds * args.samples_per_slot
                worst = max(worst, seconds / bound)
                lost = sum(score.reward is None for group in groups for score in group.scores)
                row = {"concurrency": concurrency, "seconds": seconds, "bound": bound, "ratio": seconds / bound}
                print(json.dumps({name: round(value, 3) for name, value in row.items()} | {"lost": lost}))
                print("\n".join(scoring_notes(groups)))
        finally:
            cluster.shutdown()
    return int(worst > 1.2)


if __name__ == "__main__":
    sys.exit(main())
