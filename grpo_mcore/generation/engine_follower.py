"""A further node of an engine that spans several: runs the ranks there, driven by the engine on the first node."""

import multiprocessing
import os
import socket
import threading
import time
import warnings
from multiprocessing.connection import wait
from typing import Any

from grpo_mcore.generation.config import EngineConfig, engine_arguments, set_engine_environment
from grpo_mcore.generation.cpu_kernels import import_vllm_without_compiler
from grpo_mcore.generation.engine_nodes import bind_vllm_to, deaths, join_first

REAP_S = 1.0


class EngineFollower:
    """Runs an engine's ranks on a node other than its first; start it at the same time as the Engine there. It ends its
    ranks when the first node is gone, and reports to the first node when one of them dies."""

    def __init__(self, config: EngineConfig) -> None:
        """Wait until the ranks of all nodes are up. Raises NodeLost if the first node cannot be reached."""
        started_at = time.perf_counter()
        self.config = config
        self._executor: Any = None
        self._ending = threading.Lock()
        self._ended = False
        set_engine_environment(config, os.environ)
        bind_vllm_to(config.node.address)
        self._first, port = join_first(config, self._lose)
        self._first.watch()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
            self._executor = self._start(port)
        if self._ended:  # meanwhile
            self._executor.shutdown()
        per_node = config.ranks // config.node.count
        self._ranks = {config.node.rank * per_node + i: rank.proc for i, rank in enumerate(self._executor.workers)}
        threading.Thread(target=self._watch, daemon=True, name="engine ranks").start()
        self.start_seconds = time.perf_counter() - started_at

    def _start(self, port: int) -> Any:
        if self.config.platform == "cpu":
            import_vllm_without_compiler()
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        arguments = EngineArgs(**engine_arguments(self.config, port))
        config = arguments.create_engine_config(usage_context=UsageContext.LLM_CLASS, headless=True)
        return MultiprocExecutor(config, monitor_workers=False)  # `_watch` does

    def _watch(self) -> None:
        ended = wait([process.sentinel for process in self._ranks.values()])
        gone = {rank: process for rank, process in self._ranks.items() if process.sentinel in ended}
        for process in gone.values():
            process.join(REAP_S)  # its exit code comes just after its end
        if not self._ended:
            codes = {rank: process.exitcode for rank, process in gone.items()}
            self._lose(f"{deaths(codes, self.config.ranks)} on {socket.gethostname()}")

    def _lose(self, reason: str) -> None:
        """Shut down, because a rank here has died or the first node is gone."""
        self._first.tell(reason)
        self.shutdown()

    def shutdown(self) -> None:
        """End the ranks' processes. Idempotent."""
        with self._ending:
            self._ended = True
            self._first.close()
            if self._executor is not None:
                self._executor.shutdown()
                multiprocessing.active_children()  # reaps the ranks
