"""Ranks of a Gloo world on two machines made of one, and who inspects each machine. Only ranks import torch."""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from grpo_mcore.cluster.inspection import Answering, Collector, report_here, worker_key
from grpo_mcore.rollout.workers import Place

__all__ = ["Collector", "Rank"]


class Rank:
    """One rank: it reduces within its pair, then over the world, step after step."""

    def start(self, rank: int, world: int, address: str, port: int, log: str) -> Place:
        import torch.distributed as dist

        from grpo_mcore.base.addresses import gloo_towards

        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 2)
        faulthandler.register(signal.SIGUSR1)
        self._rank, self._answering = rank, Answering(worker_key(log, os.getpid()), report_here)
        gloo_towards(address)
        dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world)
        pairs = [dist.new_group([first, first + 1], group_desc="PAIR") for first in range(0, world, 2)]
        self._pair = pairs[rank // 2]
        return Place("", "", os.getpid(), (), str(Path(log)))

    def train(self, stuck: int, steps: int) -> None:
        import torch
        import torch.distributed as dist

        for step in range(steps):
            if self._rank == stuck and step == 3:
                wait_for_a_disk()
            dist.all_reduce(torch.ones(2), group=self._pair)
            dist.all_reduce(torch.ones(2))


def wait_for_a_disk() -> None:
    """Stand still, as a rank whose storage does not answer."""
    time.sleep(3600)
    sys.exit(1)
