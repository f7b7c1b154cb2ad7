"""CPU or GPU: the one place that decides."""

from __future__ import annotations

import os
from typing import Any

from grpo_mcore.rollout.workers import NotEnoughResources


def runs_on_gpu(config: Any) -> bool:
    """Where policy and engines run; `config`: the recipe's cluster section.

    Raises NotEnoughResources when the recipe asks for GPUs and there are none.
    """
    import torch

    found = torch.cuda.is_available()
    if config.platform == "gpu" and not found:
        raise NotEnoughResources(
            "cluster.platform is gpu, but torch sees none here; set it to cpu or auto, or check the driver"
        )
    return found and config.platform != "cpu"


def cpu_threads(processes: int) -> int:
    """Threads of each of so many processes that share this machine's cores, while others wait for them."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, processes))
