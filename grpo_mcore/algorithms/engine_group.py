"""The engines as the driver holds them, and the worker that keeps their samples in the object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_mcore.cluster import Cluster, ObjectStore, Parcel, Worker, call_all
from grpo_mcore.generation import Engine, EngineConfig
from grpo_mcore.refit import EngineLayout, RefitReceiver
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, TrajectoryRef


class EngineWorker(Engine):
    """An engine whose samples stay in the cluster's store: the driver receives what describes them. In a refit over a
    wire one engine of a node receives for all of them."""

    def __init__(self, config: EngineConfig, store: ObjectStore) -> None:
        """`store`: fetches the trajectories that requests continue."""
        super().__init__(config)
        self._store = store
        self._receiver = RefitReceiver()

    def open_receiver(self, link: dict[str, Any], plan: str, node: int) -> dict[str, Any]:
        return self._receiver.open_receiver(link, plan, node)

    def receive_bucket(self, index: int) -> dict[str, Any]:
        return self._receiver.receive_bucket(index)

    def close_receiver(self) -> None:
        self._receiver.close_receiver()

    def shutdown(self) -> None:
        self._receiver.close_receiver()
        super().shutdown()

    def generate_refs(self, requests: list[GenerationRequest], sampling: Sampling) -> Iterator[Parcel]:
        """`generate`, each trajectory as Parcel(TrajectoryRef without its ref, trajectory)."""
        for trajectory in self.generate(resolved(requests, self._store), sampling):
            yield Parcel(TrajectoryRef.of(trajectory, None), trajectory)


def resolved(requests: Sequence[GenerationRequest], store: ObjectStore) -> list[GenerationRequest]:
    """The requests with the trajectories that they continue in place of references to these."""
    later = [request for request in requests if request.continues is not None]
    found = iter(store.fetch_many([request.continues for request in later]))
    return [r if r.continues is None else replace(r, continues=next(found)) for r in requests]


@dataclass
class EngineGroup:
    """All engines of a run. `weight_version`: of the last refit that every engine committed."""

    cluster: Cluster
    workers: Sequence[Worker]
    sleeps: bool  # the engines give their memory to the policy while it trains
    layout: EngineLayout = EngineLayout()  # of one engine, and how many there are
    weight_version: int = 0
    colocated: bool = True  # on the policy's devices; otherwise weights come over a wire
    pauses: bool = False  # what they generate stands still while the policy trains
    paused: bool = False

    def by_node(self) -> list[list[Worker]]:
        """The engines of each node, in order of appearance."""
        nodes: dict[str, list[Worker]] = {}
        for worker in self.workers:
            nodes.setdefault(worker.place().node, []).append(worker)
        return list(nodes.values())

    def prepare(self) -> None:
        """Makes every engine ready to generate with the committed weights, and lets what was paused go on."""
        self._all("prepare", self.weight_version)
        self.paused = False

    def release(self) -> None:
        """Gives what the engines share with the policy to the policy: their memory, their turn."""
        if self.sleeps or self.pauses:
            self._all("release", self.pauses)
            self.paused = self.pauses

    def _all(self, method: str, *args: Any) -> list[Any]:
        return call_all(self.cluster, self.workers, method, *args, what=f"{method} of the engines")
