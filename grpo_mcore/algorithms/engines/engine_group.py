"""The engines as the driver holds them, and the worker that keeps their samples in the object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_mcore.algorithms.engines.retries import Retries
from grpo_mcore.cluster import (
    Cluster,
    DeadlineExceeded,
    Future,
    ObjectStore,
    Parcel,
    Rendezvous,
    Worker,
    WorkerDied,
    WorkerFailed,
    call_all,
    gather,
)
from grpo_mcore.generation import Engine, EngineConfig, EngineFollower, EngineNode
from grpo_mcore.generation.chat.endpoint import Endpoint
from grpo_mcore.refit import EngineLayout, EngineNodes, RefitReceiver
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, TrajectoryRef

HEALTH_S = 60.0
"""How long a living engine may take to say so: one step of generation, at most."""


class Receiving:
    """In a refit over a wire one worker of a node receives for all engine ranks there. It is built before they are."""

    def __init__(self, *arguments: Any) -> None:
        self._receiver = RefitReceiver()
        super().__init__(*arguments)

    def open_receiver(self, link: dict[str, Any], plan: str, node: int) -> dict[str, Any]:
        return self._receiver.open_receiver(link, plan, node)

    def receive_bucket(self, index: int) -> dict[str, Any]:
        return self._receiver.receive_bucket(index)

    def close_receiver(self) -> None:
        self._receiver.close_receiver()

    def shutdown(self) -> None:
        self._receiver.close_receiver()
        super().shutdown()  # type: ignore[misc]


class FollowerWorker(Receiving, EngineFollower):
    """A further node of an engine."""


class EngineWorker(Receiving, Engine):
    """An engine whose samples stay in the cluster's store: the driver receives what describes them."""

    def __init__(self, config: EngineConfig, store: ObjectStore) -> None:
        """`store`: fetches the trajectories that requests continue."""
        super().__init__(config)
        self._store = store

    def generate_refs(self, requests: list[GenerationRequest], sampling: Sampling) -> Iterator[Parcel]:
        """`generate`, each trajectory as Parcel(TrajectoryRef without its ref, trajectory)."""
        for trajectory in self.generate(resolved(requests, self._store), sampling):
            yield Parcel(TrajectoryRef.of(trajectory, None), trajectory)


def node_of_engine(
    rendezvous: Rendezvous, config: EngineConfig, store: ObjectStore, token: str
) -> EngineWorker | FollowerWorker:
    """Of an engine over several nodes, what runs on number `rendezvous.rank` of them: the first is the engine."""
    place = EngineNode(rendezvous.rank, rendezvous.world_size, rendezvous.master_addr, rendezvous.master_port, token)
    config = replace(config, node=place)
    return FollowerWorker(config) if place.rank else EngineWorker(config, store)


def resolved(requests: Sequence[GenerationRequest], store: ObjectStore) -> list[GenerationRequest]:
    """The requests with the trajectories that they continue in place of references to these."""
    later = [request for request in requests if request.continues is not None]
    found = iter(store.fetch_many([request.continues for request in later]))
    return [r if r.continues is None else replace(r, continues=next(found)) for r in requests]


