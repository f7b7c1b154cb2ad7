"""Only one run at a time works in a folder; one that died does not block the next."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.driver.checkpoints import lease as lease_module
from grpo_mcore.driver.checkpoints.checkpoint_files import ResumeError, RunSnapshot
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.driver.checkpoints.lease import LEASE_FILE, FolderInUse, Holder, Lease, LeaseLost, dead_holder
from tests.failing import failing
from tests.unit.driver.checkpoints.saving import RECIPE, manager, save_now, write_policy
from tests.waiting import wait_until

HOLD = "import sys, pathlib, time; from grpo_mcore.driver.checkpoints.lease import Lease; "
HOLD += "lease = Lease(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(100)"


def write(folder: Path, holder: Holder) -> None:
    (folder / LEASE_FILE).write_text(json.dumps(asdict(holder)))


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder in which every user may write: those of `tmp_path` are closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


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
    wait_until(lambda: Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
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


TAKE_AS_ANOTHER = """
import os, pathlib, sys
from grpo_mcore.driver.checkpoints.lease import FolderInUse, Lease
os.setgroups([]), os.setgid(12345), os.setuid(12345)
try:
    with Lease(pathlib.Path(sys.argv[1]), beat_s=0.05, stale_s=1.0):
        print("taken over")
except FolderInUse as error:
    print(f"refused: {error}")
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a /proc, and becomes another user")


def take_as_another_user(folder: Path, hidepid: int) -> str:
    """Take a lease as another user, from whom /proc hides the processes of this one. The mount is the child's alone: a
    remount of /proc would change the machine's."""
    mount = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", TAKE_AS_ANOTHER, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_root
@pytest.mark.parametrize("hidepid", [0, 1, 2])
def test_a_living_holder_that_proc_hides_keeps_the_folder(public_folder: Path, hidepid: int) -> None:
    with Lease(public_folder, beat_s=0.05) as lease:
        assert take_as_another_user(public_folder, hidepid).startswith("refused: ")
        lease.check()


@needs_root
@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_dead_holder_does_not_block_the_next_where_proc_hides(public_folder: Path, hidepid: int) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for holder in (replace(Holder.this_process(), pid=ended.pid), Holder.this_process()):  # the latter does not beat
        write(public_folder, holder)
        assert take_as_another_user(public_folder, hidepid) == "taken over\n"


def test_a_process_of_this_user_that_proc_hides_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with secrets of its own (not dumpable) is hidden from its own user too."""
    write(tmp_path, Holder.this_process())
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "_state_and_start", failing(errno.EPERM))
        holder = dead_holder(tmp_path, beat_s=0.05, stale_s=0.2)
    assert holder is not None and holder.pid == os.getpid()


def test_a_proc_without_the_boot_id_tells_of_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc that is mounted with subset=pid."""
    monkeypatch.setattr(Path, "read_text", failing(errno.ENOENT, Path.read_text, "boot_id"))
    with Lease(tmp_path, beat_s=0.05) as lease:
        with pytest.raises(FolderInUse):
            Lease(tmp_path, beat_s=0.05, stale_s=1.0)
        lease.check()


def test_a_lease_that_may_not_be_read_is_another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, Holder.this_process())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing(errno.EACCES))
        with pytest.raises(FolderInUse, match=f"of another user, whose {LEASE_FILE} this one may not read"):
            dead_holder(tmp_path)


def test_it_beats(tmp_path: Path) -> None:
    with Lease(tmp_path, beat_s=0.01):
        file = tmp_path / LEASE_FILE
        os.utime(file, (0, 0))
        wait_until(lambda: file.stat().st_mtime)


@pytest.mark.parametrize("left", ["a dead run's file", "half a file", "nothing"])
def test_of_many_starts_at_a_time_one_gets_the_folder(tmp_path: Path, left: str) -> None:
    """Whether the thread that looked first or last takes it over, no two hold it."""
    for _ in range(15):
        if left == "a dead run's file":
            write(tmp_path, replace(Holder.this_process(), start_tick=1))
        elif left == "half a file":
            (tmp_path / LEASE_FILE).write_text('{"host"')
        leases, refused = list[Lease](), list[Exception]()

        def take(_: int, leases: list[Lease] = leases, refused: list[Exception] = refused) -> None:
            try:
                leases.append(Lease(tmp_path))
            except FolderInUse as error:
                refused.append(error)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(take, range(4)))
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
    with Lease(tmp_path) as lease:
        monkeypatch.setattr(Path, function, failing(errno.EIO, getattr(Path, function), LEASE_FILE))
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
