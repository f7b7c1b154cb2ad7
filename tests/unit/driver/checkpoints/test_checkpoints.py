"""Checkpoint folders: complete or not at all, the best are kept, two runs are never mixed."""

import errno
import io
import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from grpo_mcore.base import files
from grpo_mcore.cluster import WorkerFailed
from grpo_mcore.driver.checkpoints import checkpoint_files
from grpo_mcore.driver.checkpoints import checkpoints as module
from grpo_mcore.driver.checkpoints.checkpoint_files import ResumeError, RunSnapshot, recipe_text
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager, NotWritten
from grpo_mcore.recipe import MasterConfig, load_recipe
from tests.failing import failing
from tests.unit.driver.checkpoints.saving import RECIPE, manager, save, save_now, write_policy

NOTHING = RunSnapshot({}, {}, {})


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_recipe_in_a_checkpoint_is_yaml() -> None:
    odd = {"answers": {"path": "a.py", "options": {"text": "two\nlines: 1", "long key " * 20: None, "list": [[1], []]}}}
    plain = load_recipe("grpo-arithmetic-cpu").config.model_dump(mode="json")
    for sections in (plain, plain | {"env": {}}, plain | {"env": odd}):
        recipe = SimpleNamespace(model_dump=lambda mode, sections=sections: sections)
        assert recipe_text(cast(MasterConfig, recipe)) == yaml.dump(sections, sort_keys=False)


BY_ACCURACY = {"metric_name": "val:accuracy"}


@pytest.mark.parametrize(
    ("settings", "saved", "left"),
    [
        ({"keep_top_k": 2}, {1: 0.9, 2: 0.5, 3: 0.8, 4: 0.1}, [1, 3, 4]),
        ({"keep_top_k": 1, **BY_ACCURACY}, {1: 0.5, 2: float("nan"), 3: 0.1}, [1, 3]),
        # Checkpoints for recovery do not compete with the best.
        ({"keep_top_k": 1, "save_period": 4, "ft_save_period": 1, "ft_keep_latest_k": 2},
         {step: 1 / step for step in range(1, 8)}, [4, 6, 7]),
        ({"keep_top_k": 1, "save_period": 4, "ft_save_period": 1, "ft_keep_latest_k": 2},
         {step: 1 / step for step in range(1, 8)} | {8: 0.9}, [7, 8]),
        # The newest are kept, whatever they were saved for.
        ({"keep_top_k": 1, "save_period": 2, "ft_keep_latest_k": 3},
         {step: 1 / step for step in (1, 2, 3, 4, 5, 6, 8)}, [2, 5, 6, 8]),
        ({"keep_top_k": None, "save_period": 2, "ft_keep_latest_k": 2}, dict.fromkeys(range(1, 8)), [2, 4, 6, 7]),
        ({"keep_top_k": None, "save_period": 3, "ft_save_period": 1}, dict.fromkeys(range(1, 6)), [3, 5]),
    ],
)  # fmt: skip
def test_what_is_kept(tmp_path: Path, settings: Any, saved: dict[int, float | None], left: list[int]) -> None:
    checkpoints = manager(tmp_path, **settings)
    for step, accuracy in saved.items():
        save(checkpoints, step, **({} if accuracy is None else {"val_accuracy": accuracy}))
    assert kept(tmp_path) == [f"step_{step}" for step in left]
    newest = tmp_path / f"step_{left[-1]}"
    assert checkpoints.latest() == newest
    assert checkpoints.read(newest) == ({"current_step": left[-1]}, {"place": left[-1]})


@pytest.mark.parametrize(
    ("settings", "name", "values", "best"),
    [
        ({"metric_name": "val:loss", "higher_is_better": False}, "val_loss", (0.2, 0.9, 0.5), 1),
        (BY_ACCURACY, "val_reward", (0.5, 0.7, 0.1), 2),  # graded rewards have no accuracy
    ],
)
def test_what_ranks_as_best(tmp_path: Path, settings: Any, name: str, values: tuple[float, ...], best: int) -> None:
    checkpoints = manager(tmp_path, keep_top_k=1, **settings)
    for step, value in enumerate(values, 1):
        save(checkpoints, step, **{name: value})
    assert kept(tmp_path) == [f"step_{best}", "step_3"]


