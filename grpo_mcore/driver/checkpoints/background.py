"""Checkpoints written in the background while training goes on, one at a time."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from grpo_mcore.base.files import Digest
from grpo_mcore.cluster import DeadlineExceeded, WorkerFailed
from grpo_mcore.driver.checkpoints.checkpoint_files import RunSnapshot, policy_folder, recipe_text, write_driver_files
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager, NotWritten
from grpo_mcore.driver.interfaces import PolicyInterface
from grpo_mcore.recipe import MasterConfig

RETRY_S = (1.0, 5.0, 14.0)
"""Seconds to wait before each further attempt to write the last checkpoint of a run. A batch system ends a run about 30
seconds after SIGTERM: the rest is for the step under way and for the writing."""


@dataclass
class _Unfinished:
    """A checkpoint being written. `written`: digests of the driver's files; `publishing`: the last part of it, once the
    ranks have written theirs."""

    step: int
    tmp: Path
    written: dict[str, Digest]
    publishing: Future[Path] | None = None


@dataclass(frozen=True)
class _Contents:
    """Arguments of the last `start`, to try again."""

    step: int
    snapshot: Callable[[], RunSnapshot]
    write_more: Callable[[Path], dict[str, Digest]]


class BackgroundCheckpoints:
    """Writes checkpoints in three parts: `start` copies everything that a checkpoint holds; the policy's ranks write
    their copies in the background; then a thread of the driver writes the digests and renames the folder. With
    checkpointing.is_async off, `start` waits for all of it.

    If a checkpoint cannot be written, the run goes on without it.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        policy: PolicyInterface,
        recipe: MasterConfig,
        *,
        on_saved: Callable[[int, Path], None] = lambda step, folder: None,
        on_failure: Callable[[int, NotWritten], None],
    ) -> None:
        """`recipe`: the resolved recipe; every checkpoint holds a copy. `on_saved` gets the step and the folder of each
        complete checkpoint, `on_failure` the step and the error of each that could not be written."""
        self._manager, self._policy, self._recipe = manager, policy, recipe
        self._config_yaml: str | None = None  # made for the first checkpoint
        self._on_saved, self._on_failure = on_saved, on_failure
        self._unfinished: _Unfinished | None = None
        self._last: _Contents | None = None  # None once it is saved
        self._clock = policy.cluster.clock
        self._thread = self._clock.thread("checkpoint")

    def start(
        self,
        step: int,
        snapshot: Callable[[], RunSnapshot],
        write_more: Callable[[Path], dict[str, Digest]] = lambda folder: {},
    ) -> None:
        """Begin to write `step_N`, after the checkpoint before it is complete. `write_more` adds to its folder, and
        returns the digests of its files."""
        self.wait()
        self._last = _Contents(step, snapshot, write_more)
        try:
            with self._manager.writing(step) as tmp:
                self._manager.make_room(tmp)
                self._config_yaml = self._config_yaml or recipe_text(self._recipe)
                written = write_more(tmp) | write_driver_files(tmp, snapshot(), self._config_yaml)
                self._policy.start_save(policy_folder(tmp), self._recipe.checkpointing.save_optimizer)
        except NotWritten as error:
            self._on_failure(step, error)
            return
        self._unfinished = _Unfinished(step, tmp, written)
        if not self._recipe.checkpointing.is_async:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint under way is complete. Raises DeadlineExceeded, and WorkerFailed of a lost rank."""
        self.poll(wait=True)

    def finish(self) -> int | None:
        """Wait as `wait` does. If the last checkpoint could not be written, try again: what it holds is still the state
        of the run. Then wait until it is copied (checkpointing.mirror). Return the step if it is not saved, None if
        everything is."""
        self.wait()
        for seconds in RETRY_S:
            if self._last is None:
                break
            self._clock.sleep(seconds)
            self.start(self._last.step, self._last.snapshot, self._last.write_more)
            self.wait()
        if self._manager.copy is not None:
            self._manager.copy.finish()
        return None if self._last is None else self._last.step

    def poll(self, wait: bool = False) -> None:
        """Complete the checkpoint under way if its parts are written. `wait`: wait for them. The loop calls this
        between commands."""
        if (current := self._unfinished) is None:
            return
        try:
            with self._manager.writing(current.step):
                if current.publishing is None:
                    if not self._policy.is_saved(wait):
                        return
                    current.publishing = self._thread.submit(self._manager.publish, current.step, current.written)
                if not wait and not current.publishing.done():
                    return
                folder = self._published(current, current.publishing)
        except NotWritten as error:
            self._on_failure(current.step, error)
        else:
            self._last = None
            self._on_saved(current.step, folder)
        self._unfinished = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish the checkpoint under way when the run ends with an error. After a missed deadline or Ctrl-C finish it
        only if the ranks have written their part, and delete it otherwise."""
        if isinstance(error, Exception) and not isinstance(error, DeadlineExceeded):
            try:
                self.wait()
            except (DeadlineExceeded, WorkerFailed) as failure:
                error.add_note(f"and the checkpoint under way could not be finished: {failure}")
        self._thread.shutdown()
        if self._unfinished is not None and self._unfinished.publishing is None:
            shutil.rmtree(self._unfinished.tmp, ignore_errors=True)

    def _published(self, current: _Unfinished, publishing: Future[Path]) -> Path:
        timeout_s = self._policy.cluster.call_timeout_s
        try:
            return publishing.result(timeout_s)
        except TimeoutError as error:
            if publishing.done():  # the thread itself raised it
                raise
            raise DeadlineExceeded(f"digests of {current.tmp}", "the disk", timeout_s) from error
