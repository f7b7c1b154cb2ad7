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


@pytest.mark.parametrize(("how", "timeout_s"), [("hold", 60.0), ("pause", 0.05)])
def test_no_step_runs_while_generation_is_held(how: str, timeout_s: float) -> None:
    """A pause may last longer than any refit."""
    lock, steps = EngineLock(timeout_s), []
    getattr(lock, how)(True)

    def generate() -> None:
        with lock.step():
            steps.append(1)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join(0.2)
    with lock.call():
        assert thread.is_alive() and not steps and lock.paused == (how == "pause")
    getattr(lock, how)(False)
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
