"""Verifiers by import path that misbehave in the ways that real ones do."""

from __future__ import annotations

import os
import signal
import time


def by_response(response: str, truth: str) -> object:
    """Does what the response says."""
    if response == "sleep":
        time.sleep(60)
    if response == "exit":
        os._exit(3)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "raise":
        raise RuntimeError("no verdict\ntoday")
    if response == "allocate":
        return len(bytearray(8 * 2**30)) > 0
    if response == "half":
        return 0.5
    if response == "secret":
        return False, os.environ.get("A_SECRET", "nothing")
    return response == truth, response
