"""Multi-turn rollouts over Ray: trajectories stay in its object store, and later requests refer to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
import torch

from examples.sliding_puzzle.make_model import CHARACTERS, WORDS, make_tokenizer
from grpo_mcore.algorithms.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.algorithms.rollouts.agent_rollouts import AgentWorker
from grpo_mcore.algorithms.rollouts.rollouts import Rollouts
from grpo_mcore.algorithms.rollouts.scoring import EnvironmentWorker, as_workers
from grpo_mcore.cluster import Parcel
from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.cluster.ray_worker import PartRef
from grpo_mcore.data import load_tokenizer
from grpo_mcore.environments.nemo_gym import NemoGymEnvironment
from grpo_mcore.generation.chat.endpoint import Endpoint
from grpo_mcore.generation.chat.engine_chat import EngineChat, Reply
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.conversation import TurnLimits
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Sampling, Trajectory, TrajectoryRef, Turn
from tests.gym_server import AGENT, GymServer
from tests.unit.algorithms.rollouts.fake_rollouts import CharacterTokenizer, FakeEngine, FakeEnvironment, prompt

pytestmark = pytest.mark.distributed


def length(request: GenerationRequest) -> int:
    """Many tokens for the first sample, because Ray does not keep small objects in its store."""
    return 20_000 if request.generation_index == 0 else 5


def decide(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
    """Sample i of prompt n has 1 + (i + n) % 3 turns; the state counts them."""
    turn = metadata.get("turn", 0) + 1
    over = turn == 1 + (trajectory.generation_index + metadata["number"]) % 3
    return Outcome(1.0, None, "", 0.0, terminated=over, observation="on", metadata=metadata | {"turn": turn})


def fail(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
    raise RuntimeError("the world ended")


def misbehave(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
    """Sample 1 of prompt 2 kills its environment, prompt 4 hangs."""
    if metadata["number"] == 2 and trajectory.generation_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if metadata["number"] == 4:
        time.sleep(3600)
    return Outcome(1.0, None, "", 0.0, terminated=True)


class LongEngine:
    """An engine whose samples all have the maximum number of tokens, and are handed over together."""

    def generate_refs(self, requests: list[GenerationRequest], sampling: Sampling, name: str) -> Iterator[list[Parcel]]:
        trajectories, count = [], sampling.max_new_tokens
        for request in requests:
            turn = Turn("assistant", torch.ones(count, dtype=torch.int64), torch.zeros(count), loss_mask=True, text="")
            trajectory = Trajectory(
                request.uid, request.generation_index, (*request.turns, turn), ((1, 0, count),), "stop", False, None
            )
            trajectories.append(trajectory)
        yield [Parcel(TrajectoryRef.of(trajectory, None), trajectory) for trajectory in trajectories]


class Rank:
    """A policy rank that only receives samples."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def receive(self, references: list[Any]) -> int:
        return sum(trajectory.length for trajectory in self.store.fetch_many(references))


