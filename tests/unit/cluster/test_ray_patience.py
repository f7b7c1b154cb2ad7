"""A start of Ray that takes long on a loaded machine is waited for, once, and says what it waits for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray._private import services

from grpo_mcore.cluster import DeadlineExceeded, ray_session


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(ray_session, "time", clock)
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
