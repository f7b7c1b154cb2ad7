"""SIGUSR1 asks a run to stop, and only while it runs."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from grpo_mcore.algorithms.lifecycle.stopping import StopRequest, on_signal, on_sigterm


def test_a_signal_asks_once(package_log: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with on_signal() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason == "SIGUSR1 asked the run to stop"
        stop.ask("another")
        assert stop.reason == "SIGUSR1 asked the run to stop"
    assert signal.getsignal(signal.SIGUSR1) == before
    assert "finished and saved" in package_log.text


def test_in_a_thread_it_is_asked_by_hand() -> None:
    reasons = []

    def run() -> None:
        with on_signal() as stop:
            stop.ask("enough")
            reasons.append(stop.reason)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert reasons == ["enough"]


def test_sigterm_interrupts_a_wait_of_a_running_loop() -> None:
    stop = StopRequest()

    def wait() -> str:
        with stop.waiting():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return "over"

    with on_sigterm(stop), stop.heeded():
        assert stop.interruptible(lambda: "in time") == "in time"
        assert stop.interruptible(wait) is None
        assert stop.at_once and stop.reason == "SIGTERM asked the run to stop"
        assert stop.interruptible(wait) is None  # it does not begin
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)


def test_sigterm_between_waits_interrupts_the_next_one() -> None:
    """The handling of a sample that has arrived is never interrupted."""
    stop, done = StopRequest(), []

    def read_two_samples() -> str:
        with stop.waiting():
            done.append("first is ready")
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("first is read")
        with stop.waiting():
            done.append("second is ready")
        return "over"

    with on_sigterm(stop), stop.heeded():
        assert stop.interruptible(read_two_samples) is None
    assert done == ["first is ready", "first is read"]
    with stop.waiting():  # outside of an interruptible wait nothing is raised
        pass


def test_sigterm_outside_of_a_wait_only_asks() -> None:
    stop = StopRequest()
    with on_sigterm(stop), stop.heeded():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.at_once


def test_sigterm_before_the_loop_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), on_sigterm(StopRequest()):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_time_to_save_by_asks_by_itself() -> None:
    assert StopRequest(time.time() + 1000).reason is None
    stop = StopRequest(time.time() - 1)
    assert stop.reason == "checkpointing.checkpoint_must_save_by has come" and not stop.at_once
