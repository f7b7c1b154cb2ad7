"""Only one run at a time works in a folder; one that died does not block the next."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.driver.checkpoints.checkpoint_files import ResumeError, RunSnapshot
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.checkpoints.lease import LEASE_FILE, FolderInUse, Holder, Lease, LeaseLost
from tests.unit.driver.checkpoints.saving import RECIPE, manager, save_now, write_policy

HOLD = "import sys, pathlib, time; from grpo_mcore.driver.checkpoints.lease import Lease; "
HOLD += "lease = Lease(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(100)"


def write(folder: Path, holder: Holder) -> None:
    (folder / LEASE_FILE).write_text(json.dumps(asdict(holder)))


def test_the_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        with pytest.raises(FolderInUse, match=rf"{tmp_path} is in use by process {os.getpid()} on .* since 2"):
            Lease(tmp_path)
        lease.check()
        assert os.listdir(tmp_path) == [LEASE_FILE]
    assert not os.listdir(tmp_path)
    lease.release()
    with Lease(tmp_path):
        pass


def test_a_run_that_was_killed_does_not_block_the_next(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    with pytest.raises(FolderInUse, match=f"process {first.pid} on"):
        Lease(tmp_path)
    first.kill()
    while Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    with Lease(tmp_path):  # it is dead, also if its parent has not waited for it yet
        pass
    first.wait()


def test_another_process_with_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    write(tmp_path, replace(Holder.this_process(), start_tick=1))
    with Lease(tmp_path) as lease:
        lease.check()


def test_a_holder_on_another_machine_is_watched(tmp_path: Path) -> None:
    other = replace(Holder.this_process(), machine="another", host="node-7")
    write(tmp_path, other)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(tmp_path / LEASE_FILE)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(FolderInUse, match="on node-7"):
        Lease(tmp_path, beat_s=0.05, stale_s=0.5)
    ended.set()
    thread.join()
    os.utime(tmp_path / LEASE_FILE, (2e9, 2e9))  # its clock is ahead: no clock is compared
    with Lease(tmp_path, beat_s=0.05, stale_s=0.2) as lease:
        lease.check()


def test_it_beats(tmp_path: Path) -> None:
    with Lease(tmp_path, beat_s=0.01):
        file = tmp_path / LEASE_FILE
        os.utime(file, (0, 0))
        deadline = time.monotonic() + 10
        while file.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("left", ["a dead run's file", "half a file", "nothing"])
def test_of_many_starts_at_a_time_one_gets_the_folder(tmp_path: Path, left: str) -> None:
    """Whether the thread that looked first or last takes it over, no two hold it."""
    for _ in range(15):
        if left == "a dead run's file":
            write(tmp_path, replace(Holder.this_process(), start_tick=1))
        elif left == "half a file":
            (tmp_path / LEASE_FILE).write_text('{"host"')
        leases, refused = list[Lease](), list[Exception]()

        def take(leases: list[Lease] = leases, refused: list[Exception] = refused) -> None:
            try:
                leases.append(Lease(tmp_path))
            except FolderInUse as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(leases), len(refused)) == (1, 3)
        leases[0].check()
        leases[0].release()
    assert not os.listdir(tmp_path)


def test_a_run_that_stood_still_and_lost_the_folder_publishes_nothing(tmp_path: Path) -> None:
    checkpoints: CheckpointManager = manager(tmp_path)
    with checkpoints.held():
        write(tmp_path, replace(Holder.this_process(), token="another", host="node-8"))
        with pytest.raises(LeaseLost, match="held by another run by now .*on node-8"):
            save_now(checkpoints, 1, write_policy, RunSnapshot({}, {}, {}), RECIPE)
    assert not list(tmp_path.glob("step_*")) and (tmp_path / LEASE_FILE).is_file()


def test_a_start_touches_no_checkpoint_of_a_run_that_trains(tmp_path: Path) -> None:
    """One that is being deleted looks damaged."""
    running = manager(tmp_path)
    with running.held():
        save_now(running, 1, write_policy, RunSnapshot({}, {}, {}), RECIPE)
        (tmp_path / "step_1" / "training_info.json").unlink()
        for resume in ("auto", None):
            with pytest.raises(FolderInUse):
                manager(tmp_path).open(resume)
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_start_does_not_go_back_behind_what_another_has_just_saved(tmp_path: Path) -> None:
    save = (write_policy, RunSnapshot({"current_step": 1}, {}, {}), RECIPE)
    save_now(manager(tmp_path), 1, *save)
    late, quick = manager(tmp_path), manager(tmp_path)
    late.open("auto")
    quick.open("auto")
    with quick.held():
        save_now(quick, 2, *save)
    with pytest.raises(ResumeError, match="another run has written .*step_2 while"), late.held():
        pass


@pytest.mark.parametrize("function", ["read_text", "unlink"])
def test_a_disk_that_is_gone_does_not_end_a_run_by_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    """The run has ended well: that its file stays is said. The next one sees that its holder is dead."""
    original = getattr(Path, function)

    def gone(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == LEASE_FILE:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return original(path, *args, **options)

    with Lease(tmp_path) as lease:
        monkeypatch.setattr(Path, function, gone)
        lease.check()
    assert f"{LEASE_FILE} cannot be removed: [Errno 5] Input/output error" in caplog.text


def test_a_start_whose_disk_fails_leaves_the_folder_to_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of this process, which lives."""
    original, reads = Path.read_text, 0

    def fails_once(path: Path, *args: Any, **options: Any) -> str:
        nonlocal reads
        reads += path.name == LEASE_FILE
        if path.name == LEASE_FILE and reads == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return original(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", fails_once)
    with pytest.raises(OSError, match="Input/output error"):
        Lease(tmp_path)
    with Lease(tmp_path):
        pass
