"""Engines that fail, die or hang during generation: which are replaced, what is generated again and where."""

from typing import Any

import pytest

from grpo_mcore.cluster import DeadlineExceeded, ObjectLost, WorkerDied, WorkerFailed
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.rollout.life import TurnLimits
from tests.unit.driver.rollouts.fake_rollouts import SAMPLING, CharacterTokenizer, FakeEngine, World, prompt


class Broken(RuntimeError):
    pass


def failing(world: World, engine: int, *calls: int) -> None:
    """Let these calls of an engine (1 is the first) fail after their first sample."""
    target, numbers = world.engines.workers[engine].target, iter(range(1, 99))
    generate = target.generate_refs

    def generate_refs(*args: Any) -> Any:
        stream = generate(*args)
        if next(numbers) not in calls:
            yield from stream
            return
        yield next(stream)
        target.running = False
        raise Broken("out of memory")

    target.generate_refs = generate_refs


@pytest.mark.parametrize("engines", [1, 2])
def test_the_missing_samples_of_a_failed_call_are_generated_again(engines: int) -> None:
    retried: list[tuple[str, str]] = []
    world = World(engines=engines, max_turns=1)
    world.rollouts = Rollouts(
        world.engines, world.rollouts.environments, None, TurnLimits(1, 99, together=True),
        seed=5, retries=Retries(1, 0.0),
        hooks=RolloutHooks(on_retry=lambda *what: retried.append(what)),
    )  # fmt: skip
    failing(world, 0, 1)
    groups = world.run(range(4))
    undisturbed = World(engines=engines, max_turns=1)
    for uid, group in undisturbed.run(range(4)).items():
        assert [undisturbed.trajectory(group, i) for i in range(3)] == [
            world.trajectory(groups[uid], i) for i in range(3)
        ]
    lost = {request.uid for request in world.calls()[0][0]}
    assert {uid for uid, _ in retried} == lost and len(retried) == len(lost) == 4 // engines
    assert {why for _, why in retried} == {"engine-0: Broken: out of memory"}
    assert len(world.environment.calls) == 4  # discarded samples are not scored


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("together", [True, False])
def test_with_several_turns_samples_of_the_failed_call_repeat_their_turn(
    engines: int, seed: int, together: bool
) -> None:
    """All others keep what they have."""
    retried: list[str] = []
    world = World(engines=engines, seed=seed)
    world.rollouts = Rollouts(
        world.engines, world.rollouts.environments, CharacterTokenizer(),
        TurnLimits(9, 1000, together=together), seed=5,
        retries=Retries(1, 0.0), hooks=RolloutHooks(on_retry=lambda uid, why: retried.append(uid)),
    )  # fmt: skip
    failing(world, 0, 2 if together else 1)
    groups = world.run(range(5))
    undisturbed = World(engines=engines, seed=seed)
    for uid, group in undisturbed.run(range(5)).items():
        assert [undisturbed.trajectory(group, i) for i in range(3)] == [
            world.trajectory(groups[uid], i) for i in range(3)
        ]
        assert group.scores == groups[uid].scores
    assert retried and len(retried) == len(set(retried))


def test_one_failure_more_than_tolerated_is_raised() -> None:
    world = World(max_turns=1)
    world.rollouts = Rollouts(
        world.engines,
        world.rollouts.environments,
        None,
        TurnLimits(1, 99, together=True),
        seed=5,
        retries=Retries(1, 0.0),
    )
    failing(world, 0, 1, 2)
    with pytest.raises(WorkerFailed, match="Broken: out of memory"):
        world.run(range(4), generations=1)


