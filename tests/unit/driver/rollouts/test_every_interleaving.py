"""Every order of events around the rollouts, with engines and environments that fail at every point.

The rollouts are the real class. Whatever is not decided by them (what is ready first, what fails and where, what the
driver does next) is a choice, and a depth-first search takes every sequence of choices. The laws: every prompt comes
back once with all its samples, the rollouts never wait for something that nobody produces, and the run ends.

`pytest --chaos` runs the larger cases too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from grpo_mcore.cluster import DeadlineExceeded, LocalCluster, Parcel, WorkerDied, WorkerFailed
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.rollouts import engine_queues, scoring
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.life import TurnLimits
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, TrajectoryRef
from tests.clocks import StandingClock
from tests.unit.driver.rollouts.fake_rollouts import END, SAMPLING, CharacterTokenizer, prompt

pytestmark = pytest.mark.slow  # exhaustive

TIMEOUT_S, VERDICT_S = 10.0, 7.0
"""Seconds that an engine, and an environment, may take."""
MOST_CHOICES = 300
"""More choices than any run of these sizes makes: one that makes them goes round in circles."""


class Choices:
    """Repeats the choices of `prefix`, then takes the first of each. `taken`: (choice, number of options) of each."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self.prefix, self.taken = prefix, list[tuple[int, int]]()

    def __call__(self, options: Sequence[Any]) -> Any:
        assert len(self.taken) < MOST_CHOICES, "the run does not end"
        if len(options) == 1:
            return options[0]
        at = len(self.taken)
        chosen = self.prefix[at] if at < len(self.prefix) else 0
        self.taken.append((chosen, len(options)))
        return options[chosen]


def every_run(run: Callable[[Choices], None]) -> int:
    """Call `run` with every sequence of choices. Return how many there are."""
    prefix: list[int] | None = []
    count = 0
    while prefix is not None:
        choices = Choices(prefix)
        try:
            run(choices)
        except BaseException as error:
            error.add_note(f"the choices: {[chosen for chosen, _ in choices.taken]}")
            raise
        count += 1
        taken = choices.taken
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        prefix = [*(chosen for chosen, _ in taken[:-1]), taken[-1][0] + 1] if taken else None
    return count


class Answer:
    """A call's answer, or its error."""

    def __init__(self, whom: str, find: Callable[[], Any]) -> None:
        self.whom, self.purpose, self.find = whom, "an answer", find

    def result(self) -> Any:
        return self.find()


class Stream:
    """A generation call: one sample after the other, then its end."""

    def __init__(self, engine: Engine, requests: Sequence[GenerationRequest], name: str, what: str) -> None:
        self.engine, self.whom, self.name, self.purpose = engine, engine.name, name, what
        self.left = list(requests)
        self.over = False

    def __next__(self) -> Any:
        world = self.engine.world
        assert self.engine not in world.hung, "it would wait for ever"
        if self.over:
            raise StopIteration
        match "dies" if self.engine.dead else world.accident("dies", "fails", "ends early"):
            case "dies":
                self.engine.dead = self.over = True
                raise WorkerDied(self.whom, self.purpose, "its process ended")
            case "fails":
                self.over = True
                raise WorkerFailed(self.whom, self.purpose, "out of memory")
            case "ends early":
                self.over = True
                raise StopIteration
        if not self.left:
            self.over = True
            raise StopIteration
        request = self.left.pop(0)
        turn = 1 if request.continues is None else request.continues[2] + 1
        sample = TrajectoryRef(
            request.uid, request.generation_index, 9 * turn, 3, 2, 1, False, "stop", None, turn, stop_token=END
        )
        return [Parcel(sample, (request.uid, request.generation_index, turn))]


