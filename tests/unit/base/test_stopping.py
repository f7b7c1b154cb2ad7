"""SIGUSR1 asks a run to stop, and only while it runs."""

import os
import random
import signal
import threading
import time

import pytest

from grpo_mcore.base.stopping import StopRequest, Terminated, on_signal, on_sigterm


def test_a_signal_asks_once() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with on_signal() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason == "SIGUSR1 asked the run to stop"
        stop.ask("another")
        assert stop.reason == "SIGUSR1 asked the run to stop"
    assert signal.getsignal(signal.SIGUSR1) == before


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
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            stop.check()
            time.sleep(0.01)
        return "over"

    with on_sigterm(stop), stop.listening():
        assert stop.interruptible(lambda: "in time") == "in time"
        assert stop.interruptible(wait) is None
        assert stop.at_once and stop.reason == "SIGTERM asked the run to stop"
        assert stop.interruptible(lambda: "it does not begin") is None
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGTERM)  # its processes are being ended


def test_sigterm_at_any_instruction_interrupts_no_work_between_two_waits() -> None:
    """Send it after each of many random delays: a sample that was read is always recorded too."""
    draw = random.Random(0)
    for _ in range(60):
        stop = StopRequest()
        read: list[int] = []
        recorded: list[int] = []

        def read_samples(stop: StopRequest = stop, read: list[int] = read, recorded: list[int] = recorded) -> None:
            for number in range(10**9):
                stop.check()
                read.append(number)
                sum(range(200))
                recorded.append(number)

        with on_sigterm(stop), stop.listening():
            timer = threading.Timer(draw.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
            stop.interruptible(read_samples)
            timer.join()
        assert stop.at_once and read == recorded


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_python_drops_is_raised_at_the_next_look() -> None:
    """Exceptions in finalizers and in the hooks of a fork are ignored, Ctrl-C among them."""

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            reached.append("the end")

    reached: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with on_signal() as stop:
        Finalized()  # deleted at once
        stop.check()  # the start has no looks of its own
        with pytest.raises(KeyboardInterrupt), stop.listening():
            stop.check()
        assert stop.reason is None  # the run is ending already
    assert signal.getsignal(signal.SIGINT) == before and not reached


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_or_a_closed_terminal_outside_of_a_wait_only_asks(number: signal.Signals) -> None:
    stop = StopRequest()
    with on_sigterm(stop), stop.listening():
        os.kill(os.getpid(), number)
        stop.check()
        assert stop.at_once and stop.reason == f"{number.name} asked the run to stop"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(60)
    assert stop.at_once


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_or_a_closed_terminal_before_the_loop_ends_the_start(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Terminated), on_sigterm(StopRequest()):
        os.kill(os.getpid(), number)
        time.sleep(60)
    assert signal.getsignal(number) == before and Terminated.exit_code == 143


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_in_an_import_that_makes_another_error_of_it_ends_the_start(
    number: signal.Signals, kind: type[BaseException]
) -> None:
    class Field:
        def __set_name__(self, owner: type, name: str) -> None:  # Python 3.11 wraps what is raised here
            os.kill(os.getpid(), number)

    def load() -> None:
        try:
            type("OfALibrary", (), {"field": Field()})
        except BaseException as error:
            raise ImportError("half a module") from error

    with pytest.raises(KeyboardInterrupt) as raised, on_signal() as stop, on_sigterm(stop):
        load()
    assert raised.type is kind
    with pytest.raises(ImportError, match="half a module"), on_signal(), on_sigterm(StopRequest()):
        raise ImportError("half a module")


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    stop, before = StopRequest(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_sigterm(stop), stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_after_the_loop_changes_nothing() -> None:
    """Everything is saved, and the run is ending already."""
    stop = StopRequest()
    with on_sigterm(stop):
        with stop.listening():
            pass
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_came_while_it_was_blocked_is_heard() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # other threads do not block it
        with on_signal() as stop:
            assert stop.reason == "SIGUSR1 asked the run to stop"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_time_to_save_by_asks_by_itself() -> None:
    assert StopRequest(time.time() + 1000).reason is None
    stop = StopRequest(time.time() - 1)
    assert stop.reason == "checkpointing.checkpoint_must_save_by has come" and not stop.at_once
