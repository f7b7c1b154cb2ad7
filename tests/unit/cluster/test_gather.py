"""Many workers have one deadline and one error. The test controls the cluster's clock and answers."""

from collections.abc import Sequence
from typing import Any

import pytest

from grpo_mcore.cluster import DeadlineExceeded, WorkerDied, WorkerFailed
from grpo_mcore.cluster.gather import gather
from tests.clocks import StandingClock


class Answer:
    def __init__(self, whom: str, at: float, value: Any = None) -> None:
        self.whom, self.purpose, self.at, self.value = whom, "work", at, value

    def result(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Script:
    """A cluster that has only `ready`."""

    def __init__(self) -> None:
        self.clock = StandingClock()

    def ready(
        self, things: Sequence[Answer], timeout_s: float, purpose: str, watch: Any = None, *, patient: bool = False
    ) -> list[Answer]:
        first = min(things, key=lambda thing: thing.at)
        if first.at > self.clock.at + timeout_s:
            self.clock.at += timeout_s
            raise DeadlineExceeded(purpose, ", ".join(thing.whom for thing in things), timeout_s, "stacks")
        self.clock.at = max(self.clock.at, first.at)
        return [first]


def failed(whom: str, cause: str) -> WorkerFailed:
    return WorkerFailed(whom, "work", cause)


@pytest.fixture
def script() -> Script:
    return Script()


def test_results_keep_the_order_of_the_workers(script):
    answers = [Answer("a", 3, "A"), Answer("b", 1, "B"), Answer("c", 2, "C")]
    assert gather(script, answers, timeout_s=10, purpose="work") == ["A", "B", "C"]
    assert script.clock.at == 3
    assert gather(script, [], timeout_s=10, purpose="work") == []


def test_the_deadline_is_one_for_all_and_names_the_missing(script):
    answers = [Answer("a", 6), Answer("b", 99), Answer("c", 9), Answer("d", 99)]
    with pytest.raises(DeadlineExceeded) as caught:
        gather(script, answers, timeout_s=10, purpose="work")
    assert script.clock.at == 10
    assert (caught.value.whom, caught.value.seconds) == ("b, d", 10)  # the whole timeout, not that of the last wait
    assert str(caught.value) == "work: no answer from b, d within 10 s\nstacks"


def test_the_first_failure_is_raised_and_the_others_get_a_grace(script):
    answers = [
        *(Answer("a", 4, failed("a", "connection reset")), Answer("b", 2, failed("b", "out of memory"))),
        *(Answer("c", 3, "C"), Answer("d", 99)),
    ]
    with pytest.raises(WorkerFailed, match="b: work failed: out of memory") as caught:
        gather(script, answers, timeout_s=1000, purpose="work", grace_s=5)
    assert script.clock.at == 7
    assert caught.value.__notes__ == ["a failed too: connection reset", "d was still at work on work 5 s later"]


def test_the_grace_does_not_outlast_the_deadline(script):
    answers = [Answer("a", 9, failed("a", "x")), Answer("b", 99)]
    with pytest.raises(WorkerFailed, match="a: work failed"):
        gather(script, answers, timeout_s=10, purpose="work", grace_s=50)
    assert script.clock.at == 10


class Others:
    """Background work whose answers each start the next call."""

    def __init__(self, *at: float) -> None:
        self.left = [Answer(f"other at {time:g}", time) for time in at]
        self.taken: list[Answer] = []

    def awaited(self) -> list[Answer]:
        return self.left[:1]

    def take(self, ready: list[Answer]) -> None:
        for answer in ready:
            self.left.remove(answer)
        self.taken += ready


def test_other_work_goes_on_while_it_waits(script):
    others = Others(1, 2, 2.5, 7)
    answers = [Answer("a", 3, "A"), Answer("b", 5, "B")]
    assert gather(script, answers, timeout_s=10, purpose="work", background=others) == ["A", "B"]
    assert [other.at for other in others.taken] == [1, 2, 2.5] and script.clock.at == 5


def test_other_work_moves_no_deadline_and_takes_no_blame(script):
    others = Others(*range(1, 50))
    with pytest.raises(DeadlineExceeded) as caught:
        gather(script, [Answer("a", 99)], timeout_s=10, purpose="work", background=others)
    assert script.clock.at == 10 and caught.value.whom == "a" and len(others.taken) < 11


def test_a_death_is_the_cause_of_what_was_heard_before(script):
    died = WorkerDied("b", "work", "its process ended")
    answers = [Answer("a", 1, failed("a", "connection reset")), Answer("b", 2, died), Answer("c", 3, failed("c", "x"))]
    with pytest.raises(WorkerDied, match="b: work failed: its process ended") as caught:
        gather(script, answers, timeout_s=10, purpose="work")
    assert caught.value.__notes__ == ["a failed too: connection reset", "c failed too: x"]