def test_the_one_just_saved_is_always_kept(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=1)
    save(checkpoints, 90, val_accuracy=0.9)
    assert save(checkpoints, 10, val_accuracy=0.1).is_dir()


def test_a_run_that_does_not_resume_refuses_the_folder_of_another(tmp_path: Path) -> None:
    save(manager(tmp_path), 5)
    with pytest.raises(ResumeError, match="holds step_5 of another run: go on from it with --resume"):
        manager(tmp_path).open(None)
    manager(tmp_path, enabled=False).open(None)


def test_a_copied_folder_is_a_branch_and_a_moved_one_goes_on_in_its_log(tmp_path: Path) -> None:
    here, copy = tmp_path / "here", tmp_path / "copy"
    recipe = RECIPE.model_copy(update={"checkpointing": manager(here).config})
    saved = RunSnapshot({"current_step": 5, "log_run": "exp_001"}, {}, {})
    save_now(manager(here), 5, write_policy, saved, recipe)
    shutil.copytree(here, copy)
    runs = []
    for folder in (here, copy):
        runs.append(manager(folder))
        runs[-1].open(True)
    assert [run.log_run() for run in runs] == ["exp_001", None]
    shutil.rmtree(here)
    assert runs[1].log_run() == "exp_001"


@pytest.mark.parametrize(
    ("state", "of", "refused"),
    [
        ({"consumed_samples": 8}, "GRPO", ("sft", "dpo")),
        ({"algorithm": "sft"}, "SFT", ("grpo", "dpo")),
        ({"algorithm": "dpo"}, "DPO", ("grpo", "sft")),
        ({}, "SFT or DPO", ("grpo",)),  # before this version
    ],
)
def test_a_checkpoint_of_another_algorithm_is_refused(
    tmp_path: Path, state: Any, of: str, refused: tuple[str, ...]
) -> None:
    save_now(manager(tmp_path), 5, write_policy, RunSnapshot({"current_step": 5, **state}, {}, {}), RECIPE)
    run = manager(tmp_path)
    run.check_algorithm("grpo")  # it resumes nothing
    run.open(True)
    for algorithm in ("grpo", "sft", "dpo"):
        if algorithm in refused:
            with pytest.raises(ResumeError, match=rf"step_5 is of a run of {of}, which {algorithm.upper()} cannot"):
                run.check_algorithm(algorithm)
        else:
            run.check_algorithm(algorithm)


def test_what_a_killed_run_left_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=1)
    (tmp_path / "step_7").mkdir()  # half deleted
    (tmp_path / "tmp_step_8").mkdir()  # half written
    assert checkpoints.latest() is None
    save(checkpoints, 8)
    save(checkpoints, 9)
    assert checkpoints.latest() == tmp_path / "step_9"
    with pytest.raises(ResumeError, match="is no checkpoint: training_info.json is missing"):
        checkpoints.find(tmp_path / "step_7")
    with pytest.raises(ResumeError, match=f"is missing; name one of the checkpoints in it, such as {tmp_path}/step_9"):
        checkpoints.find(tmp_path)


