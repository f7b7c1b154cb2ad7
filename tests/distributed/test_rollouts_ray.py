"""Multi-turn rollouts over Ray: trajectories stay in its object store, and later requests refer to them."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from examples.sliding_puzzle.make_model import CHARACTERS, WORDS, make_tokenizer
from grpo_mcore.cluster import Parcel, Worker, call_all, remote_call
from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.cluster.ray_worker import PartRef
from grpo_mcore.data import load_tokenizer
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.driver.rollouts.agent_rollouts import AgentWorker
from grpo_mcore.driver.rollouts.rollouts import Rollouts
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker, as_workers
from grpo_mcore.environments.gym.nemo_gym import NemoGymEnvironment
from grpo_mcore.generation.chat.engine_chat import EngineChat, Reply
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.generation.endpoint import Endpoint
from grpo_mcore.rollout.life import TurnLimits
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, TrajectoryRef, Turn
from tests.distributed.rollout_workers import BROKEN, FATAL, HANGING, SHORT, Game
from tests.gym_server import AGENT, GymServer
from tests.unit.driver.rollouts.fake_rollouts import CharacterTokenizer, FakeEngine, prompt

pytestmark = pytest.mark.distributed


class Engine(FakeEngine):
    """The first sample of a prompt has many tokens, because Ray does not keep small objects in its store. Samples of
    prompts from SHORT on have as many as they may, and are handed over together. The chat API draws tokens from the
    request's seed."""

    def __init__(self, store: Any, number: int) -> None:
        super().__init__(store, lambda request: 20_000 if request.generation_index == 0 else 5, number)

    def generate_refs(self, requests: list[GenerationRequest], sampling: Sampling, name: str) -> Iterator[list[Parcel]]:
        if int(requests[0].uid.removeprefix("p")) < SHORT:
            yield from super().generate_refs(requests, sampling, name)
            return
        trajectories, count = [], sampling.max_new_tokens
        for request in requests:
            turn = Turn("assistant", torch.ones(count, dtype=torch.int64), torch.zeros(count), loss_mask=True, text="")
            trajectory = Trajectory(
                request.uid, request.generation_index, (*request.turns, turn), ((1, 0, count),), "stop", False, None
            )
            trajectories.append(trajectory)
        yield [Parcel(TrajectoryRef.of(trajectory, None), trajectory) for trajectory in trajectories]

    def start_chat(self, folder: str) -> None:
        """Start the chat API with the tokenizer of this folder."""
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

    def receive(self, references: list[Any]) -> int:
        """Fetch samples, as a policy rank does, and return how many tokens they have."""
        return sum(trajectory.length for trajectory in self.store.fetch_many(references))


@pytest.fixture(scope="module")
def cluster(ray_cluster: RayCluster) -> RayCluster:
    return ray_cluster


@pytest.fixture(scope="module")
def workers(cluster: RayCluster) -> Iterator[list[Worker]]:
    """Two engines. A process takes seconds to import torch, so all tests share them and `game`."""
    started = [cluster.spawn(f"engine-{i}", Engine, cluster.store, i, cpus=0.1, streams=1) for i in range(2)]
    yield list(started)
    cluster.stop(started)


@pytest.fixture(scope="module")
def game(cluster: RayCluster) -> Iterator[EnvironmentWorker]:
    environment = EnvironmentWorker(cluster, lambda: cluster.spawn("game", Game, cpus=0.1), calls=8, timeout_s=60.0)
    yield environment
    cluster.stop([environment.worker])


@pytest.fixture
def engines(cluster: RayCluster, workers: list[Worker]) -> EngineGroup:
    return EngineGroup(cluster, list(map(EngineSlot, workers)), sleeps=False)


def test_turns_over_ray(cluster: RayCluster, engines: EngineGroup, game: EnvironmentWorker) -> None:
    def rollouts(environment: EnvironmentWorker) -> Rollouts:
        limits = TurnLimits(4, 100_000)
        return Rollouts(engines, {"game": environment}, CharacterTokenizer(), limits, seed=1)

    for environment in (game, as_workers({"game": Game()}, cluster)["game"]):  # a worker's; our own
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

    wrong = rollouts(game)
    wrong.dispatch([prompt(BROKEN)], Sampling(8), generations=2, step=1)
    scores = wrong.next_group().scores
    assert [score.reward for score in scores] == [None, None]
    assert all("RuntimeError: the world ended" in score.reason for score in scores)


