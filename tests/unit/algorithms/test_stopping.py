"""SIGUSR1 asks a run to stop, and only while it runs."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from grpo_mcore.algorithms.stopping import on_signal


def test_a_signal_asks_once(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with on_signal() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason == "SIGUSR1 asked the run to stop"
        stop.ask("another")
        assert stop.reason == "SIGUSR1 asked the run to stop"
    assert signal.getsignal(signal.SIGUSR1) == before
    assert "finished and saved" in capsys.readouterr().out


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
