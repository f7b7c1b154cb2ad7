"""Workers and how to reach them: Ray actors, or objects in this process, behind one interface.

The interface is in `grpo_mcore.rollout.workers`. Nothing here knows what a worker computes. Every wait has a deadline
and a name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mcore.cluster.gather import BackgroundWork, call_all, gather
from grpo_mcore.cluster.local_cluster import LocalCluster
from grpo_mcore.rollout.workers import (
    Cluster,
    DeadlineExceeded,
    Future,
    NodeLost,
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
    is_fault,
    remote_call,
    remote_stream,
)

# Below `uv run` Ray would start each worker by uv, in a copy of the working directory, where relative paths lead
# elsewhere. Ray reads its variable when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

if TYPE_CHECKING:  # every worker process imports this file
    from grpo_mcore.recipe import ClusterConfig


def open_cluster(config: ClusterConfig, log_dir: Path) -> Cluster:
    """Return the cluster that the recipe's section `cluster` asks for. Workers print to `log_dir`/NAME.log."""
    os.environ.update({name: text for name, text in config.env_vars.items() if text is not None})
    if config.backend == "local":
        return LocalCluster(config.step_timeout_s, log_dir)
    from grpo_mcore.cluster.ray_cluster import RayCluster  # Ray takes half a second to import

    return RayCluster(
        log_dir,
        env_vars=list(config.env_vars),
        start_timeout_s=config.start_timeout_s,
        call_timeout_s=config.step_timeout_s,
    )