def dying(world: World, *, starts: list[int], hangs: bool = False) -> list[str]:
    """Let engine 0 die, or hang, in its first call after its first sample; a successor takes its place. Return the list
    to which retries, restarts and refits are added."""
    entries: list[str] = []
    worker = world.engines.workers[0]
    generate, ready = worker.target.generate_refs, world.cluster.ready
    hung: set[Any] = set()

    def generate_refs(*args: Any) -> Any:
        if hangs:
            hung.update(thing for thing in world.rollouts.awaited() if thing.whom == worker.name)
        yield next(generate(*args))
        worker.target.health = lambda: 1 / 0
        raise Broken("its process ended")

    def awake(things: Any, timeout_s: float, what: str, watch: Any = None) -> Any:
        if not (left := [thing for thing in things if thing not in hung]):
            raise DeadlineExceeded(what, "all of them", timeout_s)
        return ready(left, timeout_s, what)

    def start(number: int) -> list[LocalWorker]:
        starts.append(number)
        return [successor]

    successor = LocalWorker(
        worker.name, FakeEngine(world.cluster.store, lambda request: 3, 9, {}, world.cluster.store.put)
    )
    world.cluster._workers.append(worker)  # as if it had spawned it
    world.cluster.ready = awake  # type: ignore[method-assign]
    world.cluster.call_timeout_s = 0.0 if hangs else 30.0
    worker.target.generate_refs = generate_refs
    world.engines.start, world.engines.restarts = start, Retries(1, 0.0)
    for other in (*world.engines.workers, successor):
        other.target.health = lambda: None
    world.rollouts = Rollouts(
        world.engines, world.rollouts.environments, None, TurnLimits(1, 99, together=True), seed=5,
        hooks=RolloutHooks(
            on_retry=lambda uid, why: entries.append(f"{uid} anew"),
            on_restart=lambda name, why: entries.append(f"{name}: {why}"),
            restore_engines=lambda: (entries.append("refit"), world.engines.lost.clear()),
        ),
    )  # fmt: skip
    return entries


def test_the_successor_of_a_lost_engine_gets_its_groups_after_a_refit() -> None:
    world, starts = World(max_turns=1), []
    entries = dying(world, starts=starts)
    groups = world.run(range(3))
    assert starts == [0] and len(groups) == 3
    assert entries == [
        "engine-0: 9 samples of step 1: Broken: its process ended",
        "p0 anew",
        "p1 anew",
        "p2 anew",
        "refit",
    ]
    assert len(world.engines.workers[0].target.calls) == 1  # the successor has generated everything
    assert not world.engines.lost and len(world.environment.calls) == 3


def test_the_groups_of_a_lost_engine_go_to_the_others() -> None:
    world, starts = World(engines=2, max_turns=1), []
    entries = dying(world, starts=starts)
    world.run(range(4))
    assert starts == [0] and "refit" not in entries and len(entries) == 3
    assert world.engines.serving() == [1]
    world.run(range(4, 6), step=2)  # the successor gets nothing before a refit
    assert not world.engines.workers[0].target.calls


def test_an_engine_that_hangs_is_replaced() -> None:
    world, starts = World(max_turns=1), []
    entries = dying(world, starts=starts, hangs=True)
    groups = world.run(range(3))
    assert starts == [0] and len(groups) == 3
    assert entries == ["engine-0: samples: no answer within 0 s", "p0 anew", "p1 anew", "p2 anew", "refit"]
    assert len(world.engines.workers[0].target.calls) == 1


def test_an_engine_that_hangs_does_not_affect_the_others() -> None:
    world, starts = World(engines=2, max_turns=1), []
    entries = dying(world, starts=starts, hangs=True)
    world.run(range(4))
    assert starts == [0] and len(entries) == 3 and world.engines.serving() == [1]


@pytest.mark.parametrize("unwanted", [["p1"], ["p0", "p1", "p2"]])
def test_prompts_given_up_while_waiting_for_an_engine_are_not_generated(unwanted: list[str]) -> None:
    world, starts = World(max_turns=1), []
    entries = dying(world, starts=starts)
    world.rollouts.dispatch([prompt(number) for number in range(3)], SAMPLING, generations=3, step=1)
    while awaited := world.rollouts.awaited():  # its first sample, then its death
        world.rollouts.take(world.cluster.ready(awaited, 1.0, "samples")[:1])
    assert starts == [0] and world.rollouts.generating
    world.rollouts.drop(unwanted)
    wanted = {"p0", "p1", "p2"} - set(unwanted)
    assert {world.rollouts.next_group().uid for _ in wanted} == wanted
    assert not world.rollouts.generating and ("refit" in entries) == bool(wanted)
    asked = {request.uid for requests, _ in world.engines.workers[0].target.calls for request in requests}
    assert asked == wanted