@dataclass
class EngineGroup:
    """All engines of a run. `weight_version`: of the last refit that every engine committed.

    An engine that dies is replaced: its successor starts at once, and is `lost` until a refit has brought it the
    policy's weights. Nothing is sent to it before. `start`: spawns engine number i and its followers; None: none can
    be replaced.
    """

    cluster: Cluster
    workers: Sequence[Worker]
    sleeps: bool  # the engines give their memory to the policy while it trains
    layout: EngineLayout = EngineLayout()  # of one engine, and how many there are
    weight_version: int = 0
    colocated: bool = True  # on the policy's devices; otherwise weights come over a wire
    pauses: bool = False  # what they generate stands still while the policy trains
    followers: Sequence[Sequence[Worker]] = ()  # of each engine, on its other nodes; empty: all lie on one
    paused: bool = False
    prepared_at: float = 0.0  # monotonic time of the last `prepare`
    endpoint: Endpoint | None = None  # in front of the engines, where the recipe wants one
    start: Callable[[int], Sequence[Worker]] | None = None
    start_timeout_s: float = 600.0
    restarts: Retries = field(default_factory=lambda: Retries(0, 0.0))
    lost: dict[int, str] = field(default_factory=dict)  # number of the engine -> why
    deaths: dict[int, WorkerDied] = field(default_factory=dict)  # that the endpoint has met, and nobody else yet
    restored: dict[int, int] = field(default_factory=dict)  # those that came back between two refits -> their version

    def hosts(self, number: int) -> list[Worker]:
        """An engine and its followers: one worker on each of its nodes, in the order of its ranks."""
        return [self.workers[number], *(self.followers[number] if self.followers else ())]

    def all_hosts(self) -> list[Worker]:
        return [host for number in range(len(self.workers)) for host in self.hosts(number)]

    def nodes(self) -> EngineNodes:
        """Where the engines lie; nodes in order of appearance, and the first worker on each as its host."""
        first: dict[str, tuple[int, Worker]] = {}
        engines = []
        for number in range(len(self.workers)):
            places = [(host.place().node, host) for host in self.hosts(number)]
            engines.append([first.setdefault(node, (len(first), host))[0] for node, host in places])
        return EngineNodes(engines, [host for _, host in first.values()])

    def prepare(self) -> None:
        """Makes every engine ready to generate with the committed weights, and lets what was paused go on."""
        versions = [(self.restored.get(number, self.weight_version),) for number in self.serving()]
        self.paused = False
        self._all("prepare", versions)
        self.prepared_at = time.monotonic()

    def go_on(self) -> None:
        """What was paused goes on. An engine that has died meanwhile has nothing, which its streams find."""
        with suppress(WorkerDied):
            self.prepare()

    def release(self) -> None:
        """Gives what the engines share with the policy to the policy: their memory, their turn."""
        if self.sleeps or self.pauses:
            with suppress(WorkerDied):  # it has nothing any more, and the next refit finds that it is dead
                self._all("release", [(self.pauses,)] * len(self.serving()))
            self.paused = self.pauses

    def close(self) -> None:
        """Ends the endpoint, where there is one; the engines end with their cluster."""
        if self.endpoint is not None:
            self.endpoint.close()

    def serving(self) -> list[int]:
        """The numbers of the engines that may be sent something."""
        return [number for number in range(len(self.workers)) if number not in self.lost]

    def reachable(self) -> list[int]:
        """`serving`, without those that did not answer the endpoint any more."""
        return [number for number in self.serving() if number not in self.deaths]

    @property
    def returning(self) -> bool:
        """A successor is on its way."""
        return bool(self.lost)

    def unanswered(self, engine: Worker, error: Exception) -> bool:
        """The endpoint, in a thread of its own, had this error from an engine. Whether that is gone."""
        if not isinstance(error, WorkerDied):
            return False
        self.deaths |= {number: error for number, worker in enumerate(self.workers) if worker is engine}
        return True

    def part(self, numbers: Sequence[int]) -> EngineGroup:
        """These engines as a group of its own, none of them lost: a refit goes to all of it."""
        workers = [self.workers[number] for number in numbers]
        followers = [self.followers[number] for number in numbers] if self.followers else ()
        layout = replace(self.layout, replicas=len(workers))
        return replace(self, workers=workers, followers=followers, layout=layout, lost={}, restored={})

    def refitted(self, part: EngineGroup, numbers: Sequence[int]) -> None:
        """A refit has brought the weights to `part`, which are these engines: they serve."""
        if len(numbers) == len(self.workers):
            self.weight_version, self.restored = part.weight_version, {}
        else:
            self.restored |= dict.fromkeys(numbers, part.weight_version)
        for number in numbers:
            self.lost.pop(number, None)

    def replace_dead(self, error: Exception, among: Sequence[int] | None = None) -> list[int]:
        """Replaces every engine (or of `among`) that does not answer or has lost a rank. Returns their numbers: empty,
        and `error` has another cause. Raises `error` where too many died in a row."""
        if self.start is None:
            return []
        patience_s = min(HEALTH_S, self.cluster.call_timeout_s)
        asked = {
            number: self.workers[number].call("health", timeout_s=patience_s, what="health")
            for number in (range(len(self.workers)) if among is None else among)
        }
        dead = [number for number, answer in asked.items() if not _answers(answer)]
        if dead:
            self.replace(dead, error)
        return dead

    def replace(self, numbers: Sequence[int], error: Exception) -> None:
        """Ends these engines, whatever they are doing, and starts their successors, after a wait. Raises `error` where
        too many died in a row, or none can be replaced."""
        if self.start is None:
            raise error
        self.restarts.failed(error)
        for number in numbers:
            self.lost[number] = str(error).partition("\n")[0]
            self.deaths.pop(number, None)
            self.cluster.stop(self.hosts(number))
            successor, *followers = self.start(number)
            self.workers = [successor if index == number else worker for index, worker in enumerate(self.workers)]
            self.followers = [followers if index == number else old for index, old in enumerate(self.followers)]

    def await_successors(self) -> None:
        """Until those that were started anew are up. Raises what a constructor raised, or DeadlineExceeded."""
        if self.lost:
            starting = [host.ready() for number in sorted(self.lost) for host in self.hosts(number)]
            gather(self.cluster, starting, timeout_s=self.start_timeout_s, what="start of an engine anew")

    def _all(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> None:
        """On those that serve."""
        workers = [self.workers[number] for number in self.serving()]
        what = f"{method} of the engines"
        call_all(self.cluster, workers, method, args_per_worker=args_per_worker, what=what)


def _answers(health: Future) -> bool:
    try:
        health.result()
    except (WorkerFailed, DeadlineExceeded):
        return False
    return True
