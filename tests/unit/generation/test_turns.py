from __future__ import annotations

import threading
import time

import pytest

from grpo_mcore.generation.turns import Turns


def test_a_call_comes_between_two_steps_and_does_not_starve() -> None:
    turns, inside, ended = Turns(), [], threading.Event()

    def generate() -> None:
        while not ended.is_set():
            with turns.step(5.0):
                inside.append("step")
                time.sleep(0.001)
                inside.append("step ends")

    thread = threading.Thread(target=generate)
    thread.start()
    for _ in range(20):
        with turns.call():
            inside.append("call")
            time.sleep(0.001)
            with turns.call():  # one call may need another
                inside.append("call ends")
    ended.set()
    thread.join(5)
    calls = [index for index, what in enumerate(inside) if what == "call"]
    assert len(calls) == 20 and all(inside[index + 1] == "call ends" for index in calls)
    assert all(inside[index - 1] != "step" for index in calls if index), "never in the middle of a step"


def test_generation_stands_still_while_it_is_held() -> None:
    turns, steps = Turns(), []
    turns.hold(True)
    with pytest.raises(TimeoutError, match=r"held back for 0.05 s by a refit"), turns.step(0.05):
        pass

    def generate() -> None:
        with turns.step(5.0):
            steps.append(1)

    thread = threading.Thread(target=generate)
    thread.start()
    with turns.call():
        time.sleep(0.02)
    assert not steps
    turns.hold(False)
    thread.join(5)
    assert steps == [1]
