import threading
import time

import pytest

from grpo_mcore.generation.engine_lock import EngineLock


def test_a_call_comes_between_two_steps_and_does_not_starve() -> None:
    lock, inside, ended = EngineLock(60.0), [], threading.Event()

    def generate() -> None:
        while not ended.is_set():
            with lock.step():
                inside.append("step")
                time.sleep(0.001)
                inside.append("step ends")

    thread = threading.Thread(target=generate)
    thread.start()
    for _ in range(20):
        with lock.call():
            inside.append("call")
            time.sleep(0.001)
            with lock.call():  # one call may need another
                inside.append("call ends")
    ended.set()
    thread.join(60)
    calls = [index for index, what in enumerate(inside) if what == "call"]
    assert len(calls) == 20 and all(inside[index + 1] == "call ends" for index in calls)
    assert all(inside[index - 1] != "step" for index in calls if index), "never in the middle of a step"


def test_no_step_runs_while_generation_is_held() -> None:
    lock, steps = EngineLock(60.0), []
    lock.hold(True)

    def generate() -> None:
        with lock.step():
            steps.append(1)

    thread = threading.Thread(target=generate)
    thread.start()
    with lock.call():
        time.sleep(0.02)
    assert not steps
    lock.hold(False)
    thread.join(60)
    assert steps == [1]


def test_a_pause_may_last_longer_than_any_refit() -> None:
    lock, steps = EngineLock(0.05), []
    lock.pause(True)

    def generate() -> None:
        with lock.step():
            steps.append(1)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join(0.2)
    with lock.call():
        assert thread.is_alive() and lock.paused and not steps
    lock.pause(False)
    thread.join(60)
    assert steps == [1]


def test_every_wait_has_a_deadline() -> None:
    lock = EngineLock(0.05)
    lock.hold(True)
    with pytest.raises(TimeoutError, match=r"held back for 0.05 s by a refit"), lock.step():
        pass
    lock.hold(False)
    failures: list[Exception] = []

    def call() -> None:
        try:
            with lock.call():
                pass
        except TimeoutError as error:
            failures.append(error)

    with lock.step():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
    assert "did not end within 0.05 s" in str(failures[0])
    with lock.step():  # a call that timed out no longer holds generation back
        pass
