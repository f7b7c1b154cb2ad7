"""Let the file operations of a run's driver fail, one in each run: nothing is lost, and no failure ends the loop.

    python -m tests.chaos.disk_errors EIO 1 [NUMBER]

EIO, 1: the error, and how many operations in a row fail. NUMBER: of runs, drawn by chance; by default all. The real
driver runs in virtual time with modelled workers (rehearse), so that a run takes a tenth of a second.
"""

import errno
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_mcore.base import files
from grpo_mcore.base.processes import rare_collections
from grpo_mcore.base.stopping import StopRequest
from grpo_mcore.recipe import MasterConfig
from tests.simulation import simulation
from tests.simulation.simulation import Case, Outcome, simulate

EVENTS = {
    f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "listdir", "scandir", "link", "truncate", "utime")
} | {"open"}
"""Events of Python's audit that touch files. An exception of a hook is that of the operation."""


AT_THE_START = ("the run was lost, and no rank was: OSError", "exit code 1: OSError")
"""Flaws of a run whose start has failed, which loses nothing and may be repeated."""


class SavingCase(Case):
    """A run that writes all that a run can, and deletes old checkpoints."""

    def recipe(self, folder: Path) -> MasterConfig:
        values = super().recipe(folder).model_dump(mode="json")
        values["logger"]["samples"] = "all"
        values["checkpointing"]["keep_top_k"] = 1
        return MasterConfig.model_validate(values)


class Failures:
    """Counts the operations on files in `folder`, and fails `row` of them from number `first` on."""

    def __init__(self) -> None:
        self.folder, self.first, self.row, self.number = "", -1, 1, errno.EIO
        self.done, self.before_loop, self.what = 0, 0, ""
        sys.addaudithook(self._hear)
        fsync = os.fsync

        def flush(fd: Any) -> None:  # of which the audit does not hear
            if self.folder:
                self._touch("fsync", _path_of(fd if isinstance(fd, int) else fd.fileno()))
            fsync(fd)

        os.fsync = flush

    @contextmanager
    def within(self, folder: Path, first: int) -> Iterator[None]:
        self.folder, self.first, self.done, self.what = str(folder), first, 0, ""
        try:
            yield
        finally:
            self.folder = ""

    def _hear(self, event: str, args: Any) -> None:
        if not self.folder or event not in EVENTS:
            return
        path = _path_of(args[0]) if isinstance(args[0], int) else os.fsdecode(args[0])
        within = args[-1]  # a folder's descriptor, from shutil.rmtree
        if event in ("os.remove", "os.rmdir") and within >= 0:
            path = os.path.join(_path_of(within), path)
        self._touch(event, path)

    def _touch(self, event: str, path: str) -> None:
        if path.startswith(self.folder):
            self.done += 1
            if 0 <= self.first < self.done <= self.first + self.row:
                self.what = self.what or f"{event} {path.removeprefix(self.folder)}"
                raise OSError(self.number, os.strerror(self.number), path)


def _path_of(file: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:  # not a file of this process
        return ""


def run(failures: Failures, first: int, background: bool) -> Outcome:
    """Run once; the operations from number `first` on fail (-1: none). The laws are looked at without failures."""
    place = Path(tempfile.mkdtemp(prefix="disk-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    look, listen = simulation.broken_laws, StopRequest.listening

    def laws(*args: Any) -> Iterator[str]:
        failures.folder = ""
        return look(*args)

    def listening(stop: StopRequest) -> AbstractContextManager[None]:
        if first < 0:
            failures.before_loop = failures.done
        return listen(stop)

    patches = mock.patch.object(simulation, "broken_laws", laws), mock.patch.object(StopRequest, "listening", listening)
    try:
        with patches[0], patches[1], failures.within(place, first):
            return simulate(SavingCase(5, steps=3, background_saves=background, age=1), place)
    finally:
        shutil.rmtree(place)


def main(words: list[str]) -> int:
    failures = Failures()
    failures.number, failures.row = getattr(errno, words[0]), int(words[1])
    files.READ_AGAIN_S = (0.0, 0.0)
    wrong, tried = 0, 0
    with rare_collections():
        for background in (False, True):
            calm = run(failures, -1, background)
            assert calm.code == 0 and not calm.flaws, calm
            numbers = list(range(failures.done))
            if len(words) > 2:
                numbers = random.Random(background).sample(numbers, int(words[2]))
            for first in numbers:
                outcome = run(failures, first, background)
                tried += 1
                harmless = AT_THE_START if first < failures.before_loop else ()
                if flaws := [flaw for flaw in outcome.flaws if not any(text in flaw for text in harmless)]:
                    wrong += 1
                    print(f"operation {first} ({failures.what}), background={background}: {flaws}, {outcome.errors}")
    print(f"{tried} runs with {words[0]} in {words[1]} file operations, {wrong} of them lost something")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
