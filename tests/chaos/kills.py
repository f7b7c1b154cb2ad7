"""Kill processes of a run from within its driver, when a certain call is made.

Real processes, real signals: no code of the run knows about it.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mcore.base.processes import descendants
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.cluster.ray_worker import RayWorker
from grpo_mcore.driver.checkpoints import checkpoints
from tests.functional.runs import shared_files
from tests.processes_below import named

DRIVER, GCS, RAYLET = "driver", "gcs_server", "raylet"
NOTICED_WITHIN_S = 60.0
"""Seconds that the driver pauses after it has killed Ray's head: Ray ends the driver only later, and a short run would
have ended before."""


@dataclass(frozen=True)
class Kill:
    """One kill. `victim`: the name of a worker, DRIVER, or a process of Ray's head. `at`: the method that is called on
    any worker; "rename" is the moment before a
    checkpoint gets its name. `nth`: which such call since the last kill. `steps`: how many steps must have begun to
    train since the last kill, so that the run makes progress; 2, so that one of them has a whole checkpoint. `hangs`:
    the victim is stopped instead of killed. `nameless`: before, the names in /dev/shm that the run's processes use
    vanish, as systemd-logind removes those of a user who has logged out."""

    victim: str
    at: str
    nth: int = 1
    steps: int = 1
    hangs: bool = False
    nameless: bool = False

    @property
    def name(self) -> str:
        return f"{self.victim} {'hangs ' if self.hangs else ''}in {self.at}{' without names' if self.nameless else ''}"


class Reaper:
    """Carries out `kills` one after the other. Writes each to `log` first, so that a later process of the same run
    continues with the next."""

    def __init__(self, kills: Sequence[Kill], log: Path) -> None:
        self._log = log
        self._left = list(kills[len(log.read_text().splitlines()) if log.exists() else 0 :])
        self._workers: dict[str, Any] = {}
        self._steps = self._seen = 0

    def install(self, patch: Any) -> None:
        """Watch the calls of workers and the renaming of checkpoints. `patch`: a pytest.MonkeyPatch."""
        for cls in (RayWorker, LocalWorker):
            for kind in ("call", "stream"):
                patch.setattr(cls, kind, self._watched(getattr(cls, kind)))
        replace = os.replace

        def renaming(source: Any, target: Any) -> None:
            if Path(target).name.startswith("step_") and Path(target).parent.name == "checkpoints":
                self._reach("rename")
            replace(source, target)

        patch.setattr(checkpoints.os, "replace", renaming)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(worker: Any, method: str, *args: Any, **options: Any) -> Any:
            self._workers[worker.name] = worker
            if method == "train" and worker.name == "policy-0":
                self._steps += 1
            if isinstance(worker, LocalWorker):  # its call has ended when it returns
                self._reach(method)
                return original(worker, method, *args, **options)
            answer = original(worker, method, *args, **options)
            self._reach(method)
            return answer

        return call

    def _reach(self, method: str) -> None:
        if not self._left:
            return
        kill = self._left[0]
        if method != kill.at or self._steps < kill.steps:
            return
        self._seen += 1
        if self._seen < kill.nth:
            return
        self._left.pop(0)
        self._steps = self._seen = 0
        with self._log.open("a") as log:
            log.write(kill.name + "\n")
        if kill.nameless:
            used = shared_files([os.getpid(), *(process.pid for process in descendants())])
            assert any("refit" in path.name for path in used)
            for path in used:
                path.unlink(missing_ok=True)
        for pid in self._processes(kill.victim):
            os.kill(pid, signal.SIGSTOP if kill.hangs else signal.SIGKILL)
        if kill.victim in (GCS, RAYLET):
            time.sleep(NOTICED_WITHIN_S)

    def _processes(self, victim: str) -> list[int]:
        if victim == DRIVER:
            return [os.getpid()]
        if victim in (GCS, RAYLET):
            found = [process.pid for process in named(victim)]
            assert found, f"there is no {victim}"
            return found
        return [self._workers[victim].place().pid]
