"""Samples that an environment plays: what is given up meanwhile does not come back, and comes anew when asked again."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mcore.algorithms.engines.retries import Retries
from grpo_mcore.algorithms.rollouts.agent_rollouts import AgentRollouts
from grpo_mcore.algorithms.rollouts.rollouts import Rollouts
from grpo_mcore.cluster import Parcel, WorkerDied
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.environments.nemo_gym import GymOutcome, GymSample
from grpo_mcore.rollout.conversation import TurnLimits
from grpo_mcore.rollout.trajectory import Sampling, Score, TrajectoryRef
from tests.unit.algorithms.rollouts.fake_rollouts import Shuffling, engine_group, prompt


class Stream:
    """The samples of one call, in the order in which the test lets them be played."""

    whom = "gym"

    def __init__(self, samples: list[GymSample]) -> None:
        self.asked, self.played, self.dead = samples, deque[Any](), False

    def play(self, sample: GymSample) -> None:
        ref = TrajectoryRef(sample.uid, sample.generation_index, 3, 2, 0, 1, False, "stop", None, turns=1)
        outcome = GymOutcome(sample.uid, sample.generation_index, None, Score(1.0, "1", "", 0.0))
        self.played.append(Parcel((ref, outcome), f"seed {sample.seed}"))

    def __next__(self) -> Any:
        if self.dead:
            raise WorkerDied("gym", "samples", "its process ended")
        if not self.played:
            raise StopIteration
        return self.played.popleft()


class Gym:
    name, timeout_s, restarts, plays = "gym", 9.0, 0, True

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def stream(self, method: str, samples: list[GymSample], *_: Any, **__: Any) -> Stream:
        self.streams.append(Stream(samples))
        return self.streams[-1]

    def restart(self) -> None:
        self.restarts += 1


@pytest.fixture
def gym() -> Gym:
    return Gym()


@pytest.fixture
def playing(gym: Gym) -> AgentRollouts:
    engines: Any = SimpleNamespace(endpoint=SimpleNamespace(address="here"), weight_version=1)
    return AgentRollouts({"game": gym}, engines, seed=5, on_sample=lambda: None)


def dispatch(playing: AgentRollouts, *numbers: int, step: int = 1) -> None:
    prompts = [prompt(number, idx=number, extra_env_info={"gym_task": {}}) for number in numbers]
    playing.dispatch(prompts, Sampling(8), generations=2, step=step)


def play(playing: AgentRollouts, stream: Stream, count: int) -> list[tuple[str, list[Any]]]:
    """The next samples of the call; the groups that are whole with them, by uid and trajectories."""
    for sample in stream.asked[:count]:
        stream.play(sample)
        assert playing.take(stream)
    del stream.asked[:count]
    return [(group.uid, [sample.ref for sample in group.samples]) for group in playing.finished()]


def test_what_was_given_up_is_played_to_its_end_and_does_not_count(playing: AgentRollouts, gym: Gym) -> None:
    dispatch(playing, 0, 1)
    assert play(playing, gym.streams[0], 1) == []
    playing.forget(["p0"])
    dispatch(playing, 0, step=2)
    old, new = gym.streams
    anew = [f"seed {sample.seed}" for sample in new.asked]
    assert play(playing, new, 1) == []
    assert [uid for uid, _ in play(playing, old, 3)] == ["p1"]  # the second sample of p0 is nobody's
    assert playing.awaited() == [new]
    assert play(playing, new, 1) == [("p0", anew)]
    assert playing.awaited() == []


def test_a_finished_group_may_be_given_up(playing: AgentRollouts, gym: Gym) -> None:
    dispatch(playing, 0)
    (stream,) = gym.streams
    for sample in stream.asked:
        stream.play(sample)
        playing.take(stream)
    playing.forget(["p0"])
    assert list(playing.finished()) == [] and playing.awaited() == []


@pytest.mark.parametrize("unwanted", [["p0"], ["p0", "p1"]])
def test_an_environment_that_dies_is_asked_anew_only_for_what_is_wanted(
    playing: AgentRollouts, gym: Gym, unwanted: list[str]
) -> None:
    dispatch(playing, 0, 1)
    playing.forget(unwanted)
    gym.streams[0].dead = True
    assert playing.take(gym.streams[0]) and gym.restarts == 1
    asked = [sample.uid for stream in gym.streams[1:] for sample in stream.asked]
    assert asked == (["p1", "p1"] if "p1" not in unwanted else [])
    assert len(playing.awaited()) == len(asked) // 2
    for stream in gym.streams[1:]:
        assert [uid for uid, _ in play(playing, stream, 2)] == ["p1"]
    assert playing.awaited() == []


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_whose_death_only_the_endpoint_has_met_is_replaced(gym: Gym, engines: int) -> None:
    """And refitted at once where agents can ask no other."""
    cluster, entries = Shuffling(0), list[str]()
    group = engine_group(cluster, engines)
    dead, successor = group.workers[0], LocalWorker("engine-0", group.workers[0].target)
    group.endpoint = SimpleNamespace(address="here")  # type: ignore[assignment]
    group.start, group.restarts = lambda number: [successor], Retries(1, 0.0)
    cluster._workers.append(dead)  # type: ignore[arg-type]
    rollouts = Rollouts(
        group, {"game": gym}, None, TurnLimits(1, 99), seed=5,  # type: ignore[dict-item]
        on_restart=lambda name, why: entries.append(name),
        restore_engines=lambda: (entries.append("refit"), group.lost.clear()),
    )  # fmt: skip
    rollouts.dispatch([prompt(0, idx=0, extra_env_info={"gym_task": {}})], Sampling(8), generations=2, step=1)
    assert not group.unanswered(dead, OSError("too long a line"))
    assert group.reachable() == list(range(engines)) and not group.returning
    dead.target.health = lambda: 1 / 0
    assert group.unanswered(dead, WorkerDied("engine-0", "a chat", "its process ended"))
    assert group.reachable() == list(range(1, engines)) and not group.returning
    for sample in gym.streams[0].asked:
        gym.streams[0].play(sample)
    assert rollouts.next_group().uid == "p0"
    assert group.workers[0] is successor and not group.deaths
    assert entries == (["engine-0", "refit"] if engines == 1 else ["engine-0"])
    assert group.returning == (engines == 2)
