"""Faults of a rehearsal: each breaks a worker or the driver at a time, or at the beginning of a call."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.cluster.virtual_cluster import VirtualCluster, VirtualWorker
from grpo_mcore.recipe import MasterConfig, num_engines, policy_pool
from grpo_mcore.tools.rehearse.world import World

Kind = Literal["kill", "hang", "pause", "slow", "node", "full disk", "SIGTERM", "SIGUSR1", "driver"]
"""kill: a worker's process ends. hang: it stands still for ever; pause: for a while. slow: it takes three times as
long. node: a machine is switched off, and replaced. driver: the driver's process ends."""

PHASES = {
    "generate": "generate_refs", "reward": "advance", "logprobs": "infer_logprobs", "train": "train",
    "teachers": "score", "refit": "stage_refit", "commit": "commit_refit", "checkpoint": "start_save",
    "receive": "receive", "critic": "train_critic",
}  # fmt: skip
"""Phase -> the call with which it begins on a worker."""


class DriverKilled(BaseException):
    """The driver's process has ended: nothing of it catches this."""


@dataclass(frozen=True)
class Fault:
    """A fault of `target`, a worker or a node, "" where there is none. It happens at `at_s` of the clock; with `phase`,
    that many seconds after the `count`-th call of it began, or with `step` after the target's call in that step."""

    kind: Kind
    target: str = ""
    at_s: float = 0.0
    phase: str = ""
    count: int = 1
    step: int | None = None
    for_s: float = 30.0

    def __str__(self) -> str:
        where = f" of {self.target}" if self.target else ""
        if not self.phase:
            return f"{self.kind}{where} at {self.at_s:.3f} s"
        which = f"in step {self.step}" if self.step is not None else f"number {self.count}"
        return f"{self.kind}{where} {self.at_s:.3f} s after {self.phase} {which} begins"


class Faults:
    """Lets faults happen, each once in all attempts of a run. `happened`, `times` and `steps` are those so far, with
    their times and steps."""

    def __init__(self, faults: Sequence[Fault], world: World) -> None:
        self.world, self.happened, self.times, self.steps = world, list[Fault](), list[float](), list[int]()
        self._left = list(faults)
        self._cluster: VirtualCluster | None = None
        self._stop = StopRequest(clock=world.clock)
        for fault in faults:
            if not fault.phase:
                world.clock.after(fault.at_s, lambda fault=fault: self._happen(fault))  # type: ignore[misc]
        self._seen = dict.fromkeys(PHASES.values(), 0)

    def attach(self, cluster: VirtualCluster) -> None:
        """Let what is to come happen on this cluster."""
        self._cluster = cluster

    def detach(self) -> None:
        """Note that an attempt has ended: until the next one nothing happens."""
        self._cluster = None

    def request(self) -> StopRequest:
        """Return the stop request of the next attempt. Signals go to it."""
        self._stop = StopRequest(clock=self.world.clock)
        return self._stop

    def observe(self, worker: VirtualWorker, method: str) -> None:
        """Look whether a fault waits for this call. To be called when one begins."""
        if method not in self._seen or not self._left:
            return
        self._seen[method] += 1
        for fault in self._left:
            if PHASES.get(fault.phase) != method:
                continue
            due = fault.step == self.world.step and fault.target == worker.name
            if due if fault.step is not None else fault.count == self._seen[method]:
                self.world.clock.after(fault.at_s, lambda fault=fault: self._happen(fault))  # type: ignore[misc]

    def _happen(self, fault: Fault) -> None:
        if fault not in self._left or self._cluster is None:
            return
        self._left.remove(fault)
        self.happened.append(fault)
        self.times.append(self.world.clock.now())
        self.steps.append(self.world.step)
        cluster, clock, world = self._cluster, self.world.clock, self.world
        match fault.kind:
            case "kill":
                cluster.kill(fault.target)
            case "hang":
                cluster.hang(fault.target)
            case "pause":
                cluster.hang(fault.target, fault.for_s)
            case "slow":
                world.slow[fault.target] = 3.0
            case "node":
                node = next(node for node in cluster.nodes if node.name == fault.target)
                cluster.kill_node(node)
                clock.after(fault.for_s, lambda: cluster.restore_node(node))
            case "full disk":
                world.full = True
                clock.after(fault.for_s, lambda: setattr(world, "full", False))
            case "SIGTERM":
                self._stop.ask("SIGTERM asked the run to stop", at_once=True)
            case "SIGUSR1":
                self._stop.ask("SIGUSR1 asked the run to stop")
            case "driver":
                raise DriverKilled


def named_fault(words: str) -> Fault:
    """Return the fault of `--kill engine-3@step2.generate`. Raises ValueError."""
    match = re.fullmatch(r"(\S+)@step(\d+)\.(\w+)", words)
    if match is None or match[3] not in PHASES:
        phases = ", ".join(PHASES)
        raise ValueError(f"--kill {words}: expected WORKER@stepN.PHASE, with one of the phases {phases}")
    return Fault("kill", match[1], phase=match[3], step=int(match[2]))


def recipe_faults(config: MasterConfig, seed: int, steps: int) -> list[Fault]:
    """Draw three faults of a recipe's run, at calls of its steps: its length in seconds is not known before."""
    draw = random.Random(seed)
    engines = num_engines(config, gpu=config.cluster.platform != "cpu")
    ranks = policy_pool(config).ranks
    faults = []
    for _ in range(3):
        kind: Kind = draw.choice(["kill", "kill", "slow", "pause", "full disk"])
        worker = f"engine-{draw.randrange(engines)}"
        phase, calls = draw.choice([("generate", engines), ("refit", engines), ("commit", engines), ("train", ranks)])
        count = draw.randrange(calls, calls * steps + 1)
        faults.append(Fault(kind, "" if kind == "full disk" else worker, draw.random(), phase, count))
    return faults
