"""Workers and how to reach them: Ray actors, or objects in this process, behind one interface.

Nothing here knows what a worker computes. Every wait has a deadline and a name.
"""

from __future__ import annotations

from grpo_mcore.cluster.faults import is_fault
from grpo_mcore.cluster.gather import BackgroundWork, call_all, gather
from grpo_mcore.cluster.local_cluster import LocalCluster
from grpo_mcore.cluster.opening import open_cluster
from grpo_mcore.rollout.workers import (
    Cluster,
    DeadlineExceeded,
    Future,
    NotEnoughResources,
    ObjectLost,
    ObjectStore,
    Parcel,
    Place,
    Ref,
    Rendezvous,
    Stream,
    Worker,
    WorkerDied,
    WorkerFailed,
)

__all__ = [
    "Cluster",
    "DeadlineExceeded",
    "LocalCluster",
    "BackgroundWork",
    "NotEnoughResources",
    "ObjectLost",
    "ObjectStore",
    "Parcel",
    "Future",
    "Place",
    "Ref",
    "Rendezvous",
    "Stream",
    "Worker",
    "WorkerDied",
    "WorkerFailed",
    "call_all",
    "gather",
    "is_fault",
    "open_cluster",
]
