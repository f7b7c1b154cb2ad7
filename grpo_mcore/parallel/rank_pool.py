"""Ranks without Ray: processes that import torch and Megatron-Core once, then join one mesh after another."""

from __future__ import annotations

import gc
import importlib
import os
import traceback
import warnings
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from grpo_mcore import processes
from grpo_mcore.parallel.mesh import Address


class RankFailed(RuntimeError):
    """A rank raised or did not answer; the message has its traceback."""


class RankPool:
    """A pool of rank processes.

    `run(world_size, "module:function", *args)` calls function(address, *args) on every rank and returns the results.
    Arguments and results are pickled.
    """

    def __init__(self, size: int) -> None:
        """`size`: number of ranks of the largest mesh. A rank that cannot start is reported by `run`."""
        context = get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(os.getpid(), there))
            process.start()
            self._ranks.append((process, here))

    def run(self, world_size: int, target: str, *args: Any, timeout_s: float = 250.0) -> list[Any]:
        port = processes.free_port()
        for rank, (_, pipe) in enumerate(self._ranks[:world_size]):
            pipe.send((target, Address(rank, world_size, rank, "127.0.0.1", port), args))
        results, errors = [], []
        for rank, (process, pipe) in enumerate(self._ranks[:world_size]):
            if not pipe.poll(timeout_s):
                errors.append(
                    f"rank {rank} of {target} did not answer within {timeout_s} s (alive: {process.is_alive()})"
                )
                continue
            ok, value = pipe.recv()
            results.append(value) if ok else errors.append(f"rank {rank} of {target}:\n{value}")
        if errors:
            raise RankFailed("\n".join(errors))
        return results

    def close(self) -> None:
        """End the processes."""
        for _, pipe in self._ranks:
            pipe.close()  # a rank that waits for work ends by itself
        processes.end(processes.wait([process for process, _ in self._ranks], timeout_s=5.0))


def _serve(parent: int, pipe: Connection) -> None:
    processes.die_with_parent(parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # Megatron-Core's warnings, on which no reader can act; errors are returned as text
    gc.disable()  # during imports, of which garbage collection would be a fifth
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            target, address, args = pipe.recv()
        except (EOFError, OSError):
            return
        module, function = target.split(":")
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(address, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                from grpo_mcore.parallel.mesh import leave_mesh

                leave_mesh(whole_process=True)
            gc.freeze()  # only modules are left: leaving the next mesh need not scan them
            gc.enable()
