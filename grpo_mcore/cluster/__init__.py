"""Workers and how to reach them: Ray actors, or objects in this process, behind one interface.

Nothing here knows what a worker computes. Every wait has a deadline and a name.
"""

from __future__ import annotations

from grpo_mcore.cluster.faults import is_fault
from grpo_mcore.cluster.gather import Meanwhile, call_all, gather
from grpo_mcore.cluster.interface import (
    Cluster,
    DeadlineExceeded,
    NotEnoughResources,
    ObjectLost,
    ObjectStore,
    Parcel,
    Pending,
    Place,
    Ref,
    Rendezvous,
    Stream,
    Worker,
    WorkerDied,
    WorkerFailed,
)
from grpo_mcore.cluster.local_cluster import LocalCluster
from grpo_mcore.cluster.opening import open_cluster

__all__ = [
    "Cluster",
    "DeadlineExceeded",
    "LocalCluster",
    "Meanwhile",
    "NotEnoughResources",
    "ObjectLost",
    "ObjectStore",
    "Parcel",
    "Pending",
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
