import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.generation.shared_steps import Caller, SharedSteps
from tests.waiting import wait_until


class Machine:
    """Finishes each request after as many steps as its number says. Checks that one thread at a time steps."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.steps = SharedSteps(self.step, timeout_s)
        self.left: dict[str, int] = {}
        self.stepping = threading.Lock()
        self.before_step: Callable[[], None] = lambda: None

    def step(self, deliver: Callable[[Iterable[Any]], None]) -> None:
        assert self.stepping.acquire(blocking=False), "two threads step at a time"
        try:
            self.before_step()
            self.left = {key: count - 1 for key, count in self.left.items()}
            done = [key for key, count in self.left.items() if count == 0]
            for key in done:
                del self.left[key]
            deliver(SimpleNamespace(request_id=key) for key in done)
        finally:
            self.stepping.release()

    def ask(self, name: str, *counts: int) -> Caller:
        caller = Caller()
        for number, count in enumerate(counts):
            self.left[f"{name}-{number}"] = count
            self.steps.add(caller, f"{name}-{number}", f"engine {name}-{number}")
        return caller


def ids(outputs: list[Any]) -> list[str]:
    return [output.request_id for output in outputs]


def test_one_caller_steps_on_its_own_thread_until_its_outputs_are_there() -> None:
    machine, threads = Machine(), set()
    machine.before_step = lambda: threads.add(threading.get_ident())
    caller = machine.ask("a", 3, 1, 3)
    assert [ids(machine.steps.next(caller)) for _ in range(3)] == [["a-1"], ["a-0", "a-2"], []]
    assert threads == {threading.get_ident()} and not machine.steps.generating


def test_outputs_of_other_callers_are_kept_for_them() -> None:
    machine = Machine()
    first, second = machine.ask("a", 5), machine.ask("b", 2, 9)
    assert ids(machine.steps.next(first)) == ["a-0"]
    assert machine.left == {"b-1": 4}
    assert ids(machine.steps.next(second)) == ["b-0"]
    assert machine.left == {"b-1": 4}, "the output was already there: no step"
    assert ids(machine.steps.next(second)) == ["b-1"]


def test_each_of_many_threads_gets_its_own_outputs() -> None:
    machine, got = Machine(), Counter()
    callers = {f"c{number}": machine.ask(f"c{number}", *range(1, 40)) for number in range(8)}

    def collect(name: str) -> None:
        while outputs := machine.steps.next(callers[name]):
            got.update((name, output.request_id.partition("-")[0]) for output in outputs)

    threads = [threading.Thread(target=collect, args=(name,)) for name in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {(name, name): 39 for name in callers}


def test_a_caller_that_has_run_out_of_requests_takes_no_more() -> None:
    machine = Machine()
    caller = machine.ask("a", 1)
    with machine.steps.held_open(caller) as is_open:
        assert is_open
    assert ids(machine.steps.next(caller)) == ["a-0"] and not caller.closed
    assert machine.steps.next(caller) == [] and caller.closed
    with machine.steps.held_open(caller) as is_open:
        assert not is_open


def test_a_caller_waits_for_the_requests_that_are_about_to_join() -> None:
    machine = Machine()
    caller, got = machine.ask("a", 1), list[list[str]]()

    def collect() -> None:
        while outputs := machine.steps.next(caller):
            got.append(ids(outputs))

    with machine.steps.held_open(caller) as is_open:
        thread = threading.Thread(target=collect)
        thread.start()
        assert is_open
        wait_until(lambda: got == [["a-0"]])
        machine.left["b"] = 2
        machine.steps.add(caller, "b", "engine b")
        wait_until(lambda: got == [["a-0"], ["b"]])
        assert thread.is_alive(), "others may still join"
    thread.join(60)
    assert not thread.is_alive() and caller.closed


def test_the_error_of_a_step_reaches_every_waiting_caller() -> None:
    machine, failures = Machine(), []
    entered, go = threading.Event(), threading.Event()

    def fail() -> None:
        entered.set()
        go.wait(60)
        raise OSError("the rank is gone")

    machine.before_step = fail
    callers = [machine.ask(name, 5) for name in "abc"]

    def collect(caller: Caller) -> None:
        try:
            machine.steps.next(caller)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=collect, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    assert sorted(type(error).__name__ for error in failures) == ["OSError", "RuntimeError", "RuntimeError"]
    assert all("the rank is gone" in str(error) for error in failures)

    machine.before_step = lambda: None  # later callers do not see the error
    for caller in callers:
        machine.steps.give_up(list(caller.running))
    assert ids(machine.steps.next(machine.ask("d", 1))) == ["d-0"]


def test_a_step_that_does_not_end_is_not_waited_for_forever() -> None:
    machine = Machine(timeout_s=0.05)
    entered, go = threading.Event(), threading.Event()
    machine.before_step = lambda: (entered.set(), go.wait(60))
    first, second = machine.ask("a", 1), machine.ask("b", 1)
    thread = threading.Thread(target=machine.steps.next, args=(first,))
    thread.start()
    assert entered.wait(60)
    with pytest.raises(TimeoutError, match="taken for another caller, took over 0.05 s"):
        machine.steps.next(second)
    go.set()
    thread.join(60)
    assert ids(machine.steps.next(second)) == ["b-0"], "the output arrived in the meantime"


def test_nobody_waits_for_requests_that_were_given_up() -> None:
    machine = Machine()
    first, second = machine.ask("a", 2, 9), machine.ask("b", 9)
    assert machine.steps.give_up(["a-1", "b-0", "gone"]) == ["engine a-1", "engine b-0"]
    assert machine.steps.next(second) == []
    assert ids(machine.steps.next(first)) == ["a-0"] and machine.steps.next(first) == []
    assert not machine.steps.generating


def test_the_leader_stops_when_all_its_requests_are_given_up() -> None:
    machine = Machine()
    caller = machine.ask("a", 10**9)
    machine.before_step = lambda: machine.steps.give_up(["a-0"]) and None
    assert machine.steps.next(caller) == []


def test_a_pause_does_not_time_out() -> None:
    """Another caller's unfinished step is an error after `timeout_s`, but not while generation is paused."""
    machine, paused = Machine(), [True]
    machine.steps = SharedSteps(machine.step, 0.05, lambda: paused[0])
    leader, other = machine.ask("a", 1), machine.ask("b", 2)
    go_on, inside = threading.Event(), threading.Event()
    machine.before_step = lambda: (inside.set(), go_on.wait(60))[0]
    leading = threading.Thread(target=machine.steps.next, args=(leader,))
    leading.start()
    assert inside.wait(60)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.extend(machine.steps.next(other)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "the caller keeps waiting through the pause"
    go_on.set()
    leading.join(60)
    waiting.join(60)
    assert ids(got) == ["b-0"]
