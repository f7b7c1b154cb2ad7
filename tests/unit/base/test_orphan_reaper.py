"""The processes and files of a run are removed, even when its driver is killed."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_mcore.base import orphan_reaper
from tests.waiting import wait_until

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@needs_proc
def test_marked_processes_are_ended_and_no_others():
    mark = f"GRPO_TEST_MARK={os.getpid()}-{time.time_ns()}"
    name, _, value = mark.partition("=")
    other = subprocess.Popen(["sleep", "60"])
    one = subprocess.Popen(["sleep", "60"], env={**os.environ, name: value}, start_new_session=True)
    longer = subprocess.Popen(["sleep", "60"], env={**os.environ, name: f"{value}0"})
    try:
        assert orphan_reaper.marked(mark) == [one.pid]
        assert orphan_reaper.end_marked(mark) == []
        assert one.wait(60) == -9 and other.poll() is None and longer.poll() is None
    finally:
        for process in (other, longer):
            process.kill()
            process.wait()


@needs_proc
def test_the_shared_memory_of_killed_processes_is_removed():
    mark = f"GRPO_TEST_MARK={os.getpid()}-{time.time_ns()}"
    name, _, value = mark.partition("=")
    code = "import time; from multiprocessing.shared_memory import SharedMemory\n"
    code += "memory = SharedMemory(create=True, size=4096); print(memory.name, flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, name: value}
    )
    try:
        assert process.stdout is not None
        segment = Path("/dev/shm", process.stdout.readline().strip())
        wait_until(lambda: any(map(orphan_reaper.is_tracker, orphan_reaper.marked(mark))), "the tracker", pause=0.02)
        assert segment.is_file()
        assert orphan_reaper.end_marked(mark) == []
        assert process.wait(60) == -9 and not segment.exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@needs_proc
def test_the_program_acts_when_its_driver_is_gone(tmp_path):
    mark = f"GRPO_TEST_MARK={os.getpid()}-{time.time_ns()}"
    folder = tmp_path / "session"
    folder.mkdir()
    driver = f"""
import os, subprocess, sys, time
orphan_reaper = [sys.executable, "-I", "-S", {orphan_reaper.__file__!r}, str(os.getpid()), {mark!r}, {str(folder)!r}]
subprocess.Popen(orphan_reaper, start_new_session=True)
name, _, value = {mark!r}.partition("=")
subprocess.Popen(["sleep", "60"], env={{name: value}})
print("up", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]})
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    time.sleep(0.6)
    assert len(orphan_reaper.marked(mark)) == 1 and folder.exists()  # it waits while the driver lives
    process.kill()
    process.wait()
    wait_until(lambda: not orphan_reaper.marked(mark) and not folder.exists(), "the end of all", pause=0.05)
    shutil.rmtree(folder, ignore_errors=True)


def test_the_files_of_a_long_run_look_new(tmp_path: Path) -> None:
    """Programs such as tmpreaper remove old ones from the temporary folder."""
    (tmp_path / "sockets").mkdir()
    (tmp_path / "sockets" / "raylet").touch()
    (tmp_path / "latest").symlink_to("nowhere")
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        os.utime(path, (1, 1), follow_symlinks=False)
    orphan_reaper.touch(str(tmp_path))
    assert len(paths) == 4 and all(time.time() - path.lstat().st_mtime < 60 for path in paths)
    orphan_reaper.touch(str(tmp_path / "gone"))
