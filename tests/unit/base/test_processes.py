"""Child processes are ended, die with their parent and are described; ports are free."""

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from grpo_mcore.base import processes
from grpo_mcore.base.processes import describe_exit, end, free_port, wait
from tests.waiting import wait_until

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[str]]:
    """A process that ignores SIGTERM."""
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    yield child
    child.kill()
    child.communicate()


def wait_for_the_end_of(pid: int) -> None:
    """A process that is nobody's child here may stay a zombie until init reaps it."""
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_free_port_is_free_and_not_one_of_outgoing_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PORTS", range(20000, 20002))
    port = free_port()
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        another = free_port("127.0.0.1")
        assert another != port
        other.bind(("127.0.0.1", another))
        other.listen()
        with pytest.raises(OSError, match="no free port from 20000 to 20001 at 127.0.0.1"):
            free_port()


def test_sigterm_comes_first() -> None:
    obedient = subprocess.Popen(["sleep", "600"])
    # not "fork": Ray, which other tests start here, leaves a handler of SIGTERM that a forked child would inherit
    forked = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    forked.start()
    assert end([obedient, forked], grace_s=60) == []
    assert (obedient.returncode, forked.exitcode) == (-signal.SIGTERM, -signal.SIGTERM)
    assert end([obedient, forked]) == [], "ending what has ended is no error"


def test_sigkill_comes_after_the_grace_period(stubborn: subprocess.Popen[str]) -> None:
    assert end([stubborn], grace_s=0.5) == []
    assert stubborn.returncode == -signal.SIGKILL


def test_without_a_grace_period_sigkill_comes_at_once(stubborn: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    assert end([stubborn], grace_s=0) == [] and time.monotonic() - began < 30, "not after the minute that it sleeps"


def test_waiting_returns_what_still_runs(stubborn: subprocess.Popen[str]) -> None:
    short = subprocess.Popen(["true"])
    assert wait([short, stubborn], timeout_s=1.0) == [stubborn]
    assert wait([short], timeout_s=0) == []


def test_a_tree_is_ended_by_its_processes() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; sleep 60; true"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    tree = processes.descendants(child.pid)
    assert grandchild in [process.pid for process in tree]
    assert child.pid in [process.pid for process in processes.descendants()]
    assert end([*tree, child]) == []
    child.stdout.close()
    wait_for_the_end_of(grandchild)
    assert processes.descendants(child.pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("before", [False, True], ids=["while it runs", "before it has asked"])
def test_a_child_dies_with_its_parent(before: bool) -> None:
    child = "import os, sys, time; from grpo_mcore.base.processes import die_with_parent;"
    child += "print(os.getpid(), flush=True);"
    asks = "die_with_parent(int(sys.argv[1])); print('asked', flush=True); time.sleep(60)"
    child += f"time.sleep(1); {asks}" if before else asks
    parent = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    driver = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    assert before or driver.stdout.readline() == "asked\n"
    driver.kill()
    driver.wait()
    assert driver.stdout.read() == "", "the pipe closes with its last writer"
    wait_for_the_end_of(pid)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "is still running"),
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-77, "killed by signal 77"),
    ],
)
def test_how_a_process_ended(code: int | None, text: str) -> None:
    assert describe_exit(code) == text


CORES = float(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, CORES),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000\n"}, CORES),
        # the tightest of a job's group and those above it counts
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "25000 100000",
                "sys/fs/cgroup/job/step/cpu.max": "75000 100000",
                "sys/fs/cgroup/cpu.max": "max 100000",
            },
            0.25,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "?"}, CORES),
    ],
    ids=["no control groups", "quota", "no quota", "nested", "version 1", "unreadable"],
)
def test_a_quota_of_processor_time_bounds_the_cores(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processes.available_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("text", "kept"), [("0-1,64-65\n", {0, 1}), ("1\n", {1}), ("64-127\n", None), ("\n", None), (None, None)]
)
def test_a_rank_runs_beside_its_gpu(tmp_path: Path, text: str | None, kept: set[int] | None) -> None:
    """But not outside the cores that a batch job or container leaves it, and anywhere if nothing says where the GPU is.
    In a thread of its own, whose cores are not those of the others."""
    before = os.sched_getaffinity(0)
    if not {0, 1} <= before:
        pytest.skip("cores 0 and 1 are not this process's")
    if text is not None:
        (folder := tmp_path / "sys/bus/pci/devices/0001:1b:00.0").mkdir(parents=True)
        (folder / "local_cpulist").write_text(text)
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(processes.bind_near_gpu, gpu, tmp_path).result()
        found = pool.submit(os.sched_getaffinity, 0).result()
    assert found == (before if kept is None else kept) and os.sched_getaffinity(0) == before


def garbage_is_collected_rarely() -> None:
    before = gc.get_threshold()

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    there = Cycle()
    with pytest.raises(KeyError), processes.rare_collections():
        assert gc.get_threshold()[0] == processes.COLLECT_AFTER_WITHOUT_TENSORS
        assert all(known is not there for known in gc.get_objects()), "nobody looks at what was there before"
        gone = weakref.ref(Cycle())
        _objects = [Cycle() for _ in range(processes.COLLECT_AFTER_WITHOUT_TENSORS // 4)]
        assert gone() is not None  # by default it were collected by now
        gc.collect()
        assert gone() is None
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
    processes.COLLECT_EVERY_S = 0.01
    with processes.rare_collections():
        gone = weakref.ref(Cycle())
        wait_until(lambda: gone() is None, "a collection, which comes now and then all the same")


def test_garbage_is_collected_rarely_and_as_before_afterwards() -> None:
    """In a process of its own: what other tests have imported has settings of its own for the collection."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(garbage_is_collected_rarely).result(timeout=100)


LOOK_AS_ANOTHER = """
import os, subprocess
from grpo_mcore.base.processes import descendants
os.setgroups([]), os.setgid(12345), os.setuid(12345)
child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], stdout=subprocess.PIPE, process_group=0)
while sorted(process.name() for process in descendants()) != ["sh", "sleep"]:
    pass
print("found")
os.killpg(child.pid, 9)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a /proc, and becomes another user")
@pytest.mark.parametrize("hidepid", [1, 2])
def test_descendants_are_found_where_other_users_processes_are_hidden(hidepid: int) -> None:
    mount = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'  # in the child's namespace alone
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", LOOK_AS_ANOTHER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("found\n", 0), done.stderr
