"""Trackers that are down, slow, or wrong: the run goes on, and lacks nothing once they answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from grpo_mcore.observe.trackers.tracker import Tracker


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Server:
    """Takes rows unless it is `down`; refuses those in `refused`."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.down = False
        self.refused: set[int] = set()

    def take(self, row: int) -> None:
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


def test_an_outage_is_said_once_and_nothing_is_missing_after_it(package_log: pytest.LogCaptureFixture) -> None:
    server = Server()
    tracker = Tracker("logger.x", lambda: server, first_wait_s=0.005)
    send(tracker, 1)
    wait_for(lambda: server.rows == [1])
    server.down = True
    send(tracker, 2, 3)
    wait_for(lambda: package_log.text.count("does not take") == 1)
    time.sleep(0.05)  # several more attempts
    assert "logger.x does not take step 2: ConnectionError: 503 Service Unavailable" in package_log.text
    assert package_log.text.count("does not take") == 1
    assert tracker.missing == 2
    server.down = False
    wait_for(lambda: tracker.missing == 0)
    assert sorted(server.rows) == [1, 2, 3]
    assert "logger.x takes metrics again" in package_log.text
    tracker.close(Server.close)


def test_a_tracker_that_is_down_at_the_start_is_opened_later() -> None:
    server, attempts = Server(), []

    def connect() -> Server:
        attempts.append(1)
        if len(attempts) < 4:
            raise OSError("Network is unreachable")
        return server

    tracker = Tracker("logger.x", connect, first_wait_s=0.001)
    send(tracker, 1, 2)
    wait_for(lambda: tracker.missing == 0)
    assert sorted(server.rows) == [1, 2]
    tracker.close(Server.close)


def test_a_call_that_is_refused_alone_lets_the_others_pass(package_log: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.refused = {2}
    tracker = Tracker("logger.x", lambda: server, first_wait_s=0.001)
    send(tracker, 1, 2, 3, 4)
    wait_for(lambda: server.rows == [1, 3, 4])
    tracker.close(Server.close, within_s=0.2)
    assert server.rows == [1, 3, 4, -1] and tracker.missing == 1
    assert "logger.x lacks 1 calls, from step 2 on: ValueError: no such metric: 2" in package_log.text


def test_a_tracker_that_takes_nothing_any_more_is_closed_in_time(package_log: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.refused = {1, 2, 3}
    tracker = Tracker("logger.x", lambda: server, first_wait_s=0.001)
    send(tracker, 1, 2, 3)
    tracker.close(Server.close, within_s=0.2)
    assert server.rows == [-1] and tracker.missing == 3
    assert "logger.x lacks 3 calls, from step 1 on: ValueError: no such metric" in package_log.text


def test_a_tracker_that_hangs_delays_neither_the_run_nor_its_end_for_long(
    package_log: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()
    tracker: Tracker[Server] = Tracker("logger.x", lambda: released.wait(30) and Server())  # type: ignore[arg-type, return-value]
    began = time.monotonic()
    send(tracker, *range(100))
    assert time.monotonic() - began < 1
    tracker.close(Server.close, within_s=0.05)
    assert time.monotonic() - began < 5
    assert "logger.x lacks 101 calls, from step 0 on: no answer within 0.05 s" in package_log.text
    released.set()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mcore.observe.trackers.tracker.KEPT", 5)
    server = Server()
    server.down = True
    tracker = Tracker("logger.x", lambda: server, first_wait_s=0.01)
    send(tracker, *range(20))
    assert tracker.missing == 20
    assert len(tracker._calls) == 5
    server.down = False
    tracker.close(Server.close)
    assert [row for row in server.rows if row in range(15, 20)] == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("error", [ConnectionError("503"), SystemExit(1)], ids=["outage", "exit"])
def test_a_tracker_that_refuses_to_finish_is_said_and_costs_its_seconds_alone(
    package_log: pytest.LogCaptureFixture, error: BaseException
) -> None:
    server = Server()

    def refuse(_: Server) -> None:
        raise error

    tracker = Tracker("logger.x", lambda: server, first_wait_s=0.01)
    send(tracker, 1)
    tracker.close(refuse, within_s=0.05)
    assert server.rows == [1] and tracker.missing == 1
    assert f"logger.x lacks 1 calls, from the end of the run on: {type(error).__name__}" in package_log.text