@pytest.mark.parametrize("engines", [1, 2])
def test_prompts_are_given_up_on_an_engine_that_has_just_died(engines: int) -> None:
    """The driver does not know yet that it is dead. The other prompts are generated again; those given up may be
    dispatched again."""
    world, starts = World(engines=engines, max_turns=1), []
    dying(world, starts=starts)
    dead, aborts = world.engines.workers[0], []

    class Dead:
        def result(self) -> None:
            raise WorkerDied("engine-0", "giving samples up", "its process ended")

    def call(method: str, *args: Any, **how: Any) -> Any:
        if method != "give_up":
            return LocalWorker.call(dead, method, *args, **how)
        aborts.append(args)
        return Dead()

    dead.call = call  # type: ignore[method-assign]
    world.rollouts.dispatch([prompt(number) for number in range(4)], SAMPLING, generations=3, step=1)
    world.rollouts.drop(["p0"])
    assert aborts == [(("p0",),)]
    world.rollouts.dispatch([prompt(0)], SAMPLING, generations=3, step=2)
    assert {world.rollouts.next_group().uid for _ in range(4)} == {"p0", "p1", "p2", "p3"}
    assert starts == [0] and not world.rollouts.generating


def test_too_many_deaths_end_the_run() -> None:
    world = World(max_turns=1)
    dying(world, starts=[])
    world.engines.restarts = Retries(0, 0.0)
    with pytest.raises(WorkerFailed, match="its process ended"):
        world.run(range(2))


def test_an_invalid_request_is_not_retried() -> None:
    world = World(max_turns=1)
    world.rollouts = Rollouts(
        world.engines,
        world.rollouts.environments,
        None,
        TurnLimits(1, 99, together=True),
        seed=5,
        retries=Retries(5, 0.0),
    )

    def too_long(*args: Any) -> Any:
        raise ValueError("the prompt has 900 tokens, the context 64")
        yield

    world.engines.workers[0].target.generate_refs = too_long
    with pytest.raises(WorkerFailed, match="900 tokens"):
        world.run(range(1))


def test_a_step_that_fails_for_all_calls_of_an_engine_counts_once() -> None:
    world = World(max_turns=1)
    world.rollouts = Rollouts(
        world.engines, world.rollouts.environments, None, TurnLimits(1, 99), seed=5, retries=Retries(1, 0.0)
    )
    failing(world, 0, 1, 2)
    world.rollouts.dispatch([prompt(0)], SAMPLING, generations=2, step=1)
    world.rollouts.dispatch([prompt(1)], SAMPLING, generations=2, step=2)  # a call of its own, before the failure
    assert {world.rollouts.next_group().uid for _ in range(2)} == {"p0", "p1"}


def test_a_sample_whose_earlier_turns_are_lost_starts_from_the_beginning() -> None:
    world, undisturbed = World(), World()
    retried: list[str] = []
    world.rollouts = Rollouts(
        world.engines, world.rollouts.environments, CharacterTokenizer(), TurnLimits(9, 1000), seed=5,
        retries=Retries(1, 0.0), hooks=RolloutHooks(on_retry=lambda uid, why: retried.append(uid)),
    )  # fmt: skip
    target = world.engines.workers[0].target
    generate, lost = target.generate_refs, [True]

    def generate_refs(requests: Any, sampling: Any, name: str) -> Any:
        if requests[0].continues is not None and lost:
            lost.clear()

            raise ObjectLost("engine-0", "the turns before", "its node is gone")
        yield from generate(requests, sampling, name)

    target.generate_refs = generate_refs
    (group,), (same,) = world.run(range(1)).values(), undisturbed.run(range(1)).values()
    assert [world.trajectory(group, i) for i in range(3)] == [undisturbed.trajectory(same, i) for i in range(3)]
    assert group.scores == same.scores and retried == ["p0"]
    scored = [entry for call in world.environment.calls for entry in call]
    assert len(scored) == len(set(scored)) + 1, "the first turn of one sample was scored twice"