def test_a_finished_step_is_gone_at_once(cluster: RayCluster, engines: EngineGroup) -> None:
    """Nothing of it waits for Python's garbage collector, which a driver runs rarely: the store keeps each sample to
    which a reference exists."""
    pair = EnvironmentWorker(
        cluster, lambda: cluster.spawn("pair", Game, cpus=0.1, concurrency=2), calls=2, timeout_s=60.0
    )
    play = Rollouts(engines, {"game": pair}, CharacterTokenizer(), TurnLimits(4, 100_000), seed=1)

    def step(number: int) -> None:
        for first in (0, SHORT):  # of several turns, one by one; of one turn, all at once
            play.dispatch([prompt(first + one) for one in range(4)], Sampling(50), generations=3, step=number)
            for _ in range(4):
                play.next_group()

    try:
        pair.worker.ready().result()
        step(1)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        step(2)
        gc.collect()
        kept = {type(thing) for thing in gc.garbage if type(thing).__module__.startswith(("grpo_mcore.", "ray."))}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        cluster.stop([pair.worker])
    assert not kept


def test_an_environment_that_dies_or_hangs_costs_its_own_sample(cluster: RayCluster, engines: EngineGroup) -> None:
    def start() -> Any:
        return cluster.spawn("judge", Game, cpus=0.1)

    judge = EnvironmentWorker(cluster, start, calls=2, timeout_s=5.0)
    judge.worker.ready().result()  # its start is no part of the first call
    play = Rollouts(engines, {"game": judge}, CharacterTokenizer(), TurnLimits(1, 100_000), seed=1)
    for numbers, generations in (([0, 1, FATAL, 3], 3), ([HANGING], 1), ([5], 3)):
        play.dispatch([prompt(number) for number in numbers], Sampling(8), generations=generations, step=1)
        groups = {group.uid: group for group in (play.next_group() for _ in numbers)}
        for number in numbers:
            scores = groups[f"p{number}"].scores
            lost = {FATAL: [1], HANGING: [0]}.get(number, [])
            assert [index for index, score in enumerate(scores) if score.reward is None] == lost
            for index in lost:
                reason = "the environment died" if number == FATAL else "no score within 5 s"
                assert scores[index].reason.startswith(reason)
    assert not play.generating
    cluster.stop([judge.worker])


def test_a_gym_plays_over_ray_and_survives_the_death_of_its_worker(
    cluster: RayCluster, engines: EngineGroup, workers: list[Worker], tmp_path: Path
) -> None:
    make_tokenizer(tmp_path, CHARACTERS, WORDS)
    call_all(cluster, workers, Engine.start_chat)(str(tmp_path))
    started: list[Any] = []

    def start() -> Any:
        section = {"head_server_url": gym.head_url, "rollout_timeout_s": 300.0}
        started.append(cluster.spawn("gym", AgentWorker, NemoGymEnvironment, section, cpus=0.1, streams=4))
        return started[-1]

    endpoint = Endpoint(engines, model="policy", token="the token", host=cluster.address)
    gym = GymServer(endpoint.address.url, "the token", "policy")
    engines.endpoint = endpoint
    try:
        env = EnvironmentWorker(cluster, start, calls=1, timeout_s=120.0, runs_agents=True)
        play = Rollouts(engines, {"game": env}, CharacterTokenizer(), TurnLimits(1, 200), seed=1)
        task = {"responses_create_params": {"input": "go"}, "agent_ref": {"name": AGENT}, "turns": 3}
        tasks = [task, task, task | {"behave": "hang once", "rollout": 0}, task | {"behave": "4xx", "rollout": 1}]
        prompts = [prompt(n, idx=n, extra_env_info={"agent_task": found}) for n, found in enumerate(tasks)]
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
                assert (sample.turns, score.reward in (0.0, 1.0)) == (3, True)
                assert trajectory.weight_versions == ((4, 0, sample.length),)
                assert [len(turn) for turn in trajectory.turns if turn.loss_mask] == [8, 8, 8]
        assert not gym.faults
    finally:
        gym.close()
        endpoint.close()
    cluster.stop([env.worker])


def test_the_drivers_memory_does_not_grow_with_the_length_of_samples(
    engines: EngineGroup, workers: list[Worker], game: EnvironmentWorker
) -> None:
    """Run 20 steps of 16 samples, then 20 with samples 16 times longer, which have 63 MB in total."""
    rank = remote_call(workers[1], Engine.receive)
    play = Rollouts(engines, {"game": game}, CharacterTokenizer(), TurnLimits(1, 100_000), seed=1)

    def resident_after_20_steps(tokens: int) -> int:
        for step in range(20):
            play.dispatch([prompt(SHORT + n) for n in range(4)], Sampling(tokens), generations=4, step=step)
            groups = [play.next_group() for _ in range(4)]
            references = [sample.ref for group in groups for sample in group.samples]
            assert rank(references).result() == 16 * (tokens + 3)
        return psutil.Process().memory_info().rss

    short, long = resident_after_20_steps(1024), resident_after_20_steps(16 * 1024)
    print(f"resident: {short / 1e6:.1f} MB, with samples 16 times longer {long / 1e6:.1f} MB")
    assert long < 1.05 * short
