"""The process that verifies: receives (response, truth), sends a Verdict, until the other end closes.

It limits its own memory, and a kernel timer ends it should it outlive both its deadline and its parent.
"""

from __future__ import annotations

import logging
import resource
import signal
from multiprocessing.connection import Connection

from grpo_mcore.environments.verifiers import HF_MATH_VERIFY, load_verifier, verify_one

READY = "ready"
_GRACE_S = 1.0  # the parent kills at the deadline; the timer is for when there is no parent any more


def main(connection_fd: int, verifier: str, timeout_s: float, memory_gb: float) -> None:
    """Serves until the parent closes its end of `connection_fd`. First message: READY, or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # acts inside long C calls too, as no Python handler does
    logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot read
    with Connection(connection_fd) as connection:
        try:
            function = load_verifier(verifier)
            if verifier == HF_MATH_VERIFY:
                function("1/2", "0.5")  # loads sympy and the grammar before the first deadline runs
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
            return
        limit = int(memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        connection.send(READY)
        while True:
            try:
                response, truth = connection.recv()
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
            verdict = verify_one(function, response, truth)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.send(verdict)