def full_disk(folder: str) -> None:
    Path(folder).mkdir()
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_on_a_full_disk_leaves_the_others_and_says_what_to_free(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(
        NotWritten, match=r"step 2 was not written .*No space.*\n.*GB are free.* step_1 \(0.00 GB\), or"
    ):
        save_now(checkpoints, 2, full_disk, NOTHING, RECIPE)
    assert kept(tmp_path) == ["step_1"]
    save(checkpoints, 2)


@pytest.mark.parametrize(
    "contents", [None, {}, {"a": torch.zeros(100_000)}], ids=["by its reason", "at its end", "in the middle"]
)
def test_a_full_disk_of_a_rank_is_recognised_by_its_text(tmp_path: Path, contents: Any) -> None:
    """Also where torch names no reason."""

    def rank(folder: str) -> None:
        try:
            torch.save(contents, "/dev/full")
        except RuntimeError as error:
            said = "OSError: [Errno 28] No space left on device" if contents is None else f"RuntimeError: {error}"
            raise WorkerFailed("policy-0", "copying the policy", said) from None

    with pytest.raises(NotWritten):
        save_now(manager(tmp_path), 2, rank, NOTHING, RECIPE)


def test_free_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = manager(tmp_path)
    folder = save(checkpoints, 1)
    with (folder / "big").open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).free + 2**30)  # a hole: it takes no room
    with pytest.raises(NotWritten, match="No space left on device"):
        save_now(checkpoints, 2, lambda folder: pytest.fail("it wrote"), NOTHING, RECIPE)


def test_any_other_error_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        save_now(manager(tmp_path), 2, lambda folder: 1 / 0, NOTHING, RECIPE)


def spoil(path: Path) -> None:
    """Flip a bit of the last byte."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "training_info.json is missing": lambda folder: (folder / "training_info.json").unlink(),
    "is not what was saved": lambda folder: spoil(folder / "data.pt"),
    r"data.pt has \d+ bytes, [\d,]+ were saved": lambda folder: os.truncate(folder / "data.pt", 10),
    "policy/weights is missing": lambda folder: (folder / "policy" / "weights").unlink(),
    "digests.json is missing": lambda folder: (folder / "digests.json").unlink(),
    "digests.json cannot be read": lambda folder: os.truncate(folder / "digests.json", 20),
    "digests.json cannot be read: AttributeError": lambda folder: (folder / "digests.json").write_text('{"files": []}'),
    "digests.json cannot be read: TypeError": lambda folder: (folder / "digests.json").write_text(
        '{"files": {"data.pt": 7}}'
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_if_a_checkpoint_is_damaged_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, message: str
) -> None:
    checkpoints = manager(tmp_path)
    for step in (1, 2, 3):
        save(checkpoints, step)
    for step in (2, 3):
        DAMAGES[message](tmp_path / f"step_{step}")
    with pytest.raises(ResumeError, match=f"step_3 is damaged: .*{message}"):
        checkpoints.find(str(tmp_path / "step_3"))
    assert checkpoints.find("auto") == tmp_path / "step_1"
    told = caplog.messages
    assert re.search(f"step_3 is damaged: .*{message}.*; it is now damaged_step_3, and step_2 is used", told[0])
    assert "step_2 is damaged" in told[1] and kept(tmp_path) == ["damaged_step_2", "damaged_step_3", "step_1"]
    DAMAGES[message](tmp_path / "step_1")
    with pytest.raises(ResumeError, match="there is no older one: start without"):
        checkpoints.find(True)


def test_the_ranks_tell_what_they_wrote_and_compare_what_they_read(tmp_path: Path) -> None:
    """The driver reads none of the ranks' files. If one is damaged, the run goes on from the checkpoint before."""

    def write(folder: str) -> None:
        write_policy(folder)
        files.leave_digests(Path(folder), "00000", ["weights"])
        (Path(folder) / "weights").write_bytes(b"4321")  # as if the disk had changed it since: nobody looks again

    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    save_now(checkpoints, 2, write, RunSnapshot({"current_step": 2}, {}, {}), RECIPE)
    assert [path.name for path in (tmp_path / "step_2" / "policy").iterdir()] == ["weights"]
    resumed = resuming(tmp_path, True)
    assert resumed.resumed_from == tmp_path / "step_2"
    problem = files.first_changed(tmp_path / "step_2" / "policy", resumed.policy_digests())
    assert problem == "weights is not what was saved (its digest differs)" and checkpoint_files.damage(
        tmp_path / "step_2"
    )
    assert resumed.pass_over(problem) == resumed.resumed_from == tmp_path / "step_1"
    assert files.first_changed(tmp_path / "step_1" / "policy", resumed.policy_digests()) is None
    assert kept(tmp_path) == ["damaged_step_2", "step_1"]
    with pytest.raises(ResumeError, match="step_1 is damaged: .*choose another checkpoint"):
        resuming(tmp_path, str(tmp_path / "step_1")).pass_over(problem)


