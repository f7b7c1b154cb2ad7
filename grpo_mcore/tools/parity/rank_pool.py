"""Ranks without Ray: processes that start with torch in memory, import Megatron-Core once, then join one mesh after
another."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from grpo_mcore.base import processes
from grpo_mcore.base.processes import collect_rarely
from grpo_mcore.parallel.mesh import Address


class RankFailed(RuntimeError):
    """A rank raised or did not answer; the message has its traceback."""


SHARED_IMPORTS = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "torch._dynamo",
)
"""Modules of torch that Megatron-Core imports, 4 of the 5 s of a rank's imports. A server imports them once, and each
rank is forked from it. Megatron-Core is imported by each rank, for its platform (`prepare_megatron`)."""
STACK_S = 5.0
"""Seconds that a silent rank has to write down where it is."""


class RankPool:
    """A pool of rank processes.

    `run(world_size, "module:function", *args)` calls function(address, *args) on every rank and returns the results.
    Arguments and results are pickled. A call that does not get all its answers costs itself alone: its ranks are ended,
    and the next call has new ones.
    """

    def __init__(self, size: int) -> None:
        """Start the ranks of the largest mesh. A rank that cannot start is reported by `run`."""
        self._ranks: list[_Rank | None] = [_Rank() for _ in range(size)]

    def run(self, world_size: int, target: str, *args: Any, timeout_s: float = 250.0) -> list[Any]:
        """Raises RankFailed with the traceback of every rank that raised, how a rank ended, or where those are that did
        not answer within `timeout_s`."""
        port, ranks = processes.free_port(), [rank or _Rank() for rank in self._ranks[:world_size]]
        self._ranks[:world_size] = ranks
        answers: dict[int, tuple[bool, Any]] = {}
        errors: list[str] = []
        try:
            for number, rank in enumerate(ranks):
                rank.send(target, Address(number, world_size, number, "127.0.0.1", port), args)
            self._collect(ranks, answers, time.monotonic() + timeout_s)
            for number, rank in enumerate(ranks):
                if number not in answers:
                    errors.append(f"rank {number} of {target} did not answer (limit {timeout_s:.0f} s): {rank.where()}")
                elif not answers[number][0]:
                    errors.append(f"rank {number} of {target}:\n{answers[number][1]}")
        finally:
            if len(answers) < world_size:  # also after an interrupt: a late answer would be one to the next call
                self._ranks[:world_size] = [None] * world_size
                processes.end([rank.process for rank in ranks])
                for rank in ranks:
                    rank.close()
        if errors:
            raise RankFailed("\n".join(errors))
        return [answers[number][1] for number in range(world_size)]

    @staticmethod
    def _collect(ranks: list[_Rank], answers: dict[int, tuple[bool, Any]], deadline: float) -> None:
        """Fill in the answers until all are there, the deadline passes, or a rank has ended."""
        waiting = {rank.pipe: number for number, rank in enumerate(ranks)}
        while waiting and (ready := connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in cast(list[Connection], ready):
                try:
                    answer = pipe.recv_bytes()
                except (EOFError, ConnectionResetError):
                    return
                answers[waiting[pipe]] = pickle.loads(answer)
                del waiting[pipe]

    def close(self) -> None:
        """End the processes."""
        ranks = [rank for rank in self._ranks if rank is not None]
        for rank in ranks:
            rank.close()
        processes.end(processes.wait([rank.process for rank in ranks], timeout_s=5.0))


class _Rank:
    """One process of the pool."""

    def __init__(self) -> None:
        processes.shorten_socket_paths()
        context = get_context("forkserver")
        context.set_forkserver_preload(list(SHARED_IMPORTS))
        self.stacks = tempfile.NamedTemporaryFile(prefix="rank-", suffix=".stacks")  # noqa: SIM115, held until `end`
        self.pipe, remote_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(dict(os.environ), remote_end, self.stacks.name))
        self.process.start()
        remote_end.close()

    def send(self, *call: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `answer` says
            self.pipe.send_bytes(pickle.dumps(call))

    def where(self) -> str:
        """Return what the process does, or how it ended."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_S
        while self.process.is_alive():  # for a moment also after its end of the pipe has closed
            if text := Path(self.stacks.name).read_text(errors="replace", encoding="utf-8"):
                return f"it is at\n{text}"
            if time.monotonic() > until:
                return f"it does not say where it is within {STACK_S:.0f} s"
            time.sleep(0.05)
        return f"its process has ended: {processes.describe_exit(self.process.exitcode)}"

    def close(self) -> None:
        """A rank that waits for work ends by itself."""
        self.pipe.close()
        self.stacks.close()


def _serve(environment: dict[str, str], pipe: Connection, stacks: str) -> None:
    processes.die_with_parent(os.getppid())  # the server, which ends with the process that has the pool
    os.environ.update(environment)  # the server may have started before a variable was set
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("a", encoding="utf-8"), all_threads=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # Megatron-Core's warnings, on which no reader can act; errors are returned as text
    collect_rarely()
    gc.disable()  # during imports, of which garbage collection would be a fifth
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            target, address, args = pickle.loads(call)
            module, function = target.split(":")
            value = getattr(importlib.import_module(module), function)(address, *args)
            answer = pickle.dumps((True, value))  # by value, not by a thread that shares tensors
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        try:
            pipe.send_bytes(answer)
        finally:
            if torch.distributed.is_initialized():
                from grpo_mcore.parallel.mesh import leave_mesh

                leave_mesh(whole_process=True)
            gc.freeze()  # only modules are left: leaving the next mesh need not scan them
            gc.enable()
