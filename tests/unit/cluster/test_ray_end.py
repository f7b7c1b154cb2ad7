"""The end of a run under Ray: what cannot be cleaned up is said, and what the run has done stands."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from grpo_mcore.cluster import ray_session
from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.cluster.ray_session import RaySession


def test_processes_that_do_not_end_in_time_are_said(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    session = object.__new__(RaySession)
    session.started_here = True
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
