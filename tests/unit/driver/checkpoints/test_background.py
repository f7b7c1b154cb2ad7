"""Checkpoints in the background: complete or not at all, one at a time; one that fails does not affect the run."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.cluster import DeadlineExceeded, WorkerFailed
from grpo_mcore.driver.checkpoints import background, checkpoint_files, checkpoints
from grpo_mcore.driver.checkpoints.background import BackgroundCheckpoints
from grpo_mcore.driver.checkpoints.checkpoint_files import RunSnapshot
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from tests.clocks import StandingClock
from tests.failing import failing
from tests.unit.step.step_cases import config


class Ranks:
    """A policy whose ranks finish writing when `written` is set or they are waited for. `error`: they raise it then."""

    def __init__(self) -> None:
        self.cluster = SimpleNamespace(call_timeout_s=30.0, clock=StandingClock())
        self.calls: list[str] = []
        self.written = False
        self.error: Exception | None = None

    def start_save(self, folder: str, optimizer: bool) -> None:
        assert "start" not in self.calls[-1:], "one at a time"
        self.optimizer = optimizer
        self.calls.append("start")
        self.folder, self.written = Path(folder), False

    def is_saved(self, wait: bool) -> bool:
        self.calls.append("waited for" if wait else "asked")
        if not (wait or self.written):
            return False
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.folder.mkdir()
        (self.folder / "weights").write_bytes(b"1234")
        return True


class World:
    def __init__(self, folder: Path, *, is_async: bool = True, save_optimizer: bool = True) -> None:
        recipe = config()
        recipe.checkpointing.save_optimizer = save_optimizer
        recipe.checkpointing.checkpoint_dir, recipe.checkpointing.is_async = str(folder), is_async
        self.folder, self.ranks, self.events = folder, Ranks(), list[str]()
        manager = CheckpointManager(recipe.checkpointing)
        self.saves = BackgroundCheckpoints(
            manager,
            self.ranks,  # type: ignore[arg-type]
            recipe,
            on_saved=lambda step, path: self.events.extend([path.name, f"saved {step}"]),
            on_failure=lambda step, error: self.events.extend([str(error), f"not_saved {step}"]),
        )

    def start(self, step: int, write_more: Any = lambda folder: {}) -> None:
        self.saves.start(step, lambda: RunSnapshot({"current_step": step}, {"place": step}, {}), write_more)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.mark.parametrize("save_optimizer", [True, False])
def test_the_recipe_says_whether_the_optimizer_is_saved(tmp_path: Path, save_optimizer: bool) -> None:
    world = World(tmp_path, save_optimizer=save_optimizer)
    world.start(1)
    world.saves.wait()
    assert world.ranks.optimizer == save_optimizer


def test_it_appears_when_everything_is_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.start(1)
    world.saves.poll()
    assert world.files() == ["tmp_step_1"] and not world.events
    world.ranks.written = True
    world.saves.poll()  # starts the driver's part
    world.saves.wait()
    assert world.files() == ["step_1"] and world.events == ["step_1", "saved 1"]
    assert checkpoint_files.damage(tmp_path / "step_1") is None
    world.saves.poll()
    world.saves.wait()
    assert world.events == ["step_1", "saved 1"]


def test_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.start(1)
    world.start(2)
    assert world.files() == ["step_1", "tmp_step_2"]
    assert world.ranks.calls == ["start", "waited for", "start"]
    world.saves.wait()
    assert world.events == ["step_1", "saved 1", "step_2", "saved 2"]


def test_it_can_be_written_in_the_foreground(tmp_path: Path) -> None:
    world = World(tmp_path, is_async=False)
    world.start(1)
    assert world.files() == ["step_1"] and world.events == ["step_1", "saved 1"]


full = failing(errno.ENOSPC)


@pytest.mark.parametrize("where", ["ranks", "driver", "digests"])
def test_a_checkpoint_that_cannot_be_written_does_not_affect_the_next(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    text = "No space left on device"
    if where == "ranks":
        text = "rank 1: OSError: [Errno 28] No space left on device"
        world.ranks.error = WorkerFailed("policy-1", "writing the policy's checkpoint", f"SaveError: {text}")
    if where == "digests":
        monkeypatch.setattr(checkpoints, "write_digests", full)
    world.start(1, full if where == "driver" else lambda folder: {})
    world.saves.wait()
    monkeypatch.undo()
    assert world.files() == []
    assert "the checkpoint of step 1 was not written" in world.events[0] and text in world.events[0]
    assert world.events[1:] == ["not_saved 1"]
    world.start(2)
    world.saves.wait()
    assert world.files() == ["step_2"]


def test_a_lost_rank_ends_the_run_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.start(1)
    world.ranks.error = DeadlineExceeded("writing the policy's checkpoint", "policy-0", 30.0)
    with pytest.raises(DeadlineExceeded), world.saves:
        world.saves.wait()
    assert world.files() == [] and not world.events


@pytest.mark.parametrize(
    ("error", "saved"), [(RuntimeError("loss is not finite"), ["step_1"]), (KeyboardInterrupt(), [])], ids=repr
)
def test_it_is_finished_after_an_error_of_the_run_but_not_ctrl_c(
    tmp_path: Path, error: BaseException, saved: list[str]
) -> None:
    world = World(tmp_path)
    with pytest.raises(type(error)), world.saves:
        world.start(1)
        raise error
    assert world.files() == saved and world.events == saved + ["saved 1"] * len(saved)
    assert ("waited for" in world.ranks.calls) == bool(saved)


def test_it_is_not_finished_after_a_rank_was_lost(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(WorkerFailed) as raised, world.saves:
        world.start(1)
        world.ranks.error = WorkerFailed("policy-1", "writing the policy's checkpoint", "it died")
        raise WorkerFailed("policy-1", "training", "it died")
    assert "the checkpoint under way could not be finished" in raised.value.__notes__[0]
    assert world.files() == [] and not world.events


def test_it_is_renamed_at_the_end_of_the_run_if_everything_is_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.start(1)
    world.ranks.written = True
    with world.saves:
        world.saves.poll()
    assert world.files() == ["step_1"]


def test_the_last_checkpoint_is_tried_again_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RETRY_S", (1.0, 2.0))
    world = World(tmp_path)
    with world.saves:
        world.ranks.error = OSError(errno.ENOSPC, "No space left on device")
        world.start(1)
        assert world.saves.finish() is None  # there is room again
    assert world.files() == ["step_1"] and world.events[-1] == "saved 1"


def test_the_end_knows_that_the_last_checkpoint_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RETRY_S", (1.0, 2.0))
    world = World(tmp_path)
    with world.saves:
        world.start(1)
        world.start(2, full)
        assert world.saves.finish() == 2
    assert world.files() == ["step_1"] and world.events.count("not_saved 2") == 3