def decide_at_once(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
    return Outcome(1.0, None, "", 0.0, terminated=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("ray")
    with RayCluster(folder, address="local", num_cpus=4, start_timeout_s=150, call_timeout_s=60) as cluster:
        yield cluster


def test_turns_over_ray(cluster: RayCluster) -> None:
    workers = [
        cluster.spawn(f"engine-{index}", FakeEngine, cluster.store, length, index, cpus=0.1) for index in range(2)
    ]
    game = cluster.spawn("game", FakeEnvironment, decide, cpus=0.1)
    broken = cluster.spawn("broken", FakeEnvironment, fail, cpus=0.1)
    engines = EngineGroup(cluster, list(map(EngineSlot, workers)), sleeps=False)

    def rollouts(environment: Any) -> Rollouts:
        limits = TurnLimits(4, 100_000)
        return Rollouts(engines, {"game": environment}, CharacterTokenizer(), limits, seed=1)

    for environment in (game, as_workers({"game": FakeEnvironment(decide)}, cluster)["game"]):  # a worker; our own
        play = rollouts(environment)
        play.dispatch([prompt(number) for number in range(5)], Sampling(20_000), generations=3, step=1)
        groups = [play.next_group() for _ in range(5)]
        assert not play.generating
        for group in groups:
            number = group.prompt["extra_env_info"]["number"]
            for index, (sample, score) in enumerate(zip(group.samples, group.scores, strict=True)):
                turns = 1 + (index + number) % 3
                assert isinstance(sample.ref, PartRef) and isinstance(sample.ref.whole, ray.ObjectRef)
                trajectory = cluster.store.fetch(sample.ref)
                assert (sample.turns, score.reward, sample.length) == (turns, turns, trajectory.length)
                generated = [turn for turn in trajectory.turns if turn.loss_mask]
                assert [len(turn) for turn in generated] == [20_000 if index == 0 else 5] * turns

    wrong = rollouts(broken)
    wrong.dispatch([prompt(7)], Sampling(8), generations=2, step=1)
    scores = wrong.next_group().scores
    assert [score.reward for score in scores] == [None, None]
    assert all("RuntimeError: the world ended" in score.reason for score in scores)


def test_an_environment_that_dies_or_hangs_costs_its_own_sample(cluster: RayCluster) -> None:
    def start() -> Any:
        return cluster.spawn("judge", FakeEnvironment, misbehave, cpus=0.1)

    judge = EnvironmentWorker(cluster, start, calls=2, timeout_s=10.0)
    engine = cluster.spawn("engine", FakeEngine, cluster.store, lambda request: 5, 0, cpus=0.1)
    play = Rollouts(
        EngineGroup(cluster, [EngineSlot(engine)], sleeps=False),
        {"game": judge},
        CharacterTokenizer(),
        TurnLimits(1, 100),
        seed=1,
    )
    for numbers, generations in ((range(4), 3), ([4], 1), ([5], 3)):
        play.dispatch([prompt(number) for number in numbers], Sampling(8), generations=generations, step=1)
        groups = {group.uid: group for group in (play.next_group() for _ in numbers)}
        for number in numbers:
            scores = groups[f"p{number}"].scores
            lost = {2: [1], 4: [0]}.get(number, [])
            assert [index for index, score in enumerate(scores) if score.reward is None] == lost
            for index in lost:
                reason = "the environment died" if number == 2 else "no verdict within 10 s"
                assert scores[index].reason.startswith(reason)
    assert not play.generating


class ChatEngine:
    """An engine with a chat API whose tokens are drawn from the request's seed."""

    def __init__(self, folder: str) -> None:
        tokenizer = load_tokenizer(folder)
        self.eos = tokenizer.eos_token_id
        config = ChatConfig("policy", (Sampling(8, stop_token_ids=(self.eos,)),))
        self._chat = EngineChat(config, tokenizer, self.generate, max_model_len=200, vocab_size=64)

    def generate(self, requests: list[GenerationRequest], sampling: Sampling) -> Iterator[Trajectory]:
        for request in requests:
            ids = torch.randint(8, 50, (7,), generator=torch.Generator().manual_seed(request.seed))
            ids = torch.cat([ids, torch.tensor([self.eos])])
            turns = (*request.turns, Turn("assistant", ids, -torch.rand(8), loss_mask=True))
            spans = ((4, 0, len(request.token_ids()) + 8),)
            yield Trajectory(request.uid, 0, turns, spans, "stop", False, stop_token=self.eos)

    def chat(self, kind: str, body: Any, seed: int) -> Iterator[Reply]:
        yield self._chat.answer(kind, body, seed)


def test_a_gym_plays_over_ray_and_survives_the_death_of_its_worker(
    cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, CHARACTERS, WORDS)
    workers = [cluster.spawn(f"chat-{i}", ChatEngine, str(folder), cpus=0.1, streams=16) for i in range(2)]
    started: list[Any] = []

    def start() -> Any:
        section = {"head_server_url": gym.head_url, "rollout_timeout_s": 300.0}
        started.append(cluster.spawn("gym", AgentWorker, NemoGymEnvironment, section, cpus=0.1, streams=4))
        return started[-1]

    engines = EngineGroup(cluster, list(map(EngineSlot, workers)), sleeps=False)
    endpoint = Endpoint(engines, model="policy", token="the token", host=cluster.address)
    gym = GymServer(endpoint.address.url, "the token", "policy")
    engines.endpoint = endpoint
    try:
        env = EnvironmentWorker(cluster, start, calls=1, timeout_s=120.0, runs_agents=True)
        play = Rollouts(engines, {"game": env}, CharacterTokenizer(), TurnLimits(1, 200), seed=1)
        task = {"responses_create_params": {"input": "go"}, "agent_ref": {"name": AGENT}, "turns": 3}
        tasks = [task, task, task | {"behave": "hang once", "rollout": 0}, task | {"behave": "4xx", "rollout": 1}]
        prompts = [prompt(n, idx=n, extra_env_info={"gym_task": found}) for n, found in enumerate(tasks)]
        play.dispatch(prompts, Sampling(8), generations=2, step=1)
        groups = [play.next_group() for _ in range(3)]
        os.kill(started[-1].place().pid, signal.SIGKILL)
        groups.append(play.next_group())
        assert not play.generating and len(started) == 2 and groups[-1].uid == "p2"
        for group in groups:
            for index, (sample, score) in enumerate(zip(group.samples, group.scores, strict=True)):
                if (group.uid, index) == ("p3", 1):
                    assert score.reward is None and sample.ref is None and "422" in score.reason
                    continue
                trajectory = cluster.store.fetch(sample.ref)
                assert (sample.turns, sample.cut_turns, score.reward in (0.0, 1.0)) == (3, 0, True)
                assert trajectory.weight_versions == ((4, 0, sample.length),)
                assert [len(turn) for turn in trajectory.turns if turn.loss_mask] == [8, 8, 8]
        assert not gym.faults
    finally:
        gym.close()
        endpoint.close()


def test_the_drivers_memory_does_not_grow_with_the_length_of_samples(cluster: RayCluster) -> None:
    """Run 20 steps of 16 samples, then 20 with samples 16 times longer, which have 63 MB in total."""
    engines = EngineGroup(cluster, [EngineSlot(cluster.spawn("long", LongEngine, cpus=0.1))], sleeps=False)
    judge = cluster.spawn("at-once", FakeEnvironment, decide_at_once, cpus=0.1)
    rank = cluster.spawn("rank", Rank, cluster.store, cpus=0.1)
    play = Rollouts(engines, {"game": judge}, CharacterTokenizer(), TurnLimits(1, 100_000), seed=1)

    def resident_after_20_steps(tokens: int) -> int:
        for step in range(20):
            play.dispatch([prompt(number) for number in range(4)], Sampling(tokens), generations=4, step=step)
            groups = [play.next_group() for _ in range(4)]
            references = [sample.ref for group in groups for sample in group.samples]
            assert rank.call("receive", references).result() == 16 * (tokens + 3)
        return psutil.Process().memory_info().rss

    short, long = resident_after_20_steps(1024), resident_after_20_steps(16 * 1024)
    print(f"resident: {short / 1e6:.1f} MB, with samples 16 times longer {long / 1e6:.1f} MB")
    assert long < 1.05 * short
