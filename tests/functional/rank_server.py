"""Processes forked from one that has imported vLLM and transformers: each saves 11 s of processor time. Engines of a
test start their ranks so; under Ray they start them as in a run."""

import functools
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import psutil
import pytest

IMPORTS = "tests.functional.rank_imports"


@functools.cache
def server() -> forkserver.ForkServer:
    """Return the server of this process, apart from Python's own, which others may have started without vLLM."""
    started = forkserver.ForkServer()
    started.set_forkserver_preload([IMPORTS])
    started.ensure_running()
    return started


class RankProcess(ForkServerProcess):
    """A process with the environment of the one that starts it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.environment = dict(os.environ)

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forkserver, "connect_to_new_process", server().connect_to_new_process)
            super().start()

    def run(self) -> None:
        os.environ.update(self.environment)
        super().run()


class RankContext(ForkServerContext):
    Process = RankProcess  # type: ignore[assignment]


CONTEXT = RankContext()


def ranks() -> set[int]:
    """Return the processes that were forked and still run."""
    alive = set()
    for child in psutil.Process(server()._forkserver_pid).children(recursive=True):  # type: ignore[attr-defined]
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                alive.add(child.pid)
        except psutil.NoSuchProcess:
            pass
    return alive
