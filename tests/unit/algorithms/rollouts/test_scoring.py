"""Environments that hang or die: their own sample is given up, with a reason, and all others have their verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.algorithms.rollouts import scoring as judging
from grpo_mcore.algorithms.rollouts.scoring import EnvironmentWorker, RewardScorer
from grpo_mcore.cluster import DeadlineExceeded, WorkerDied, WorkerFailed
from grpo_mcore.rollout.trajectory import Outcome

TIMEOUT_S = 10.0


class Clock:
    """Time passes only where somebody waits."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Answer:
    """Of a call. A sample that "hangs" holds up its call, one that "dies" takes its worker with it."""

    whom = "environment"

    def __init__(self, worker: FakeWorker, samples: Sequence[str], what: str) -> None:
        self.worker, self.samples, self.what = worker, samples, what

    def is_there(self) -> bool:
        return self.worker.dead or "hangs" not in self.samples

    def result(self) -> list[Outcome]:
        assert self.is_there()
        self.worker.dead |= "dies" in self.samples
        if self.worker.dead:
            raise WorkerDied("environment", self.what, "it was killed")
        if "raises" in self.samples:
            raise WorkerFailed("environment", self.what, "ValueError: no tests")
        return [Outcome(float(sample), sample, "", 0.0) for sample in self.samples]


class FakeWorker:
    name = "environment"
    dead = False

    def __init__(self, world: World) -> None:
        self.world = world

    def ready(self) -> Any:
        return SimpleNamespace(result=lambda: None)

    def call(self, method: str, metadata: Any, *samples: str, timeout_s: float, what: str) -> Answer:
        assert (method, timeout_s) == ("advance", TIMEOUT_S) and metadata == [{"of": sample} for sample in samples]
        assert not self.dead
        self.world.asked.append(list(samples))
        return Answer(self, samples, what)


class World:
    """One environment; as a cluster it makes waiting take no time."""

    call_timeout_s = 1000.0

    def __init__(self, calls: int = 2) -> None:
        self.clock = Clock()
        self.asked: list[list[str]] = []
        self.stopped: list[FakeWorker] = []
        worker = EnvironmentWorker(self, lambda: FakeWorker(self), calls=calls, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        self.judging = RewardScorer({"task": worker, "other": worker}, self)  # type: ignore[dict-item, arg-type]

    def stop(self, workers: Sequence[FakeWorker]) -> None:
        self.stopped += workers

    def next_ready(self, things: Sequence[Answer], timeout_s: float, what: str) -> Answer:
        for thing in things:
            if thing.is_there():
                return thing
        self.clock.now += timeout_s
        raise DeadlineExceeded(what, "environment", timeout_s)

    def judge(self, *groups: Sequence[str]) -> dict[str, list[Outcome]]:
        """The outcomes by group, "p0" and so on."""
        for number, samples in enumerate(groups):
            metadata = [{"of": sample} for sample in samples]
            self.judging.ask(f"p{number}", "task" if number % 2 else "other", metadata, samples)
        judged: dict[str, list[Outcome]] = {}
        while len(judged) < len(groups):
            assert self.judging.uids() == {f"p{number}" for number in range(len(groups))} - judged.keys()
            if (found := self.judging.next()) is not None:
                judged |= [found]
                continue
            try:
                ready = self.next_ready(self.judging.pending(), self.judging.patience_s(), "verdicts")
            except DeadlineExceeded:
                continue
            assert self.judging.take(ready)
        assert self.judging.pending() == [] and self.judging.patience_s() == float("inf")
        return judged


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(judging, "time", world.clock)
    return world


def rewards(judged: dict[str, list[Outcome]]) -> list[list[float | None]]:
    return [[outcome.reward for outcome in judged[uid]] for uid in sorted(judged)]


def test_verdicts_come_as_asked_for(world: World) -> None:
    judged = world.judge(["1", "2"], ["3"], ["4", "5", "6"])
    assert rewards(judged) == [[1, 2], [3], [4, 5, 6]]
    assert world.asked == [["1", "2"], ["3"], ["4", "5", "6"]] and world.stopped == []


def test_no_more_calls_at_a_time_than_it_takes(world: World) -> None:
    for number in range(5):
        world.judging.ask(f"p{number}", "task", [{"of": "1"}], ["1"])
    assert len(world.judging.pending()) == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("hangs", "no verdict within 10 s"), ("dies", "the environment died: it was killed")],
)
class TestFaults:
    def test_one_sample_alone_is_given_up(self, world: World, fault: str, reason: str) -> None:
        judged = world.judge(["1", "2"], ["3", fault, "4"], ["5"])
        assert rewards(judged) == [[1, 2], [3, None, 4], [5]]
        assert judged["p1"][1].reason == reason
        # Once with all that was asked about, once alone.
        assert [(worker.name, len(world.stopped)) for worker in world.stopped] == [("environment", 2)] * 2
        assert world.asked.count([fault]) == 1

    def test_a_group_of_one(self, world: World, fault: str, reason: str) -> None:
        judged = world.judge([fault])
        assert rewards(judged) == [[None]] and judged["p0"][0].reason == reason

    def test_many_of_them(self, world: World, fault: str, reason: str) -> None:
        groups = [[fault if (number + index) % 5 == 0 else str(index) for index in range(4)] for number in range(12)]
        judged = world.judge(*groups)
        expected = [[None if sample == fault else float(sample) for sample in group] for group in groups]
        assert [rewards({"": judged[f"p{number}"]})[0] for number in range(12)] == expected
        assert Counter(o.reason for group in judged.values() for o in group if o.reward is None) == {
            reason: sum(sample == fault for group in groups for sample in group)
        }

    def test_an_environment_that_only_fails_ends_the_run(self, world: World, fault: str, reason: str) -> None:
        with pytest.raises(DeadlineExceeded if fault == "hangs" else WorkerDied):
            world.judge(*[[fault]] * 30)
        assert len(world.stopped) == 20

    def test_a_worker_that_cannot_be_started_anew_raises(self, world: World, fault: str, reason: str) -> None:
        plain = FakeWorker(world)
        plain.timeout_s = TIMEOUT_S  # type: ignore[attr-defined]
        world.judging = RewardScorer({"task": plain, "other": plain}, world)  # type: ignore[dict-item, arg-type]
        with pytest.raises(DeadlineExceeded if fault == "hangs" else WorkerDied):
            world.judge(["1"], [fault])


def test_what_an_environment_raises_ends_the_run(world: World) -> None:
    """It is a mistake in the recipe, the data or the environment, and not one sample's fault."""
    with pytest.raises(WorkerFailed, match="no tests"):
        world.judge(["1"], ["raises"])
