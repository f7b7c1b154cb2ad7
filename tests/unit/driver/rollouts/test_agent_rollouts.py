"""Samples from environments that run agents: given up ones do not come back, and come again when asked for again."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.base.clock import REAL
from grpo_mcore.cluster import Parcel, WorkerDied, WorkerFailed
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.driver.engines.retries import Retries
from grpo_mcore.driver.rollouts.agent_rollouts import AgentRollouts
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.environments.agents.samples import AgentOutcome
from grpo_mcore.generation import endpoint
from grpo_mcore.generation.endpoint import ChatRecord
from grpo_mcore.rollout.life import OpenGroup, OpenSample, Rules, TurnLimits
from grpo_mcore.rollout.trajectory import (
    AgentRequest,
    ImageSpan,
    Sampling,
    Score,
    Trajectory,
    TrajectoryRef,
    Turn,
    content_ids,
)
from tests.unit.driver.rollouts.fake_rollouts import Shuffling, engine_group, prompt


class Stream:
    """The samples of one call, in the order in which the test lets them finish."""

    whom, purpose = "gym", "samples"

    def __init__(self, samples: list[AgentRequest]) -> None:
        self.asked, self.played = samples, deque[Any]()
        self.error: type[WorkerFailed] | None = None

    def play(self, sample: AgentRequest, content: Any = None) -> None:
        ref = TrajectoryRef(sample.uid, sample.generation_index, 3, 2, 0, 1, False, "stop", None, turns=1)
        outcome = AgentOutcome(sample.uid, sample.generation_index, None, Score(1.0, "1", "", 0.0))
        self.played.append(Parcel((ref, outcome), f"seed {sample.seed}" if content is None else content))

    def __next__(self) -> Any:
        if self.error:
            raise self.error("gym", "samples", "its process ended")
        if not self.played:
            raise StopIteration
        return self.played.popleft()


class Gym(EnvironmentWorker):
    def __init__(self) -> None:
        self.name, self.timeout_s, self.runs_agents, self.restarts = "gym", 9.0, True, 0
        self.worker: Any = self
        self.streams: list[Stream] = []
        self.samples: list[TrajectoryRef] = []

    def stream(self, method: str, samples: list[AgentRequest], *_: Any, **__: Any) -> Stream:  # type: ignore[override]
        self.streams.append(Stream(samples))
        return self.streams[-1]

    def restart(self) -> None:
        self.restarts += 1


@pytest.fixture
def gym() -> Gym:
    return Gym()


@pytest.fixture
def agents(gym: Gym) -> AgentRollouts:
    engines: Any = SimpleNamespace(
        endpoint=SimpleNamespace(address="here"), weight_version=1, images=None, cluster=SimpleNamespace(clock=REAL)
    )
    return AgentRollouts(gym, engines, lambda sample, result: gym.samples.append(result[0]))


def dispatch(agents: AgentRollouts, *numbers: int, step: int = 1, size: int = 2) -> list[OpenSample]:
    rows: Any = [prompt(number, idx=number, extra_env_info={"agent_task": {}}) for number in numbers]
    groups = [OpenGroup(row, step, Sampling(8), Rules(TurnLimits(1, 99), 5), size) for row in rows]
    for group in groups:
        group.has_agents = True
    samples = [OpenSample(group, index) for group in groups for index in range(size)]
    agents.add(samples)
    agents.send()
    return samples


def drop(samples: list[OpenSample], *uids: str) -> None:
    for sample in samples:
        if sample.group.uid in uids:
            sample.drop()


def play(agents: AgentRollouts, gym: Gym, stream: Stream, count: int) -> list[tuple[str, Any]]:
    """Finish the next samples of a call. Return those that come, as (uid, trajectory)."""
    for sample in stream.asked[:count]:
        stream.play(sample)
        assert agents.take(stream)
    del stream.asked[:count]
    came = [(sample.uid, sample.ref) for sample in gym.samples]
    gym.samples.clear()
    return came


def test_samples_given_up_still_finish_and_do_not_count(agents: AgentRollouts, gym: Gym) -> None:
    samples = dispatch(agents, 0, 1)
    assert [uid for uid, _ in play(agents, gym, gym.streams[0], 1)] == ["p0"]
    drop(samples, "p0")
    dispatch(agents, 0, step=2)
    old, new = gym.streams
    anew = [f"seed {sample.seed}" for sample in new.asked]
    assert play(agents, gym, new, 1) == [("p0", anew[0])]
    assert [uid for uid, _ in play(agents, gym, old, 3)] == ["p1", "p1"]  # the second sample of p0 is not wanted
    assert agents.awaited() == [new]
    assert play(agents, gym, new, 1) == [("p0", anew[1])]
    assert agents.awaited() == []


@pytest.mark.parametrize("error", [WorkerDied, WorkerFailed, None], ids=["dies", "raises", "ends early"])
@pytest.mark.parametrize("unwanted", [["p0"], ["p0", "p1"]])
def test_an_environment_that_fails_is_asked_again_only_for_samples_not_given_up(
    agents: AgentRollouts, gym: Gym, unwanted: list[str], error: type[WorkerFailed] | None
) -> None:
    drop(dispatch(agents, 0, 1), *unwanted)
    gym.streams[0].error = error
    assert agents.take(gym.streams[0]) and gym.restarts == 1
    asked = [sample.uid for stream in gym.streams[1:] for sample in stream.asked]
    assert asked == (["p1", "p1"] if "p1" not in unwanted else [])
    assert len(agents.awaited()) == len(asked) // 2
    for stream in gym.streams[1:]:
        assert [uid for uid, _ in play(agents, gym, stream, 2)] == ["p1", "p1"]
    assert agents.awaited() == []


def test_an_environment_that_dies_after_its_last_sample_costs_nothing(agents: AgentRollouts, gym: Gym) -> None:
    dispatch(agents, 0)
    (stream,) = gym.streams
    take = stream.played.popleft

    def last() -> Any:
        stream.error = WorkerDied
        return take()

    assert len(play(agents, gym, stream, 1)) == 1
    stream.played = SimpleNamespace(append=stream.played.append, popleft=last)  # type: ignore[assignment]
    assert [uid for uid, _ in play(agents, gym, stream, 1)] == ["p0"]
    assert agents.awaited() == [] and gym.restarts == 0


def test_images_that_the_endpoint_has_forgotten_cost_their_sample_alone(
    gym: Gym, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint remembers as many bytes as fit; each image is stored once a group."""
    spans = [ImageSpan(0, 2, name, (1, 2, 4)) for name in ("old", "new")]
    monkeypatch.setattr(endpoint, "MAX_IMAGE_BYTES", 12)
    record, cluster = ChatRecord(0), Shuffling(0)
    record.note_images(spans[:1], [b"old bytes"])
    record.note_images([*spans[1:], *spans[1:]], [b"new bytes"] * 2)
    shown = [Turn("user", torch.tensor([6, 6]), images=(span,)) for span in (spans[0], spans[1], spans[1])]
    turns = [Turn("user", content_ids([turn])) for turn in shown]
    told = [Trajectory("p0", i, (turn,), ((1, 0, 2),), "stop", False) for i, turn in enumerate(turns)]
    engines: Any = SimpleNamespace(
        endpoint=SimpleNamespace(address="here", record=record), weight_version=1, cluster=cluster,
        images=SimpleNamespace(vision=SimpleNamespace(image_token=6)),
    )  # fmt: skip
    came: list[Any] = []
    agents = AgentRollouts(gym, engines, lambda sample, result: came.append(result))
    samples = dispatch(agents, 0, size=3)
    (stream,) = gym.streams
    for asked, trajectory in zip(stream.asked, told, strict=True):
        stream.play(asked, cluster.store.put(trajectory))
        assert agents.take(stream)
    (lost, score), *kept = came
    assert (lost.ref, score.reward) == (None, None) and "does not know an image" in score.reason
    assert [it.images for it, _ in kept] == [samples[0].group.images] * 2 and list(samples[0].group.images) == ["new"]
    assert cluster.store.fetch(kept[0][0].images["new"]) == b"new bytes"
    (turn,) = cluster.store.fetch(kept[0][0].ref).turns
    assert turn.token_ids.tolist() == [6, 6] and turn.images == (spans[1],) and kept[0][1].reward == 1


