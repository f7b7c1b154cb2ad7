"""Verifications in killable worker processes, each with a hard deadline of its own.

A plain number needs no worker. A verification that hangs costs one worker its life and the others nothing; a
worker that died is replaced. The workers are programs of their own, not forks and not multiprocessing
children: those would import the caller's main module again, which is Ray's worker or a user's script.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from grpo_mcore.environments.plain_numbers import compare_plain_numbers
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.environments.verifiers import HF_MATH_VERIFY, Verdict, reason_for
from grpo_mcore.environments.verify_worker import READY

_START_S = 120.0  # a worker imports sympy before it is ready; on a busy machine that takes a while
_CLOSE_S = 2.0
_BY_ITS_TIMER = "was ended by SIGALRM"
# What Python needs of the environment. A model wrote what is verified: no secrets near it.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")


class VerifyPool:
    """`num_workers` processes that run `verifier` (a name or an import path). `timeout_s`: the limit of one
    verification, in seconds. `memory_gb`: the limit of one worker, in GiB. Usable from several threads.

    Raises EnvironmentConfigError where the verifier cannot be loaded.
    """

    def __init__(
        self,
        num_workers: int = 8,
        timeout_s: float = 5.0,
        memory_gb: float = 2.0,
        verifier: str = HF_MATH_VERIFY,
    ) -> None:
        self.verifier = verifier
        self._workers = [_Worker(verifier, timeout_s, memory_gb) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verify")
        try:
            self._workers[-1].wait_until_ready()  # an error here is an error of the set-up; the others follow
        except EnvironmentConfigError:
            self.close()
            raise
        except (OSError, EOFError) as error:
            end = self._workers[-1].how_it_ended()
            self.close()
            raise EnvironmentConfigError(
                f"the verification worker {end} before it was ready; its own error is above"
            ) from error

    def verify(self, responses: Sequence[str], truths: Sequence[str]) -> list[Verdict]:
        """One verdict a pair, in order; returns when the last is in."""
        pairs = list(zip(responses, truths, strict=True))
        plain = [self._without_worker(response, truth) for response, truth in pairs]
        futures = {
            index: self._threads.submit(self._in_worker, *pairs[index])
            for index, verdict in enumerate(plain)
            if verdict is None
        }
        return [verdict or futures[index].result() for index, verdict in enumerate(plain)]

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, as of now."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """Ends the workers, whatever they are doing. What still waits gets the verdict "crashed"."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.end()

    def _without_worker(self, response: str, truth: str) -> Verdict | None:
        if self.verifier != HF_MATH_VERIFY:
            return None
        start = time.perf_counter()
        plain = compare_plain_numbers(response, truth)
        if plain is None:
            return None
        correct, answer = plain
        reason = reason_for(float(correct), answer, truth)
        return Verdict(float(correct), answer, reason, time.perf_counter() - start)

    def _in_worker(self, response: str, truth: str) -> Verdict:
        worker = self._idle.get_nowait()  # as many threads as workers: there is one
        try:
            return worker.ask(response, truth)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process and our end of the socket to it. Used by one thread at a time; `stop` by any."""

    def __init__(self, verifier: str, timeout_s: float, memory_gb: float) -> None:
        self.timeout_s = timeout_s
        self._timed_out = f"timed out after {timeout_s:g} s"
        self._arguments = (verifier, timeout_s, memory_gb)
        self._stopped = False
        self._ready = False
        self._launch()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, response: str, truth: str) -> Verdict:
        if self._process.poll() is not None:  # died while idle
            self._replace()
        start = time.perf_counter()
        try:
            self.wait_until_ready()
            self._connection.send((response, truth))
            if self._connection.poll(self.timeout_s):
                return self._connection.recv()
            reason = self._timed_out
        except (OSError, EOFError):
            end = self.how_it_ended()
            reason = self._timed_out if end == _BY_ITS_TIMER else f"crashed: the verification worker {end}"
        self._replace()
        return Verdict(None, None, reason, time.perf_counter() - start)

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        if not self._connection.poll(_START_S):
            raise EnvironmentConfigError(
                f"the verification worker (pid {self.pid}) was not ready after {_START_S:g} s; "
                f"is num_workers too large for this machine?"
            )
        answer = self._connection.recv()
        if answer != READY:
            raise EnvironmentConfigError(f"math verifier {self._arguments[0]!r} does not load: {answer}")
        self._ready = True

    def how_it_ended(self) -> str:
        try:
            code = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def stop(self) -> None:
        """Kills the process; whoever waits for it is told by its connection."""
        self._stopped = True
        self._process.kill()

    def end(self) -> None:
        """Kills the process and lets go of it."""
        self._process.kill()
        self._process.wait(_CLOSE_S)
        self._connection.close()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from grpo_mcore.environments.verify_worker import main; "
                f"main({theirs.fileno()}, *{self._arguments!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                start_new_session=True,  # Ctrl-C at the terminal is for the driver
            )
        self._connection = Connection(ours.detach())
        self._ready = False

    def _replace(self) -> None:
        """Ends the process; its successor starts while the caller goes on."""
        self.end()
        if not self._stopped:
            self._launch()
