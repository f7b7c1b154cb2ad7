"""Trackers that are down, slow, or wrong: the run goes on, and says what they lack."""

import threading
import time

import pytest

from grpo_mcore.observe.trackers import tracker as module
from grpo_mcore.observe.trackers.tracker import Tracker
from tests.waiting import wait_until


class Server:
    """Takes rows unless it is `down`; refuses those in `refused`."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.down = False
        self.refused: set[int] = set()
        self.attempts = 0

    def take(self, row: int) -> None:
        self.attempts += 1
        if self.down:
            raise ConnectionError("503 Service Unavailable")
        if row in self.refused:
            raise ValueError(f"no such metric: {row}")
        self.rows.append(row)

    def close(self) -> None:
        self.take(-1)


def send(tracker: Tracker[Server], *rows: int) -> None:
    for row in rows:
        tracker.call(f"step {row}", lambda server, row=row: server.take(row))


def test_calls_arrive_in_order_and_the_end_comes_last(package_log: pytest.LogCaptureFixture) -> None:
    server = Server()
    tracker = Tracker("logger.x", lambda: server)
    send(tracker, *range(50))
    tracker.close(Server.close)
    tracker.close(Server.close)
    assert server.rows == [*range(50), -1]
    assert (tracker.missing, tracker.outage, package_log.text) == (0, None, "")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further attempts without waits."""
    monkeypatch.setattr(module, "WAITS_S", (0.0, 0.0))


@pytest.mark.usefixtures("at_once")
def test_an_outage_and_its_end_are_logged_once_and_its_calls_are_counted(package_log: pytest.LogCaptureFixture) -> None:
    server = Server()
    tracker = Tracker("logger.x", lambda: server)
    send(tracker, 1)
    wait_until(lambda: server.rows == [1])
    server.down = True
    send(tracker, 2, 3)
    wait_until(lambda: server.attempts == 1 + 3 + 1)  # further attempts at the first alone
    assert "logger.x does not take step 2: ConnectionError: 503 Service Unavailable" in package_log.text
    assert package_log.text.count("does not take") == 1
    assert tracker.missing == 2 and tracker.outage == "ConnectionError: 503 Service Unavailable"
    server.down = False
    send(tracker, 4)
    tracker.close(Server.close)
    assert server.rows == [1, 4, -1] and package_log.text.count("logger.x takes metrics again") == 1
    assert "logger.x lacks 2 calls, from step 2 on: ConnectionError: 503" in package_log.text


@pytest.mark.usefixtures("at_once")
def test_a_tracker_that_is_down_at_the_start_is_opened_later() -> None:
    server, attempts = Server(), []

    def connect() -> Server:
        attempts.append(1)
        if len(attempts) < 4:
            raise OSError("Network is unreachable")
        return server

    tracker = Tracker("logger.x", connect)
    send(tracker, 1, 2)
    wait_until(lambda: server.rows == [2])
    tracker.close(Server.close)
    assert server.rows == [2, -1] and tracker.missing == 1


@pytest.mark.usefixtures("at_once")
def test_a_call_that_fails_for_a_moment_is_not_lost() -> None:
    attempts: list[int] = []

    def refuse_once(server: Server) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError("reset")

    tracker = Tracker("logger.x", Server)
    tracker.call("the alarm of step 1", refuse_once)
    wait_until(lambda: tracker.missing == 0)
    tracker.close(Server.close)


@pytest.mark.usefixtures("at_once")
def test_a_call_that_is_refused_alone_lets_the_others_pass(package_log: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.refused = {2}
    tracker = Tracker("logger.x", lambda: server)
    send(tracker, 1, 2, 3, 4)
    tracker.close(Server.close)
    assert server.rows == [1, 3, 4, -1] and tracker.missing == 1
    assert "logger.x lacks 1 calls, from step 2 on: ValueError: no such metric: 2" in package_log.text


def test_a_tracker_that_hangs_delays_neither_the_run_nor_its_end_for_long(
    package_log: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()
    tracker: Tracker[Server] = Tracker("logger.x", lambda: released.wait(60) and Server())  # type: ignore[arg-type, return-value]
    began = time.monotonic()
    send(tracker, *range(100))
    tracker.close(Server.close, within_s=0.05)
    assert time.monotonic() - began < 30, "not the minute that it hangs"
    assert "logger.x lacks 101 calls, from step 0 on: no answer within 0.05 s" in package_log.text
    released.set()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "KEPT", 5)
    server, released, taken = Server(), threading.Event(), threading.Event()

    def connect() -> Server:
        taken.set()
        released.wait(60)
        return server

    tracker = Tracker("logger.x", connect)
    send(tracker, 0)
    assert taken.wait(60)
    send(tracker, *range(1, 20))
    released.set()
    wait_until(lambda: len(server.rows) == 6)
    tracker.close(Server.close)
    assert server.rows == [0, 1, 2, 3, 4, 5, -1]
    assert "logger.x lacks 14 calls, from step 6 on: 5 calls wait for it" in package_log.text


@pytest.mark.parametrize("error", [ConnectionError("503"), SystemExit(1)], ids=["outage", "exit"])
def test_a_tracker_that_refuses_to_finish_is_logged(
    package_log: pytest.LogCaptureFixture, error: BaseException
) -> None:
    server = Server()

    def refuse(_: Server) -> None:
        raise error

    tracker = Tracker("logger.x", lambda: server)
    send(tracker, 1)
    tracker.close(refuse)
    assert server.rows == [1] and tracker.missing == 1
    assert f"logger.x lacks 1 calls, from the end of the run on: {type(error).__name__}" in package_log.text