def test_no_random_damage_of_a_checkpoint_passes(tmp_path: Path) -> None:
    """Flip a bit, cut a file, or delete it. A bit of the white space in the digests changes nothing."""
    folder = save(manager(tmp_path), 1)
    draw = random.Random(0)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for _ in range(100):
        path = draw.choice(files)
        whole, place, bit = path.read_bytes(), draw.randrange(path.stat().st_size), draw.randrange(8)
        flipped = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        damaged = draw.choice([flipped, flipped, whole[:place], None])
        path.unlink() if damaged is None else path.write_bytes(damaged)
        if checkpoint_files.damage(folder) is None:
            assert path.name == "digests.json" and json.loads(path.read_bytes()) == json.loads(whole)
        path.write_bytes(whole)
    assert checkpoint_files.damage(folder) is None


def test_a_copy_of_another_step_is_not_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save(manager(tmp_path), step)
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_7")
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_\N{SUPERSCRIPT TWO}")  # a digit, but no number
    with pytest.raises(ResumeError, match="step_7 is damaged: it holds step 1"):
        manager(tmp_path).find(str(tmp_path / "step_7"))
    checking = manager(tmp_path)
    checking.open(True, renames=False)  # as `train --check` does: a copy may be on its way
    assert checking.resumed_from == tmp_path / "step_2" and (tmp_path / "step_7").is_dir()
    assert "it holds step 1; a run renames it, and step_2 is used" in caplog.text
    assert manager(tmp_path).find(True) == tmp_path / "step_2"
    assert "it holds step 1; it is now damaged_step_7, and step_2 is used" in caplog.text


