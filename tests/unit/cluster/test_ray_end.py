"""The end of a run under Ray: what cannot be cleaned up is said, and what the run has done stands. A node process
that hangs does not keep the driver for ever."""

import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from grpo_mcore.cluster import ray_session
from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.cluster.ray_session import NodeWatch, RaySession


def test_processes_that_do_not_end_in_time_are_said(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    session = object.__new__(RaySession)
    session.started_here, session._watch = True, None
    reaper: Any = SimpleNamespace(mark="RUN=none", close=lambda: [4711])
    session.reaper = reaper
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: None)
    session.close()
    assert "processes of this run have not ended 5 s after they were killed: [4711]" in package_log.text


def test_a_ray_that_died_after_the_last_step_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []
    cluster = object.__new__(RayCluster)
    parts = {
        "_session": SimpleNamespace(close=lambda: closed.append("session")),
        "_answering": SimpleNamespace(close=lambda: closed.append("answering")),
        "_process": os.getpid(),
        "_inspection": threading.Thread(),
        "_workers": {},
    }
    vars(cluster).update(parts)

    def gone(workers: Any) -> None:
        raise RaySystemError("the GCS is gone")

    monkeypatch.setattr(cluster, "stop", gone)
    cluster.shutdown()
    cluster.shutdown()  # may be called again
    assert closed == ["answering", "session"]
    assert "could not be ended in order: RaySystemError" in package_log.text


def test_a_node_process_that_the_head_has_given_up_is_ended(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    """Also one that is stopped, and no other one."""
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    ours, others = (
        subprocess.Popen(["bash", "-c", f"exec -a --node_id={node} {program} 60"]) for node in ("1234", "5678")
    )
    answers = iter([True, False, True, False, ConnectionError("the head is away"), False])

    def lives() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        while any(Path(f"/proc/{each.pid}/comm").read_text() != "raylet\n" for each in (ours, others)):
            time.sleep(0.01)
        ours.send_signal(signal.SIGSTOP)
        watch = NodeWatch(lives, "1234", period_s=0.01)
        watch.start()
        assert ours.wait(20) == -signal.SIGKILL and others.poll() is None
        watch.join(20)
        assert not watch.is_alive() and "Ray has given up this machine" in package_log.text
    finally:
        for each in (ours, others):
            each.kill()
            each.wait()