class Engine:
    """`obeys`: whether samples that are given up before they are read do not come any more."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.dead = world, name, False
        self.streams: list[Stream] = []

    def call(self, method: str, *args: Any, **_: Any) -> Answer:
        if method == "join":
            return self.join(*args)

        def find() -> None:
            if self.dead or method == "health" and self in self.world.hung:
                raise WorkerDied(self.name, method, "its process ended")
            if self in self.world.hung:
                raise DeadlineExceeded(method, self.name, TIMEOUT_S)
            if method == "give_up" and self.world.obeys:
                for stream in self.streams:
                    stream.left = [request for request in stream.left if request.uid not in args[0]]

        return Answer(self.name, find)

    def join(self, name: str, requests: Sequence[GenerationRequest], sampling: Any) -> Answer:
        """The requests reach the stream at once, or when the answer is read. One without samples may have ended."""

        def find() -> bool:
            if self.dead:
                raise WorkerDied(self.name, "join", "its process ended")
            if self in self.world.hung:
                raise DeadlineExceeded("join", self.name, TIMEOUT_S)
            if self.world.accident("refuses"):
                raise WorkerFailed(self.name, "join", "it is in a refit")
            stream = next(stream for stream in self.streams if stream.name == name)
            if stream.over or not (stream.left or self.world.choose([True, False])):
                stream.over = True
                return False
            stream.left += requests
            return True

        if self.world.choose([False, True]) and not self.dead:
            try:
                joined = find()
            except (WorkerFailed, DeadlineExceeded) as error:
                return Answer(self.name, partial(raise_, error))
            return Answer(self.name, lambda: joined)
        return Answer(self.name, find)

    def stream(self, method: str, requests: Any, sampling: Any, name: str, purpose: str) -> Stream:
        assert self in self.world.engines.workers, "it was replaced"
        self.streams.append(Stream(self, requests, name, purpose))
        return self.streams[-1]


def raise_(error: Exception) -> None:
    raise error


class Environment:
    """Ends generation 1 after its first turn, the others after their second."""

    name = "environment"

    def __init__(self, world: World) -> None:
        self.world, self.dead = world, False

    def ready(self) -> Answer:
        return Answer(self.name, lambda: None)

    def call(self, method: str, metadata: Any, *samples: Any, timeout_s: float, purpose: str) -> Answer:
        def find() -> list[Outcome]:
            if answer in self.world.hung:
                raise DeadlineExceeded(purpose, self.name, timeout_s)
            match "dies" if self.dead else self.world.accident("dies", "raises"):
                case "dies":
                    self.dead = True
                    raise WorkerDied(self.name, purpose, "its process ended")
                case "raises":
                    raise WorkerFailed(self.name, purpose, "ValueError: no verdict")
            return [
                Outcome(1.0, None, "", 0.0, terminated=index == 1 or turn == 2, observation="on")
                for _, index, turn in samples
            ]

        answer = Answer(self.name, find)
        return answer


@dataclass
class World(LocalCluster):
    """Everything around the rollouts. It also stands for the cluster. `accidents`: how many more may happen."""

    choose: Choices
    accidents: int
    turns: int = 1
    num_engines: int = 1
    sleeps: bool = False
    obeys: bool = True
    generations: int = 2
    enough: int | None = None
    together: bool = True
    at_once: bool = False  # all that is ready comes at once, what was chosen first
    hung: set[Any] = field(default_factory=set)
    lost_rewards: int = 0

    def __post_init__(self) -> None:
        super().__init__(TIMEOUT_S)
        self.clock = StandingClock()
        workers = [Engine(self, f"engine-{number}") for number in range(self.num_engines)]
        self.engines = EngineGroup(self, list(map(EngineSlot, workers)), sleeps=self.sleeps, start=self.successor)  # type: ignore[arg-type]
        self.engines.restarts = Retries(5, 0.0)
        environment = EnvironmentWorker(self, lambda: Environment(self), calls=2, timeout_s=VERDICT_S)  # type: ignore[arg-type, return-value]
        limits = TurnLimits(self.turns, 999, together=self.together)
        self.rollouts = Rollouts(
            self.engines, {"game": environment}, CharacterTokenizer(), limits, seed=5,
            retries=Retries(5, 0.0), hooks=RolloutHooks(restore_engines=self.restore), enough_samples=self.enough,
        )  # fmt: skip

    def successor(self, number: int) -> list[Any]:
        return [Engine(self, f"engine-{number}")]

    def restore(self) -> None:
        self.engines._start_successors()
        self.engines.lost.clear()

    def stop(self, workers: Any) -> None:
        for worker in workers:
            worker.dead = True

    def accident(self, *kinds: str) -> str | None:
        kind = self.choose([None, *kinds]) if self.accidents else None
        self.accidents -= kind is not None
        self.lost_rewards += kind in ("dies", "raises")  # of an environment: at most one sample's
        return kind

    def ready(self, things: Any, timeout_s: float, purpose: str, watch: Any = None, *, patient: bool = False) -> Any:
        """Choose what is ready: of each engine its first stream, any answer. Or something hangs from now on."""
        assert things, "it waits for something that nobody produces"
        first: dict[Any, Any] = {}
        for thing in things:
            source = thing.engine if isinstance(thing, Stream) else thing
            if source not in self.hung:
                first.setdefault(source, thing)
        options: list[Any] = list(first.values())
        if self.accidents:
            options += [("hangs", source) for source in first]
        chosen = self.choose(options) if options else ("hangs", None)
        if not isinstance(chosen, tuple):
            return [chosen, *(thing for thing in options if self.at_once and thing is not chosen)]
        if chosen[1] is not None:
            self.accidents -= 1
            self.lost_rewards += 1
            self.hung.add(chosen[1])
            if len(first) > 1:
                return self.ready(things, timeout_s, purpose)
        self.clock.at += timeout_s
        raise DeadlineExceeded(purpose, "somebody", timeout_s)

    def check(self) -> None:
        """Somebody produces what each open group misses, and only once."""
        rollouts = self.rollouts
        queues, (scorer,) = rollouts._engine_queues, set(rollouts._queue_of_task.values())
        generated = [key for stream in queues._streams.values() for key in stream.expected]
        queued = [sample.key for entries in queues._queued.values() for _, sample in entries]
        scored = [
            sample.key
            for call in (*scorer._again, *scorer._running.values())
            for sample in call.samples
            if sample.wait is not None
        ]
        scored += [sample.key for _, sample in scorer._waiting]
        held = []
        if barrier := rollouts._barrier:
            held = [sample.key for samples in (barrier.scored, *barrier.generated.values()) for sample in samples]
        groups = rollouts._open.values()
        open_samples = [sample.key for group in groups for sample in group.samples if sample.wait is not None]
        producers = sorted([*generated, *queued, *scored, *held])
        assert producers == sorted(open_samples), "a sample has no producer, or two"
        assert rollouts.awaited() or not rollouts._open or rollouts.generating
        self.check_counts()

    def check_counts(self) -> None:
        """What is counted as it comes and goes is what a look at everything would count."""
        queues = self.rollouts._engine_queues
        for group in self.rollouts._open.values():
            assert group.unfinished == sum(sample.wait is not None for sample in group.samples)
        assert {join[0] for join in queues._joins.values()} <= set(queues._streams.values())
        assert sorted(map(id, queues._streams.values())) == sorted(
            id(stream) for streams in queues._streams_of.values() for stream in streams
        )


def run(world: World, prompts: int, surprises: int) -> None:
    """Let the driver collect all groups. Up to `surprises` times it goes on in the background instead of waiting, or
    gives an unfinished prompt up and dispatches it again in the next step."""
    rollouts, open_uids = world.rollouts, {f"p{number}": 1 for number in range(prompts)}
    groups: list[Group] = []

    def dispatch(uids: Sequence[str], step: int) -> None:
        rows: Any = [prompt(int(uid[1:])) for uid in uids]
        rollouts.dispatch(rows, SAMPLING, generations=world.generations, step=step)

    dispatch(list(open_uids), 1)
    while open_uids:
        world.check()
        options: list[Any] = [("wait", "")]
        if surprises:
            options += [("background", ""), *(("give up", uid) for uid in open_uids)]
        match world.choose(options):
            case "wait", _:
                group = rollouts.next_group()
                groups.append(group)
                assert open_uids.pop(group.uid), "a group that nobody asked for"
            case "background", _:
                surprises -= 1
                if things := rollouts.awaited():
                    try:
                        rollouts.take(world.ready(things, TIMEOUT_S, "training"))
                    except DeadlineExceeded:
                        break  # the policy's own deadline, which ends the run
            case _, uid:
                surprises -= 1
                rollouts.drop([uid])
                world.check()
                dispatch([uid], 2)
    else:
        assert not rollouts._open and not rollouts._finished
    for group in groups:
        assert len(group.samples) == len(group.scores) == (world.enough or world.generations)
        for sample in group.samples:
            turns = 1 if sample.generation_index == 1 else world.turns
            assert sample.turns == turns or world.lost_rewards
            assert sample.ref == (group.uid, sample.generation_index, sample.turns)
    failed = sum(score.reward is None for group in groups for score in group.scores)
    assert failed <= world.lost_rewards, "other samples lost their rewards too"


CASES = {
    # prompts, surprises, the world, at least so many runs
    "one-engine": (2, 1, {"accidents": 1}, 200),
    "asleep": (1, 1, {"accidents": 2, "sleeps": True, "obeys": False}, 200),
    "two-turns": (1, 0, {"accidents": 2, "turns": 2}, 300),
    "two-engines": (2, 0, {"accidents": 1, "num_engines": 2}, 500),
    "enough-samples": (1, 1, {"accidents": 1, "generations": 3, "enough": 2, "obeys": False}, 50),
}
FREE = {
    "free-one-engine": (1, 1, {"accidents": 1, "together": False}, 100),
    "free-asleep": (1, 1, {"accidents": 1, "sleeps": True, "obeys": False, "together": False}, 100),
    "free-two-turns": (1, 0, {"accidents": 1, "turns": 2, "together": False}, 150),
    "free-joins": (1, 0, {"turns": 2, "accidents": 1, "together": False}, 300),
    "free-joins-dropped": (1, 1, {"turns": 2, "accidents": 0, "together": False}, 80),
    "free-at-once": (2, 1, {"turns": 2, "accidents": 0, "together": False, "at_once": True}, 100),
    "free-two-engines": (2, 0, {"accidents": 1, "num_engines": 2, "generations": 1, "together": False}, 100),
    "free-enough":
        (1, 0, {"accidents": 1, "turns": 2, "generations": 3, "enough": 2, "obeys": False, "together": False}, 100),
}  # fmt: skip
LARGE = {
    "two-engines-two-turns": (2, 0, {"accidents": 1, "num_engines": 2, "turns": 2}, 5000),
    "two-accidents-two-engines": (2, 0, {"accidents": 2, "num_engines": 2}, 5000),
    "two-surprises": (1, 2, {"accidents": 1, "turns": 2}, 200),
    "two-accidents-asleep": (1, 1, {"accidents": 2, "sleeps": True, "turns": 2}, 1000),
    "free-two-accidents": (1, 1, {"accidents": 2, "turns": 2, "together": False}, 1000),
    "free-two-engines-two-turns": (1, 0, {"accidents": 2, "num_engines": 2, "turns": 2, "together": False}, 1000),
    "two-accidents-enough": (1, 1, {"accidents": 2, "generations": 3, "enough": 2, "num_engines": 2}, 1000),
}


@pytest.mark.parametrize(
    "case", [*CASES, *FREE, *(pytest.param(case, marks=pytest.mark.every_state) for case in LARGE)]
)
def test_every_interleaving_keeps_the_laws(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, surprises, sizes, at_least = (CASES | FREE | LARGE)[case]
    monkeypatch.setattr(scoring.logger, "disabled", True)
    monkeypatch.setattr(engine_queues, "STREAMS", 1 if "joins" in case else 4)

    def one(choose: Choices) -> None:
        world = World(choose, **sizes)  # type: ignore[arg-type]
        run(world, prompts, surprises)

    count = every_run(one)
    print(f"{case}: {count} runs")
    assert count >= at_least
