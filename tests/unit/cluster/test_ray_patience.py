"""A start of Ray that takes long on a loaded machine is waited for, once, and says what it waits for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services

from grpo_mcore.cluster import DeadlineExceeded, NodeLost, ray_session


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(ray_session, "time", clock)
    monkeypatch.setattr(ray_session, "_has_node_process", lambda: True)
    return now


def test_a_late_node_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, now: list[float]
) -> None:
    def get_node(address: str) -> str:
        if now[0] < 100:
            raise RuntimeError("no such node")
        return f"the node at {address}"

    monkeypatch.setattr(services, "get_node", get_node)
    with caplog.at_level("INFO", "grpo_mcore"), ray_session._patience(150.0):
        assert services.get_node("here") == "the node at here"
    assert services.get_node is get_node and 100 <= now[0] < 101
    assert (
        len(caplog.messages) == 4 and "after 20 s: its node process (raylet) has not registered" in caplog.messages[0]
    )


def test_patience_ends(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    def get_node(address: str) -> str:
        raise RuntimeError("no such node")

    monkeypatch.setattr(services, "get_node", get_node)
    with (
        ray_session._patience(150.0),
        pytest.raises(DeadlineExceeded, match=r"start of Ray: no answer from its node process \(raylet\) within 150 s"),
    ):
        services.get_node("here")
    assert 150 < now[0] < 152


@pytest.mark.parametrize("ends", [2, 3])
def test_a_node_process_that_ends_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture, ends: int
) -> None:
    """Nobody waits for a process that is gone. After three of them the start is given up."""
    logs = tmp_path / "r" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("(raylet) Check failed: has_value() Timed out waiting for file port\n")
    starts: list[int] = []

    def get_node() -> str:
        if len(starts) <= ends:
            raise RuntimeError("no such node")
        return "the node"

    def init(**options: Any) -> None:
        starts.append(1)
        with contextlib.suppress(RuntimeError):  # Ray goes on asking after one, and ends with an error of its own
            assert services.get_node() == "the node"
            return
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(services, "get_node", get_node)  # this process has no child called raylet
    monkeypatch.setattr(ray_session.ray, "init", init)
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: None)
    session = object.__new__(ray_session.RaySession)
    reaper: Any = SimpleNamespace(folder=tmp_path, mark="RUN=none")
    session.reaper = reaper
    if ends == 2:
        session._start(600.0, None, None)
    else:
        with pytest.raises(NodeLost, match=r"ended while it started: .*Timed out .*; that was 3 times in a row"):
            session._start(600.0, None, None)
    assert len(starts) == 3 and package_log.text.count("; Ray is started again") == 2