def test_a_damaged_older_checkpoint_does_not_end_the_run(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=2)
    for step in (1, 2):
        save(checkpoints, step, val_accuracy=0.5)
    (tmp_path / "step_1" / "training_info.json").write_text("{")
    save(checkpoints, 3, val_accuracy=0.5)
    assert kept(tmp_path) == ["step_2", "step_3"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    for step in (1, 2):
        save(manager(tmp_path), step)
    monkeypatch.setattr(files, "READ_AGAIN_S", (0.0, 0.0))
    with monkeypatch.context() as patch:
        patch.setattr(files, "digest_file", failing(number, files.digest_file, "step_2"))
        with pytest.raises(ResumeError, match=f"step_2 is damaged: it cannot be read: .*{os.strerror(number)}"):
            manager(tmp_path).find(str(tmp_path / "step_2"))
        assert manager(tmp_path).find(True) == tmp_path / "step_1"
    assert "step_2 is passed over: it cannot be read" in caplog.text and "step_1 is used" in caplog.text
    assert manager(tmp_path).find(True) == tmp_path / "step_2"  # it was intact


@pytest.mark.parametrize("target", ["elsewhere", "step_2"])
def test_a_checkpoint_on_a_disk_that_is_away_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    save(manager(tmp_path), 1)
    (tmp_path / "step_2").symlink_to(target)
    monkeypatch.setattr(files, "READ_AGAIN_S", (0.0, 0.0))
    assert manager(tmp_path).find("auto") == tmp_path / "step_1"
    assert "step_2 is passed over: it cannot be read" in caplog.text and (tmp_path / "step_2").is_symlink()
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(ResumeError, match="step_2 is passed over: it cannot be read.* and there is no older one"):
        manager(tmp_path).find("auto")


@pytest.mark.parametrize("function", ["scandir", "open"])
def test_a_disk_that_fails_once_displaces_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """However many calls precede the one that fails."""
    save(manager(tmp_path), 1)
    monkeypatch.setattr(files, "READ_AGAIN_S", (0.0, 0.0))
    owner: Any = io if function == "open" else os
    original, calls, number_that_fails = getattr(owner, function), itertools.count(1), 0

    def failing_once(file: Any, *args: Any, **options: Any) -> Any:
        if "step_1" in str(file) and next(calls) == number_that_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return original(file, *args, **options)

    monkeypatch.setattr(owner, function, failing_once)
    while next(calls) > number_that_fails:  # the last look made as many calls
        calls, number_that_fails = itertools.count(1), number_that_fails + 1
        os.utime(tmp_path / "step_1" / "data.pt")  # what is known of the files as they were counts no more
        assert manager(tmp_path).find("auto") == tmp_path / "step_1"
    assert number_that_fails > 3


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(manager(tmp_path), step)
    spoil(tmp_path / "step_2" / "data.pt")
    monkeypatch.setattr(module.os, "replace", failing(errno.EROFS))
    assert manager(tmp_path).find("auto") == tmp_path / "step_1"
    assert "it stays where it is, since it cannot be renamed: Read-only file system" in caplog.text


@pytest.mark.parametrize("step_of_deletion", ["replace", "rmtree"])
def test_an_old_checkpoint_that_cannot_be_deleted_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step_of_deletion: str
) -> None:
    """The new one is saved. The old one is named once, and deleted as soon as that is possible."""
    checkpoints = manager(tmp_path, keep_top_k=1, metric_name=None)
    save(checkpoints, 1)
    replace, rmtree = os.replace, shutil.rmtree

    def busy(path: Path, *args: Any, **options: Any) -> None:
        if path.name in ("step_1", "tmp_old_step_1"):
            if options.get("ignore_errors"):
                return
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        (replace if args else rmtree)(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module.os if step_of_deletion == "replace" else module.shutil, step_of_deletion, busy)
        for step in (2, 3):
            assert save(checkpoints, step) == tmp_path / f"step_{step}"
    left = "step_1" if step_of_deletion == "replace" else "tmp_old_step_1"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted([left, "step_3"])
    assert caplog.text.count("step_1 cannot be deleted") == 1 and "it is tried again" in caplog.text
    assert save(checkpoints, 4) == tmp_path / "step_4"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step_4"]


def failing_at(patch: pytest.MonkeyPatch, folder: Path, number: int, *names: str) -> None:
    """Let these functions of `os` fail on `folder` itself, as on a disk that is gone."""
    for name in names:
        original = getattr(os, name)

        def fail(target: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            if path == str(folder):
                raise OSError(number, os.strerror(number), path)
            return original(target, *args, **options)

        patch.setattr(os, name, fail)


@pytest.mark.parametrize("function", ["fsync", "scandir"])
def test_what_fails_after_a_checkpoint_has_its_name_does_not_make_it_unwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    checkpoints = manager(tmp_path, keep_top_k=1, metric_name=None)
    save(checkpoints, 1)
    replace = os.replace
    with monkeypatch.context() as patch:

        def then_fail(source: Path, target: Path) -> None:
            replace(source, target)
            failing_at(patch, tmp_path, errno.EIO, function)

        patch.setattr(module.os, "replace", then_fail)
        assert save(checkpoints, 2) == tmp_path / "step_2"
    assert "step_2 is saved, but its folder could not be flushed and tidied up" in caplog.text
    assert kept(tmp_path) == ["step_1", "step_2"]  # an old one is deleted only once the new name is on the disk
    save(checkpoints, 3)
    assert kept(tmp_path) == ["step_3"]


def test_a_file_system_that_cannot_flush_folders_holds_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing_at(monkeypatch, tmp_path, errno.EINVAL, "fsync")
    save(manager(tmp_path), 1)
    assert manager(tmp_path).find(True) == tmp_path / "step_1" and not caplog.text


def test_a_folder_that_is_gone_is_said_in_place_of_what_to_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    failing_at(monkeypatch, tmp_path, errno.ESTALE, "scandir", "statvfs")
    with pytest.raises(NotWritten, match=r"step 2 was not written .*\n?.*the folder cannot be read either \(.*Stale"):
        save(checkpoints, 2)
    assert checkpoints.latest_if_readable(tmp_path / "step_1") == tmp_path / "step_1"
    assert f"{tmp_path} cannot be looked through" in caplog.text


def test_the_digests_of_a_checkpoint_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(manager(tmp_path), 1)
    assert manager(tmp_path).find(True) == folder
    monkeypatch.setattr(files, "digest_file", lambda *args: pytest.fail("again"))
    assert manager(tmp_path).find(str(folder)) == folder


def test_resume_without_a_checkpoint_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=f"no step_N folder in {tmp_path}"):
        manager(tmp_path).find(True)
    assert manager(tmp_path).find(None) is None


