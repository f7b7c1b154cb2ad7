"""The parts of the Ray cluster that need no Ray: environment, errors, stacks, ports, ranks, the orphan_reaper."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_mcore.cluster import DeadlineExceeded, WorkerFailed, orphan_reaper
from grpo_mcore.cluster.environment import chosen, is_allowed, only_allowed
from grpo_mcore.cluster.host import RemoteFailure
from grpo_mcore.cluster.reports import log_tail, own_frames, stacks
from grpo_mcore.rollout.workers import Place


@pytest.mark.parametrize("name", ["PATH", "HF_HOME", "LC_ALL", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME"])
def test_what_workers_need_is_allowed(name):
    assert is_allowed(name)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PATH", "PATHX", "SSH_AUTH_SOCK"]
)
def test_secrets_and_strangers_are_not(name):
    assert not is_allowed(name)
    assert is_allowed(name, extra=[name])


def test_more_variables_by_name_and_pattern():
    environ = {"A_ONE": "1", "A_TWO": "2", "B": "3"}
    assert chosen(environ, ["A_*"]) == {"A_ONE": "1", "A_TWO": "2"}
    assert chosen(environ, ["B", "MISSING"]) == {"B": "3"}
    assert chosen(environ, []) == {}


def test_the_rest_is_hidden_inside_only(monkeypatch):
    monkeypatch.setenv("GRPO_TEST_SECRET", "x")
    monkeypatch.setenv("GRPO_TEST_WANTED", "y")
    with pytest.raises(KeyError), only_allowed(["GRPO_TEST_WANTED"]):
        assert "GRPO_TEST_SECRET" not in os.environ
        child = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
        assert "GRPO_TEST_SECRET" not in child and "GRPO_TEST_WANTED=y" in child and "PATH=" in child
        raise KeyError
    assert os.environ["GRPO_TEST_SECRET"] == "x"


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("w", "a", 1.5, "detail"), WorkerFailed("a", "w", "cause", "detail")]
)
def test_errors_travel_between_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_failure_carries_text_and_the_exception_itself():
    failure = pickle.loads(pickle.dumps(RemoteFailure.of(raised(ValueError("gone")))))
    assert failure.cause == "ValueError: gone" and failure.trace.endswith("ValueError: gone")
    assert isinstance(failure.original(), ValueError)


class TwoArguments(Exception):
    """Can be pickled but not unpickled, as many libraries' exceptions."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_a_failure_whose_exception_cannot_be_unpickled_is_text():
    failure = pickle.loads(pickle.dumps(RemoteFailure.of(raised(TwoArguments(1, 2)))))
    assert failure.cause == "TwoArguments: 1 and 2" and failure.original() is None


def test_neighbouring_ranks_share_a_node():
    from grpo_mcore.cluster.ray_placement import rank_order

    assert rank_order(["x", "x"]) == [(0, 0), (1, 1)]
    assert rank_order(["y", "x", "y", "x"]) == [(0, 0), (2, 1), (1, 0), (3, 1)]
    # A bundle that is a node's share of the ranks holds several.
    assert rank_order(["y", "x"], 4) == [(0, 0), (0, 1), (1, 0), (1, 1)]


DUMP = """\
Thread 0x00007f606a7fc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/venv/lib/site-packages/ray/_private/gc_collect_manager.py", line 29 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f606a7fc6c1 (most recent call first):
  File "/venv/lib/site-packages/vllm/engine.py", line 5 in poll
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f60b3450b80 (most recent call first):
  File "/venv/lib/site-packages/torch/distributed/distributed_c10d.py", line 97 in barrier
  File "/src/policy.py", line 7 in train
  File "/src/grpo_mcore/cluster/host.py", line 113 in call
  File "/venv/lib/site-packages/ray/_private/worker.py", line 1069 in main_loop
"""


def test_stacks_show_what_is_ours():
    assert own_frames(DUMP) == (
        '  File "/venv/lib/site-packages/vllm/engine.py", line 5 in poll\n'
        '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n'
        "  another thread:\n"
        '  File "/venv/lib/site-packages/torch/distributed/distributed_c10d.py", line 97 in barrier\n'
        '  File "/src/policy.py", line 7 in train'
    )
    assert own_frames("") == ""


def test_no_other_process_is_asked_for_its_stacks(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("")
    # this very process: a signal would end it
    place = Place("node", "10.0.0.1", os.getpid(), (), str(log))
    assert stacks("policy-0", place) == f"policy-0 is on 10.0.0.1, its log: {log}"


def test_the_end_of_a_log(tmp_path):
    log = tmp_path / "worker.log"
    assert log_tail(str(log)) == f"its log is on its node: {log}"
    log.write_text(":job_id:01\n:actor_name:x\n")
    assert log_tail(str(log)) == f"its log is empty: {log}"
    log.write_text("\n".join(f"line {number}" for number in range(5000)))
    assert log_tail(str(log), lines=2) == f"end of its log, {log}:\n    line 4998\n    line 4999"


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@needs_proc
def test_the_sweep_ends_marked_processes_and_no_others():
    mark = f"GRPO_TEST_MARK={os.getpid()}-{time.time_ns()}"
    name, _, value = mark.partition("=")
    other = subprocess.Popen(["sleep", "60"])
    one = subprocess.Popen(["sleep", "60"], env={**os.environ, name: value}, start_new_session=True)
    longer = subprocess.Popen(["sleep", "60"], env={**os.environ, name: f"{value}0"})
    try:
        assert orphan_reaper.marked(mark) == [one.pid]
        assert orphan_reaper.sweep(mark) == []
        assert one.wait(5) == -9 and other.poll() is None and longer.poll() is None
    finally:
        for process in (other, longer):
            process.kill()
            process.wait()


@pytest.mark.slow
@needs_proc
def test_the_sweeper_beside_a_driver_acts_when_that_is_gone(tmp_path):
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
    assert len(orphan_reaper.marked(mark)) == 1 and folder.exists()  # it waits as long as the driver lives
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while (orphan_reaper.marked(mark) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not orphan_reaper.marked(mark) and not folder.exists()
    shutil.rmtree(folder, ignore_errors=True)


def test_the_room_loads_without_ray_and_torch():
    code = "import sys, grpo_mcore.cluster; sys.exit(any(m in sys.modules for m in ('ray', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
