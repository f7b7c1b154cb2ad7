"""Engines get as many samples as they may run; next turns go first, then those that will be long."""

import heapq
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.rollouts import CASES
from benchmarks.rollouts import World as VirtualWorld
from grpo_mcore.driver.rollouts.rollouts import Rollouts
from grpo_mcore.rollout.life import OpenGroup, OpenSample, Rules, TurnLimits
from grpo_mcore.rollout.trajectory import Outcome, Trajectory
from tests.unit.driver.rollouts.fake_rollouts import SAMPLING, CharacterTokenizer, World, play, prompt


def limited(world: Any, max_running: int | None) -> None:
    before = world.rollouts
    world.rollouts = Rollouts(
        world.engines, before.environments, CharacterTokenizer(), before.limits, seed=5, max_running=max_running
    )


def test_an_engine_runs_at_most_so_many_samples_and_is_kept_full(monkeypatch: pytest.MonkeyPatch) -> None:
    world = VirtualWorld(CASES["tool_4_turns_1s"], 3, together=False, engines=2)
    limited(world, 20)
    running: list[int] = []
    add = type(world.workers[0]).add

    def counted(engine: Any, stream: Any, requests: Any) -> None:
        add(engine, stream, requests)
        running.append(len(engine.running) + len(engine.joining))

    monkeypatch.setattr(type(world.workers[0]), "add", counted)
    bounded = world.run(256, 0, 1)
    assert max(running) == 20 and world.rollouts.most_queued() >= 256 - 2 * 20
    assert world.rollouts.most_queued() == 0, "since the last call"
    free = VirtualWorld(CASES["tool_4_turns_1s"], 3, together=False, engines=2)
    assert free.run(256, 0, 1) < bounded
    assert free.rollouts.most_queued() == 0


@pytest.mark.parametrize(("max_running", "counted"), [(None, 0), (2, 4)])
def test_only_samples_that_the_limit_keeps_back_count_as_waiting(
    max_running: int | None, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit a sample waits for the way of others to the stream that it will join, a few milliseconds."""
    world = World(play)
    limited(world, max_running)
    monkeypatch.setattr(world.rollouts._engine_queues, "_room", lambda engine: (0, None))
    world.rollouts.dispatch([prompt(n) for n in range(4)], SAMPLING, generations=1, step=1)
    assert world.rollouts.most_queued() == counted


def test_samples_of_prompts_with_long_answers_go_first() -> None:
    """In the second epoch the lengths of the first are known."""

    def at_once(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
        return Outcome(1.0, None, "", 0.0)

    world = World(at_once, max_turns=1, length=lambda request: 2 + int(request.uid[1:].partition("@")[0]))
    limited(world, 1)
    world.run(range(4), generations=1)
    first = [request.uid for requests, _ in world.calls() for request in requests]
    assert first == ["p0", "p1", "p2", "p3"], "in the order of dispatch, as nothing is known"
    prompts = [prompt(number, uid=f"p{number}@2") for number in range(4)]
    world.rollouts.dispatch(prompts, world.calls()[0][1], generations=1, step=2)
    for _ in prompts:
        world.rollouts.next_group()
    second = [request.uid for requests, _ in world.calls() for request in requests][4:]
    assert second == ["p3@2", "p2@2", "p1@2", "p0@2"]


def test_next_turns_go_before_first_ones() -> None:
    """A sample that has begun goes on before another begins: the engine's cache holds what it continues."""
    queues = World(play).rollouts._engine_queues
    samples = [OpenSample(OpenGroup(prompt(n), 1, SAMPLING, Rules(TurnLimits(2, 99), 5), 1), 0) for n in range(4)]
    samples[2].wait = replace(samples[2].wait, continues="its turns")
    queues.add(samples)
    waiting = [queues._queued[0] for _ in samples]
    assert [heapq.heappop(entries)[1].group.uid for entries in waiting] == ["p2", "p0", "p1", "p3"]
