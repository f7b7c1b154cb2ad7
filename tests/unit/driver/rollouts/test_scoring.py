"""Environments that hang or die: the sample that caused it has no reward, but a reason; all others have rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.cluster import DeadlineExceeded, WorkerDied, WorkerFailed
from grpo_mcore.driver.rollouts.scoring import BatchLimits, EnvironmentWorker, EnvQueue
from grpo_mcore.rollout.life import OpenGroup, OpenSample, Rules, ScoreTurn, TurnLimits
from grpo_mcore.rollout.trajectory import Outcome, TrajectoryRef
from tests.clocks import StandingClock
from tests.unit.driver.rollouts.fake_rollouts import SAMPLING, prompt

TIMEOUT_S = 10.0


class Answer:
    """The answer of a call. A sample "hangs" never lets its call return; a sample "dies" ends its worker."""

    whom = "environment"

    def __init__(self, worker: FakeWorker, samples: Sequence[str], what: str) -> None:
        self.worker, self.samples, self.purpose = worker, samples, what

    def is_there(self) -> bool:
        return self.worker.dead or "hangs" not in self.samples

    def result(self) -> list[Outcome]:
        if not self.is_there():
            raise DeadlineExceeded(self.purpose, self.whom, TIMEOUT_S)
        self.worker.dead |= "dies" in self.samples
        if self.worker.dead:
            raise WorkerDied("environment", self.purpose, "it was killed")
        if "raises" in self.samples:
            raise WorkerFailed("environment", self.purpose, "ValueError: no tests")
        return [Outcome(float(sample), sample, "", 0.0) for sample in self.samples]


class FakeWorker:
    name = "environment"
    dead = False

    def __init__(self, world: World) -> None:
        self.world = world

    def ready(self) -> Any:
        return SimpleNamespace(result=lambda: None)

    def call(self, method: str, metadata: Any, *samples: str, timeout_s: float, purpose: str) -> Answer:
        assert (method, timeout_s) == ("advance", TIMEOUT_S) and metadata == [{"of": sample} for sample in samples]
        assert not self.dead
        self.world.asked.append(list(samples))
        return Answer(self, samples, purpose)


class World:
    """One environment. It also stands for the cluster, in which waiting takes no time."""

    call_timeout_s = TIMEOUT_S

    def __init__(self, calls: int = 2) -> None:
        self.clock = StandingClock(100.0)
        self.asked: list[list[str]] = []
        self.stopped: list[FakeWorker] = []
        self.open: dict[OpenSample, None] = {}  # samples without a score
        self.scored: dict[str, list[tuple[int, Outcome]]] = {}  # (index, outcome), by uid
        self.make_queue(calls, BatchLimits(), joins=False)

    def make_queue(self, calls: int, batch: BatchLimits, *, joins: bool = True) -> None:
        environment = EnvironmentWorker(self, lambda: FakeWorker(self), calls=calls, timeout_s=TIMEOUT_S, batch=batch)  # type: ignore[arg-type, return-value]
        self.queue = EnvQueue(environment, self.resume, joins=joins)

    def resume(self, sample: OpenSample, outcome: Outcome) -> None:
        del self.open[sample]
        self.scored.setdefault(sample.group.uid, []).append((sample.index, outcome))

    def add(self, uid: str, samples: Sequence[str]) -> list[OpenSample]:
        """Let a group wait for its scores."""
        row: Any = prompt(0, uid=uid)
        group = OpenGroup(row, 1, SAMPLING, Rules(TurnLimits(1, 99), 5), len(samples))
        turns = [OpenSample(group, index) for index in range(len(samples))]
        for turn, text in zip(turns, samples, strict=True):
            ref = TrajectoryRef(uid, turn.index, 9, 3, 6, 1, False, "stop", text)
            turn.wait = ScoreTurn(ref, {"of": text}, True)
            self.open[turn] = None
        self.queue.add(turns)
        return turns

    def stop(self, workers: Sequence[FakeWorker]) -> None:
        self.stopped += workers

    def ready(self, things: Sequence[Answer], timeout_s: float, purpose: str) -> Answer:
        for thing in things:
            if thing.is_there():
                return thing
        self.clock.at += timeout_s
        raise DeadlineExceeded(purpose, "environment", timeout_s)

    def score(self, *groups: Sequence[str]) -> dict[str, list[Outcome]]:
        """Score these groups. Return the outcomes by uid: "p0" and so on."""
        for number, samples in enumerate(groups):
            self.add(f"p{number}", samples)
        while self.open:
            self.queue.send()
            try:
                ready = self.ready(self.queue.awaited(), self.queue.seconds_left(), "scores")
            except DeadlineExceeded:
                continue
            assert self.queue.take(ready)
        assert self.queue.awaited() == [] and self.queue.seconds_left() == float("inf")
        scored, self.scored = self.scored, {}
        by_index = {uid: sorted(outcomes, key=lambda outcome: outcome[0]) for uid, outcomes in scored.items()}
        return {uid: [outcome for _, outcome in outcomes] for uid, outcomes in by_index.items()}


@pytest.fixture
def world() -> World:
    return World()


def rewards(scored: dict[str, list[Outcome]]) -> list[list[float | None]]:
    return [[outcome.reward for outcome in scored[uid]] for uid in sorted(scored)]


def test_rewards_come_in_the_order_of_the_samples(world: World) -> None:
    scored = world.score(["1", "2"], ["3"], ["4", "5", "6"])
    assert rewards(scored) == [[1, 2], [3], [4, 5, 6]]
    assert world.asked == [["1", "2"], ["3"], ["4", "5", "6"]] and world.stopped == []


def test_an_environment_gets_no_more_calls_than_it_takes_at_a_time(world: World) -> None:
    for number in range(5):
        world.add(f"p{number}", ["1"])
    world.queue.send()
    assert len(world.queue.awaited()) == 2
    world.queue.send()
    assert len(world.asked) == 2


@pytest.mark.parametrize(
    ("fault", "reason"), [("hangs", "no score within 10 s"), ("dies", "the environment died: it was killed")]
)
class TestFaults:
    def test_only_the_sample_that_caused_it_has_no_reward(self, world: World, fault: str, reason: str) -> None:
        scored = world.score(["1", "2"], ["3", fault, "4"], ["5"])
        assert rewards(scored) == [[1, 2], [3, None, 4], [5]]
        assert scored["p1"][1].reason == reason
        # It is asked about once with the others of its group, and once alone.
        assert [(worker.name, len(world.stopped)) for worker in world.stopped] == [("environment", 2)] * 2
        assert world.asked.count([fault]) == 1

    def test_a_group_of_one(self, world: World, fault: str, reason: str) -> None:
        scored = world.score([fault])
        assert rewards(scored) == [[None]] and scored["p0"][0].reason == reason

    def test_many_such_samples(self, world: World, fault: str, reason: str) -> None:
        groups = [[fault if (number + index) % 5 == 0 else str(index) for index in range(4)] for number in range(12)]
        scored = world.score(*groups)
        expected = [[None if sample == fault else float(sample) for sample in group] for group in groups]
        assert [rewards({"": scored[f"p{number}"]})[0] for number in range(12)] == expected
        assert Counter(o.reason for group in scored.values() for o in group if o.reward is None) == {
            reason: sum(sample == fault for group in groups for sample in group)
        }

    def test_an_environment_that_only_fails_ends_the_run(self, world: World, fault: str, reason: str) -> None:
        with pytest.raises(DeadlineExceeded if fault == "hangs" else WorkerDied):
            world.score(*[[fault]] * 30)
        assert len(world.stopped) == 20


def test_an_exception_costs_only_the_sample_on_which_it_is_raised(world: World) -> None:
    """The environment is not restarted."""
    scored = world.score(["1", "2"], ["3", "raises", "4"], ["raises"], ["raises"] * 30, ["5"])
    assert rewards(scored) == [[1, 2], [3, None, 4], [None], [None] * 30, [5]]
    reasons = {outcome.reason for group in scored.values() for outcome in group if outcome.reward is None}
    assert reasons == {"the environment raised ValueError: no tests"}
    assert world.stopped == [] and world.asked.count(["raises"]) == 1 + 1 + 30


def test_each_exception_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.score(["1", "raises"])
    world.score(["raises"])
    assert [record.getMessage() for record in caplog.records] == [
        "environment: no reward for a sample of p0: environment: the score of p0 failed: ValueError: no tests"
    ]


def one_by_one(world: World, samples: Sequence[str], batch: BatchLimits, calls: int = 1) -> dict[str, list[Outcome]]:
    """Score samples that each come by themselves, in an environment that may get several in a call."""
    world.make_queue(calls, batch)
    return world.score(*[[sample] for sample in samples])


def test_samples_that_wait_for_a_busy_environment_go_in_one_call(world: World) -> None:
    scored = one_by_one(world, "12345678", BatchLimits(max_size=3))
    assert rewards(scored) == [[float(number)] for number in range(1, 9)]
    assert world.asked == [["1", "2", "3"], ["4", "5", "6"], ["7", "8"]]


def test_samples_that_wait_are_spread_over_the_calls_that_an_environment_takes(world: World) -> None:
    """It may work through the samples of one call in turn."""
    one_by_one(world, "12345", BatchLimits(), calls=2)
    assert world.asked == [["1", "2", "3"], ["4", "5"]]


def test_in_a_joined_call_only_the_sample_that_fails_has_no_reward(world: World) -> None:
    for fault in ("raises", "hangs", "dies"):
        world.asked.clear()
        scored = one_by_one(world, ["1", "2", fault, "4"], BatchLimits())
        assert rewards(scored) == [[1], [2], [None], [4]]
        assert world.asked == [["1", "2", fault, "4"], ["1"], ["2"], [fault], ["4"]]


def test_a_call_that_is_not_full_waits_for_more_samples(world: World) -> None:
    limits = BatchLimits(max_size=3, max_wait_s=2.0)
    began = world.clock.at
    scored = one_by_one(world, "12345", limits, calls=4)
    assert len(scored) == 5 and world.asked == [["1", "2", "3"], ["4", "5"]]
    assert world.clock.at == began + 2.0


def test_what_waits_for_more_samples_is_sent_when_no_more_can_come(world: World) -> None:
    world.make_queue(4, BatchLimits(max_wait_s=2.0))
    world.add("p0", ["1"])
    world.queue.send()
    assert world.queue.awaited() == [] and 0 < world.queue.seconds_left() <= 2.0
    world.queue.send(hold=False)
    assert world.asked == [["1"]]