def test_a_group_may_be_complete_without_its_last_samples(gym: Gym) -> None:
    """grpo.async_grpo.min_samples_per_group was not applied to agents. They finish the others all the same."""
    group = engine_group(Shuffling(0), 1)
    group.endpoint = SimpleNamespace(address="here")  # type: ignore[assignment]
    rollouts = Rollouts(group, {"game": gym}, None, TurnLimits(1, 99), seed=5, enough_samples=2)
    row: Any = prompt(0, idx=0, extra_env_info={"agent_task": {}})
    for step in (1, 2):  # the same prompt again: a late sample of the first step is not one of the second
        rollouts.dispatch([row], Sampling(8), generations=3, step=step)
        late = [(gym.streams[0], gym.streams[0].asked[2])] if step == 2 else []
        for stream, asked in [*late, *((gym.streams[-1], asked) for asked in gym.streams[-1].asked[:2])]:
            assert not rollouts._finished
            stream.play(asked, f"of step {step}" if stream is gym.streams[-1] else "late")
            rollouts.take([stream])
        samples = rollouts.next_group().samples
        assert [(it.generation_index, it.ref) for it in samples] == [(index, f"of step {step}") for index in (0, 1)]


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_whose_death_only_the_endpoint_noticed_is_replaced(gym: Gym, engines: int) -> None:
    """Its successor is refitted at once if the agents have no other engine."""
    cluster, entries = Shuffling(0), list[str]()
    group = engine_group(cluster, engines)
    dead, successor = group.workers[0], LocalWorker("engine-0", group.workers[0].target)
    group.endpoint = SimpleNamespace(address="here")  # type: ignore[assignment]
    group.start, group.restarts = lambda number: [successor], Retries(1, 0.0)
    cluster._workers.append(dead)  # type: ignore[arg-type]
    rollouts = Rollouts(
        group, {"game": gym}, None, TurnLimits(1, 99), seed=5,
        hooks=RolloutHooks(
            on_restart=lambda name, why: entries.append(name),
            restore_engines=lambda: (entries.append("refit"), group.lost.clear()),
        ),
    )  # fmt: skip
    rollouts.dispatch([prompt(0, idx=0, extra_env_info={"agent_task": {}})], Sampling(8), generations=2, step=1)
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
