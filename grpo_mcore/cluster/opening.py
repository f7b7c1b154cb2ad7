"""From the recipe's `cluster` section to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_mcore.cluster.local_cluster import LocalCluster
from grpo_mcore.rollout.workers import Cluster


def open_cluster(config: Any, log_dir: Path) -> Cluster:
    """The cluster that `config`, the recipe's `cluster`, asks for; workers print to `log_dir`/NAME.log."""
    if config.backend == "local":
        return LocalCluster(call_timeout_s=config.step_timeout_s)
    from grpo_mcore.cluster.ray_cluster import RayCluster  # Ray takes half a second to import

    return RayCluster(
        log_dir,
        env_vars=config.env_vars,
        start_timeout_s=config.start_timeout_s,
        call_timeout_s=config.step_timeout_s,
    )
