"""The engines as the driver sees them, and the worker that puts their samples into the object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

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
    remote_call,
)
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.generation import Engine, EngineConfig, EngineFollower, EngineNode
from grpo_mcore.generation.endpoint import ChatEngine, Endpoint
from grpo_mcore.layout import EngineLayout
from grpo_mcore.refit.engine_side.receiver import RefitReceiver
from grpo_mcore.refit.refit import EngineNodes, RefitEngine
from grpo_mcore.rollout.images import ImageReader
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, TrajectoryRef

P = ParamSpec("P")
R = TypeVar("R")

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


class EngineWorker(_RefitReceiverMixin, Engine, RefitEngine):
    """An engine whose samples stay in the cluster's store: the driver receives TrajectoryRefs."""

    def __init__(self, config: EngineConfig, store: ObjectStore) -> None:
        """`store`: object store of the trajectories that requests continue."""
        super().__init__(config)
        self._store = store

    def start_refit(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Open a refit, and on a node without policy ranks its receiver, if `manifest` has arguments for it."""
        transport = None
        if "receiver" in manifest:
            transport = self.open_receiver(*manifest["receiver"])["transport"]
            manifest = {**manifest, "transports": [address or transport for address in manifest["transports"]]}
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
    node = EngineNode(rendezvous.rank, rendezvous.world_size, rendezvous.master_addr, rendezvous.master_port, token)
    config = replace(config, node=node)
    return FollowerWorker(config) if node.rank else EngineWorker(config, store)


def with_trajectories(requests: Sequence[GenerationRequest], store: ObjectStore) -> list[GenerationRequest]:
    """Return the requests with the trajectories that they continue and the files of their images, in place of the
    references."""
    references = [request.continues for request in requests if request.continues is not None]
    trajectories = iter(store.fetch_many(references))
    images = {digest: reference for request in requests for digest, reference in request.images.items()}
    files = dict(zip(images, store.fetch_many(list(images.values())), strict=True))
    requests = [replace(r, images={name: files[name] for name in r.images}) if r.images else r for r in requests]
    return [r if r.continues is None else replace(r, continues=next(trajectories)) for r in requests]


@dataclass(eq=False)
class EngineSlot:
    """The place of one engine in its group: the engine, or the successor of one that died, and its state."""

    worker: Worker
    followers: Sequence[Worker] = ()  # its workers on further nodes
    version: int = 0  # of the weights that it committed last
    waits: bool = False  # it is lost, and its successor waits for the policy's memory
    paused: bool = False  # generation stands still now
    prepared_at: float = 0.0  # monotonic time of the last `prepare`

    @property
    def hosts(self) -> list[Worker]:
        """The engine and its followers: one worker on each of its nodes, in the order of its ranks."""
        return [self.worker, *self.followers]


@dataclass
class EngineGroup:
    """All engines of a run, each known by its number.

    An engine that dies is replaced. Its successor counts as `lost` and gets no requests until a refit has given it the
    policy's weights. It starts at once, unless the policy may hold the memory that it needs: then in the next refit.
    """

    cluster: Cluster
    slots: Sequence[EngineSlot]  # by number; a `subset` has the same objects
    sleeps: bool  # the engines give their memory to the policy while it trains
    layout: EngineLayout = EngineLayout()  # of one engine
    colocated: bool = True  # on the policy's devices; otherwise weights come over the network
    pauses: bool = False  # generation stands still while the policy trains
    images: ImageReader | None = None  # what prompts need of the model's images; None where they have none
    endpoint: Endpoint | None = None  # in front of the engines, if the recipe asks for one
    start: Callable[[int], Sequence[Worker]] | None = None  # spawns an engine and its followers; None: not replaceable
    start_timeout_s: float = 600.0
    restarts: Retries = field(default_factory=lambda: Retries(0, 0.0))
    lost: dict[int, str] = field(default_factory=dict)  # engine -> reason
    deaths: dict[int, WorkerDied] = field(default_factory=dict)  # that only the endpoint has noticed so far

    @property
    def workers(self) -> list[Worker]:
        return [slot.worker for slot in self.slots]

    @property
    def weight_version(self) -> int:
        """The weights that every engine has committed, or newer ones: engines that came back since may be ahead."""
        return min((slot.version for slot in self.slots), default=0)

    @property
    def paused(self) -> bool:
        """Whether generation stands still on an engine now."""
        return any(slot.paused for slot in self.slots)

    def all_hosts(self) -> list[Worker]:
        return [host for slot in self.slots for host in slot.hosts]

    def nodes(self) -> EngineNodes:
        """Return the nodes of the engines, in order of appearance, with the first worker on each as its host."""
        first: dict[str, tuple[int, Worker]] = {}
        engines = []
        for slot in self.slots:
            places = [(host.place().node, host) for host in slot.hosts]
            engines.append([first.setdefault(node, (len(first), host))[0] for node, host in places])
        return EngineNodes(engines, [host for _, host in first.values()])

    def prepare(self) -> None:
        """Make every engine ready to generate with the committed weights, and resume paused generation."""
        slots, purpose = [self.slots[number] for number in self.serving()], "prepare of the engines"
        for slot in slots:
            slot.paused = False
        calls = [remote_call(slot.worker, EngineWorker.prepare, purpose=purpose)(slot.version) for slot in slots]
        gather(self.cluster, calls, timeout_s=self.cluster.call_timeout_s, purpose=purpose)
        for slot in slots:
            slot.prepared_at = self.cluster.clock.now()

    def resume(self) -> None:
        """Resume paused generation."""
        with suppress(WorkerDied):  # a dead engine has nothing to resume; its streams will report it
            self.prepare()

    def release(self, *, keep_weights: bool = True) -> None:
        """Pause the engines, and give their memory to the policy, if they share devices. `keep_weights` False: a refit
        comes before they generate again."""
        if self.sleeps or self.pauses:
            with suppress(WorkerDied):  # a dead engine holds nothing; the next refit will find it dead
                self._all(EngineWorker.release)(self.pauses, keep_weights)
            for number in self.serving():
                self.slots[number].paused = self.pauses

    def start_profile(self) -> None:
        """Have every rank trace what it does with torch's profiler."""
        with suppress(WorkerDied):  # whoever waits for its samples will find it dead
            self._all(EngineWorker.start_profile)()

    def stop_profile(self, folder: Path) -> None:
        """End the traces, and write them to `folder`."""
        with suppress(WorkerDied):
            self._all(EngineWorker.stop_profile)(folder)

    def close(self) -> None:
        """Close the endpoint, if there is one; the engines end with their cluster."""
        if self.endpoint is not None:
            self.endpoint.close()

    def serving(self) -> list[int]:
        """Return the numbers of the engines that can take requests."""
        return [number for number in range(len(self.slots)) if number not in self.lost]

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
        return replace(self, slots=[self.slots[number] for number in numbers], lost={}, deaths={})

    def committed(self, version: int) -> None:
        """Record that every engine has committed the weights of `version`."""
        for slot in self.slots:
            slot.version = version

    def mark_refitted(self, numbers: Sequence[int]) -> None:
        """Record that these engines have the policy's weights and can take requests."""
        for number in numbers:
            self.lost.pop(number, None)

    def replace_dead(self, error: Exception, among: Sequence[int] | None = None) -> list[int]:
        """Replace every engine, or those of `among`, that does not answer or has lost a rank. Return their numbers; if
        there are none, `error` has another cause. Raises `error` if too many died in a row."""
        if self.start is None:
            return []
        dead = self.find_dead(among)
        if dead:
            self.replace(dead, error)
        return dead

    def find_dead(self, among: Sequence[int] | None = None) -> list[int]:
        """Return the numbers of the engines, or of those of `among`, that do not answer or have lost a rank."""
        timeout_s = min(HEALTH_S, self.cluster.call_timeout_s)
        checks = {
            number: remote_call(self.slots[number].worker, EngineWorker.health, timeout_s=timeout_s, purpose="health")()
            for number in (range(len(self.slots)) if among is None else among)
        }
        return [number for number, check in checks.items() if not _is_healthy(check)]

    def replace(self, numbers: Sequence[int], error: Exception) -> None:
        """End these engines, whatever they are doing, and start their successors, after a wait. Raises `error` if too
        many died in a row, or if engines cannot be replaced."""
        if self.start is None:
            raise error
        self.restarts.failed(error)
        for number in numbers:
            self.lost[number] = str(error).partition("\n")[0]
            self.deaths.pop(number, None)
            self.cluster.stop(self.slots[number].hosts)
            self.slots[number].waits, self.slots[number].paused = True, False
        if not self.sleeps:
            self._start_successors()

    def _start_successors(self) -> None:
        for number, slot in enumerate(self.slots):
            if slot.waits:
                assert self.start is not None, "replace has checked it"
                slot.worker, *slot.followers = self.start(number)
                slot.waits = False

    def await_successors(self) -> None:
        """Wait until the successors of lost engines are up; the policy must have given its memory away. Raises what a
        constructor raised, or DeadlineExceeded."""
        self._start_successors()
        if self.lost:
            starting = [host.ready() for number in sorted(self.lost) for host in self.slots[number].hosts]
            gather(self.cluster, starting, timeout_s=self.start_timeout_s, purpose="restart of an engine")

    def _all(self, method: Callable[Concatenate[EngineWorker, P], R]) -> Callable[P, list[R]]:
        """Return a function that calls a method of the engines that can take requests."""
        workers = [self.slots[number].worker for number in self.serving()]
        return call_all(self.cluster, workers, method, purpose=f"{method.__name__} of the engines")


def _is_healthy(check: Future) -> bool:
    try:
        check.result()
    except (WorkerFailed, DeadlineExceeded):
        return False
    return True