def test_resume_auto_resumes_if_there_is_a_checkpoint(tmp_path: Path) -> None:
    assert manager(tmp_path).find("auto") is None
    saved = save(manager(tmp_path), 4)
    assert manager(tmp_path).find("auto") == saved


def resuming(folder: Path, resume: str | bool | None) -> CheckpointManager:
    checkpoints = manager(folder)
    checkpoints.open(resume)
    return checkpoints


def test_after_a_rollback_what_was_saved_later_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4, 6):
        save(manager(tmp_path), step)
    for _ in range(2):
        with resuming(tmp_path, str(tmp_path / "step_2")).held():
            assert manager(tmp_path).find("auto") == tmp_path / "step_2"
            save(manager(tmp_path), 4)
    names = ["abandoned_step_4", "abandoned_step_4.2", "abandoned_step_6", "step_2", "step_4"]
    assert kept(tmp_path) == names
    assert "saved after step 2 is set aside as abandoned_step_4, abandoned_step_6" in caplog.text
    with resuming(tmp_path, True).held():
        assert kept(tmp_path) == [
            "abandoned_step_4",
            "abandoned_step_4.2",
            "abandoned_step_6",
            "in_use.json",
            *names[3:],
        ]


def test_looking_at_an_older_checkpoint_changes_nothing(tmp_path: Path) -> None:
    for step in (2, 4):
        save(manager(tmp_path), step)
    resuming(tmp_path, str(tmp_path / "step_2"))
    assert kept(tmp_path) == ["step_2", "step_4"]


def test_a_published_checkpoint_is_never_deleted_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one cannot get its name: the old one is still there, whole."""
    save(manager(tmp_path), 4)
    replace = os.replace

    def lost_power(source: Path, target: Path) -> None:
        if source.name == "tmp_step_4":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", lost_power)
    with pytest.raises(KeyboardInterrupt):
        save(manager(tmp_path), 4)
    assert checkpoint_files.damage(tmp_path / "abandoned_step_4") is None


@pytest.mark.parametrize(
    ("metrics", "why"), [({"val_accuracy": 0.0}, "the same"), ({}, "missing")], ids=["constant", "without validation"]
)
def test_a_metric_that_stands_still_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: dict[str, float], why: str
) -> None:
    checkpoints = manager(tmp_path, keep_top_k=2)
    for step in (1, 2, 3, 4):
        save(checkpoints, step, **metrics)
    assert kept(tmp_path) == ["step_3", "step_4"]
    (said,) = [line for line in caplog.messages if "metric_name" in line]
    assert f"val:accuracy is {why} in steps 1, 2, 3" in said


def test_the_metrics_that_there_are_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run of SFT has no val:accuracy, by which checkpoints are ranked unless a recipe says otherwise."""
    checkpoints = manager(tmp_path, keep_top_k=1)
    for step in (1, 2):
        save(checkpoints, step, val_val_loss=1.0, train_loss=2.0)
    assert "name another metric (there are val:val_loss), or set it to null" in caplog.text


