"""A node process that is late on a loaded machine is waited for; one that ends while it starts is started again."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.cluster import DeadlineExceeded, NodeLost, ray_session

TIMED_OUT = Exception("The current node timed out during startup. This could happen because ...")
LATE_NODE = {"gcs-address": "10.0.0.1:6379"}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ray_session.RaySession:
    logs = tmp_path / "r" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("(raylet) Check failed: has_value() Timed out waiting for file port\n")
    monkeypatch.setattr(ray_session.ray, "shutdown", lambda: None)
    session = object.__new__(ray_session.RaySession)
    reaper: Any = SimpleNamespace(folder=tmp_path, mark="RUN=none")
    session.reaper = reaper
    return session


def starts(monkeypatch: pytest.MonkeyPatch, *answers: Exception | None) -> list[str]:
    """Let `ray.init` raise these, one a call, and return the addresses that it was called with."""
    addresses: list[str] = []

    def init(address: str, **options: Any) -> None:
        addresses.append(address)
        if (answer := answers[len(addresses) - 1]) is not None:
            raise answer

    monkeypatch.setattr(ray_session.ray, "init", init)
    monkeypatch.setattr(ray_session.time, "sleep", lambda seconds: None)
    return addresses


def test_a_late_node_is_joined(monkeypatch: pytest.MonkeyPatch, session: ray_session.RaySession) -> None:
    addresses = starts(monkeypatch, TIMED_OUT, RuntimeError("no node info found"), None)
    monkeypatch.setattr(ray_session, "_words_of_node_process", lambda: LATE_NODE)
    session._start(600.0, None, None)
    assert addresses == ["local", "10.0.0.1:6379", "10.0.0.1:6379"]


def test_patience_ends(monkeypatch: pytest.MonkeyPatch, session: ray_session.RaySession) -> None:
    starts(monkeypatch, TIMED_OUT, RuntimeError("no node info found"))
    monkeypatch.setattr(ray_session, "_words_of_node_process", lambda: LATE_NODE)
    message = r"start of Ray: no answer from its node process \(raylet\) within 0 s"
    with pytest.raises(DeadlineExceeded, match=message):
        session._start(0.0, None, None)


@pytest.mark.parametrize("ends", [2, 3])
def test_a_node_process_that_ends_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture, session: ray_session.RaySession, ends: int
) -> None:
    """After three of them the start is given up."""
    addresses = starts(monkeypatch, *[TIMED_OUT] * ends, None)  # this process has no child called raylet
    if ends == 2:
        session._start(600.0, None, None)
    else:
        with pytest.raises(NodeLost, match=r"ended while it started: .*Timed out .*; that was 3 times in a row"):
            session._start(600.0, None, None)
    assert addresses == ["local"] * 3 and package_log.text.count("; Ray is started again") == 2


def test_another_error_of_ray_is_raised(monkeypatch: pytest.MonkeyPatch, session: ray_session.RaySession) -> None:
    starts(monkeypatch, ValueError("not enough memory"))
    with pytest.raises(ValueError, match="not enough memory"):
        session._start(600.0, None, None)


@pytest.mark.parametrize(("words", "ends"), [([LATE_NODE, {}], "exit"), ([{}], "return")])
def test_a_launchers_node_lives_as_long_as_its_late_node_process(
    words: list[dict[str, str]], ends: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has lived longer than a start takes has ended; one that has not may be started again."""

    def late(command: list[str]) -> None:
        raise TIMED_OUT

    answers = iter(words)
    monkeypatch.setitem(sys.modules, "ray.scripts.scripts", SimpleNamespace(cli=late))  # it takes 3 s to import
    monkeypatch.setattr(ray_session.NodeWatch, "of_child", lambda: None)
    monkeypatch.setattr(ray_session, "_words_of_node_process", lambda: next(answers))
    monkeypatch.setattr(ray_session.time, "sleep", lambda seconds: None)
    if ends == "exit":
        with pytest.raises(SystemExit):
            ray_session.start_node(["--head"], -1.0)
    else:
        ray_session.start_node(["--head"], 600.0)
        assert "Ray's node process (raylet) ended while it started" in capsys.readouterr().err
