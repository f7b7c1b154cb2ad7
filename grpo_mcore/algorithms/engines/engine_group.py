"""The engines as the driver sees them, and the worker that puts their samples into the object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from grpo_mcore.generation.chat.endpoint import ChatEngine, Endpoint
from grpo_mcore.layout import EngineLayout
from grpo_mcore.refit.receiver import RefitReceiver
from grpo_mcore.refit.refit import EngineNodes
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, TrajectoryRef

PARCELS = 32
"""Maximum number of samples that are one object in the store: whoever needs one of them fetches all."""
HEALTH_S = 60.0
"""Seconds in which a living engine answers a health check: one step of generation at most."""


class _RefitReceiverMixin:
    """Receives the weights for all engine ranks of a node, in a refit over the network. The receiver is built before
    the ranks are."""

    def __init__(self, *arguments: Any) -> None:
        self._receiver = RefitReceiver()
        super().__init__(*arguments)

    def open_receiver(self, *arguments: Any) -> dict[str, Any]:
        return self._receiver.open_receiver(*arguments)

    def receive_refit(self) -> dict[str, Any]:
        return self._receiver.receive_refit()

    def close_receiver(self) -> None:
        self._receiver.close_receiver()

    def shutdown(self) -> None:
        self._receiver.close_receiver()
        super().shutdown()  # type: ignore[misc]


class FollowerWorker(_RefitReceiverMixin, EngineFollower):
    """The part of an engine on one of its further nodes."""


class EngineWorker(_RefitReceiverMixin, Engine):
    """An engine whose samples stay in the cluster's store: the driver receives TrajectoryRefs."""

    def __init__(self, config: EngineConfig, store: ObjectStore) -> None:
        """`store`: to fetch the trajectories that requests continue."""
        super().__init__(config)
        self._store = store

    def start_refit(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Open a refit, and on a node without policy ranks its receiver, if `manifest` has arguments for it."""
        transport = None
        if "receiver" in manifest:
            transport = self.open_receiver(*manifest["receiver"])["transport"]
            manifest = {**manifest, "transports": [one or transport for one in manifest["transports"]]}
        self._receives = transport is not None
        return super().start_refit(manifest) | {"transport": transport}

    def stage_refit(self) -> dict[str, Any]:
        """Receive what comes for this node, while its ranks take it; wait for them."""
        if self._receives:
            self.receive_refit()
        return super().stage_refit()

    def generate_refs(
        self, requests: list[GenerationRequest], sampling: Sampling, name: str | None = None
    ) -> Iterator[list[Parcel]]:
        """Run `generate_together`, and yield its trajectories as Parcel(TrajectoryRef without its ref, trajectory)."""
        for samples in self.generate_together(with_trajectories(requests, self._store), sampling, name):
            for first in range(0, len(samples), PARCELS):
                few = samples[first : first + PARCELS]
                yield [Parcel(TrajectoryRef.of(trajectory, None), trajectory) for trajectory in few]

    def join(self, name: str, requests: list[GenerationRequest], sampling: Sampling) -> bool:
        return super().join(name, with_trajectories(requests, self._store), sampling)


def node_of_engine(
    rendezvous: Rendezvous, config: EngineConfig, store: ObjectStore, token: str
) -> EngineWorker | FollowerWorker:
    """Build the part of an engine over several nodes that runs on node `rendezvous.rank`: the engine on the first one,
    a follower on the others."""
    place = EngineNode(rendezvous.rank, rendezvous.world_size, rendezvous.master_addr, rendezvous.master_port, token)
    config = replace(config, node=place)
    return FollowerWorker(config) if place.rank else EngineWorker(config, store)


def with_trajectories(requests: Sequence[GenerationRequest], store: ObjectStore) -> list[GenerationRequest]:
    """Return the requests with the trajectories that they continue, in place of the references."""
    references = [request.continues for request in requests if request.continues is not None]
    trajectories = iter(store.fetch_many(references))
    return [r if r.continues is None else replace(r, continues=next(trajectories)) for r in requests]


@dataclass
class EngineGroup:
    """All engines of a run, each known by its number.

    An engine that dies is replaced. Its successor counts as `lost` and gets no requests until a refit has given it the
    policy's weights. It starts at once, unless the policy may hold the memory that it needs: then in the next refit.
    """

    cluster: Cluster
    workers: Sequence[Worker]
    sleeps: bool  # the engines give their memory to the policy while it trains
    layout: EngineLayout = EngineLayout()  # of one engine
    weight_version: int = 0  # of the last refit that every engine committed
    colocated: bool = True  # on the policy's devices; otherwise weights come over the network
    pauses: bool = False  # generation stands still while the policy trains
    followers: Sequence[Sequence[Worker]] = ()  # by engine: its workers on further nodes; empty: each has one node
    paused: bool = False  # generation stands still now
    prepared_at: float = 0.0  # monotonic time of the last `prepare`
    endpoint: Endpoint | None = None  # in front of the engines, if the recipe asks for one
    start: Callable[[int], Sequence[Worker]] | None = None  # spawns an engine and its followers; None: not replaceable
    start_timeout_s: float = 600.0
    restarts: Retries = field(default_factory=lambda: Retries(0, 0.0))
    lost: dict[int, str] = field(default_factory=dict)  # engine -> reason
    deaths: dict[int, WorkerDied] = field(default_factory=dict)  # that only the endpoint has noticed so far
    to_start: set[int] = field(default_factory=set)  # lost engines whose successors wait for the policy's memory
    restored: dict[int, int] = field(default_factory=dict)  # engine that came back since the last full refit -> version

    def hosts(self, number: int) -> list[Worker]:
        """Return the engine and its followers: one worker on each of its nodes, in the order of its ranks."""
        return [self.workers[number], *(self.followers[number] if self.followers else ())]

    def all_hosts(self) -> list[Worker]:
        return [host for number in range(len(self.workers)) for host in self.hosts(number)]

    def nodes(self) -> EngineNodes:
        """Return the nodes of the engines, in order of appearance, with the first worker on each as its host."""
        first: dict[str, tuple[int, Worker]] = {}
        engines = []
        for number in range(len(self.workers)):
            places = [(host.place().node, host) for host in self.hosts(number)]
            engines.append([first.setdefault(node, (len(first), host))[0] for node, host in places])
        return EngineNodes(engines, [host for _, host in first.values()])

    def prepare(self) -> None:
        """Make every engine ready to generate with the committed weights, and resume paused generation."""
        versions = [(self.restored.get(number, self.weight_version),) for number in self.serving()]
        self.paused = False
        self._all("prepare", versions)
        self.prepared_at = time.monotonic()

    def resume(self) -> None:
        """Resume paused generation."""
        with suppress(WorkerDied):  # a dead engine has nothing to resume; its streams will report it
            self.prepare()

    def release(self) -> None:
        """Pause the engines, and give their memory to the policy, if they share devices."""
        if self.sleeps or self.pauses:
            with suppress(WorkerDied):  # a dead engine holds nothing; the next refit will find it dead
                self._all("release", [(self.pauses,)] * len(self.serving()))
            self.paused = self.pauses

    def start_profile(self) -> None:
        """Have every rank trace what it does with torch's profiler."""
        with suppress(WorkerDied):  # whoever waits for its samples will find it dead
            self._all("start_profile", [()] * len(self.serving()))

    def stop_profile(self, folder: Path) -> None:
        """End the traces, and write them to `folder`."""
        with suppress(WorkerDied):
            self._all("stop_profile", [(folder,)] * len(self.serving()))

    def close(self) -> None:
        """Close the endpoint, if there is one; the engines end with their cluster."""
        if self.endpoint is not None:
            self.endpoint.close()

    def serving(self) -> list[int]:
        """Return the numbers of the engines that can take requests."""
        return [number for number in range(len(self.workers)) if number not in self.lost]

    def reachable(self) -> list[int]:
        """Return `serving` without the engines that the endpoint has found dead."""
        return [number for number in self.serving() if number not in self.deaths]

    @property
    def returning(self) -> bool:
        """Whether an engine is being replaced."""
        return bool(self.lost)

    def unanswered(self, engine: ChatEngine, error: Exception) -> bool:
        """Record an error of an engine that the endpoint, in its own thread, got. Return whether the engine is dead."""
        if not isinstance(error, WorkerDied):
            return False
        self.deaths |= {number: error for number, worker in enumerate(self.workers) if worker is engine}
        return True

    def subset(self, numbers: Sequence[int]) -> EngineGroup:
        """Return a group of these engines, none of them lost, to refit all of it."""
        workers = [self.workers[number] for number in numbers]
        followers = [self.followers[number] for number in numbers] if self.followers else ()
        return replace(self, workers=workers, followers=followers, lost={}, to_start=set(), restored={})

    def mark_refitted(self, numbers: Sequence[int], version: int) -> None:
        """Record that these engines have the weights of `version`, generate again and can take requests. A refit works
        on a `subset`, whose state is its own."""
        if len(numbers) == len(self.workers):
            self.weight_version, self.restored = version, {}
            self.paused, self.prepared_at = False, time.monotonic()
        else:
            self.restored |= dict.fromkeys(numbers, version)
        for number in numbers:
            self.lost.pop(number, None)

    def replace_dead(self, error: Exception, among: Sequence[int] | None = None) -> list[int]:
        """Replace every engine, or those of `among`, that does not answer or has lost a rank. Return their numbers; if
        there are none, `error` has another cause. Raises `error` if too many died in a row."""
        if self.start is None:
            return []
        timeout_s = min(HEALTH_S, self.cluster.call_timeout_s)
        checks = {
            number: self.workers[number].call("health", timeout_s=timeout_s, what="health")
            for number in (range(len(self.workers)) if among is None else among)
        }
        dead = [number for number, check in checks.items() if not _is_healthy(check)]
        if dead:
            self.replace(dead, error)
        return dead

    def replace(self, numbers: Sequence[int], error: Exception) -> None:
        """End these engines, whatever they are doing, and start their successors, after a wait. Raises `error` if too
        many died in a row, or if engines cannot be replaced."""
        if self.start is None:
            raise error
        self.restarts.failed(error)
        for number in numbers:
            self.lost[number] = str(error).partition("\n")[0]
            self.deaths.pop(number, None)
            self.cluster.stop(self.hosts(number))
            self.to_start.add(number)
        if not self.sleeps:
            self._start_successors()

    def _start_successors(self) -> None:
        for number in sorted(self.to_start):
            assert self.start is not None, "replace has checked it"
            successor, *followers = self.start(number)
            self.workers = [successor if index == number else worker for index, worker in enumerate(self.workers)]
            self.followers = [followers if index == number else old for index, old in enumerate(self.followers)]
        self.to_start.clear()

    def await_successors(self) -> None:
        """Wait until the successors of lost engines are up; the policy must have given its memory away. Raises what a
        constructor raised, or DeadlineExceeded."""
        self._start_successors()
        if self.lost:
            starting = [host.ready() for number in sorted(self.lost) for host in self.hosts(number)]
            gather(self.cluster, starting, timeout_s=self.start_timeout_s, what="restart of an engine")

    def _all(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> None:
        """Call a method of the engines that can take requests."""
        workers = [self.workers[number] for number in self.serving()]
        what = f"{method} of the engines"
        call_all(self.cluster, workers, method, args_per_worker=args_per_worker, what=what)


def _is_healthy(check: Future) -> bool:
    try:
        check.result()
    except (WorkerFailed, DeadlineExceeded):
        return False
    return True