def test_a_rename_is_on_the_disk_before_an_old_checkpoint_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, events = manager(tmp_path, keep_top_k=1, metric_name=None), list[str]()
    save(checkpoints, 1)
    for place in (module, checkpoint_files):
        monkeypatch.setattr(place, "sync_folder", lambda folder: events.append(folder.name))
    monkeypatch.setattr(module.shutil, "rmtree", lambda folder, **options: events.append(f"delete {folder.name}"))
    save(checkpoints, 2)
    assert events.index("tmp_step_2") < events.index(tmp_path.name) < events.index("delete tmp_old_step_1")
    assert "policy" in events


def left_by_another_run(folder: Path, name: str) -> Path:
    model = folder / name
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"of another run")
    return model


@pytest.mark.parametrize(
    ("left", "written"), [("hf", ("hf",)), ("hf_step_4", ("hf_step_*",)), ("hf", ()), ("hf_step_4", ("hf",))]
)
def test_a_model_of_another_run_is_refused_before_the_start(
    tmp_path: Path, left: str, written: tuple[str, ...]
) -> None:
    model = left_by_another_run(tmp_path / "a", left)
    elsewhere = save(manager(tmp_path / "b"), 3)
    replaced = any(model.match(pattern) for pattern in written)
    for resume in (None, "auto", str(elsewhere)):
        checkpoints = manager(tmp_path / "a")
        if replaced:
            with pytest.raises(ResumeError, match=rf"{tmp_path}/a holds {left}, a model of another run.*move it away"):
                checkpoints.open(resume, models=written)
        else:
            checkpoints.open(resume, models=written)
    assert (model / "model.safetensors").read_bytes() == b"of another run"


def test_a_model_that_another_run_has_written_meanwhile_is_set_aside(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    late = manager(tmp_path, enabled=False)
    late.open(None, models=("hf",))
    left_by_another_run(tmp_path, "hf")
    assert late.make_way("hf") == tmp_path / "hf"
    assert kept(tmp_path) == ["abandoned_hf"] and "it is set aside as abandoned_hf" in package_log.text
    save(manager(tmp_path), 1)
    left_by_another_run(tmp_path, "hf")
    goes_on = manager(tmp_path)
    goes_on.open(True, models=("hf",))
    goes_on.make_way("hf")
    assert "hf" in kept(tmp_path), "its own, which it replaces"


def test_a_run_that_goes_on_replaces_its_own_model_and_a_rollback_sets_the_newer_one_aside(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    for step in (1, 2):
        save(checkpoints, step)
    for name in ("hf", "hf_step_1", "hf_step_2"):
        left_by_another_run(tmp_path, name)
    goes_on = manager(tmp_path)
    goes_on.open(True, models=("hf",))
    with goes_on.held():
        assert {"hf", "hf_step_1", "hf_step_2"} <= set(kept(tmp_path))
    goes_back = manager(tmp_path)
    goes_back.open(str(tmp_path / "step_1"), models=("hf",))
    with goes_back.held():
        there = set(kept(tmp_path))
    assert there == {"step_1", "hf_step_1", "abandoned_step_2", "abandoned_hf", "abandoned_hf_step_2", "in_use.json"}


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, r"GB are free there; the run goes on. Delete what you do not need of step_1"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "may not write there: chmod or chown"),
        (errno.ENOENT, "was removed while the run goes on"),
        (errno.EIO, "the disk fails"),
    ],
)
def test_good_checkpoints_are_not_to_be_deleted_where_room_is_not_the_trouble(
    tmp_path: Path, number: int, advice: str
) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(NotWritten) as raised, checkpoints.writing(2):
        raise RuntimeError("a rank failed") from OSError(number, os.strerror(number), str(tmp_path / "step_2"))
    assert re.search(advice, str(raised.value))
    assert ("Delete" in str(raised.value)) == (number == errno.ENOSPC)
