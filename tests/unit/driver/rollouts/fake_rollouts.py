"""Engines and environments without models, for rollouts. They record what they are asked."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_mcore.cluster import LocalCluster, Parcel
from grpo_mcore.cluster.local_cluster import LocalStream, LocalWorker
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot, with_trajectories
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.driver.rollouts.scoring import as_workers
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.life import TurnLimits
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Sampling, Trajectory, TrajectoryRef, Turn

END = 7  # ends a turn


class Handles:
    """A store whose references are numbers, so that a reference cannot be mistaken for the object."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def put(self, thing: Any) -> int:
        self.objects.append(thing)
        return len(self.objects) - 1

    def fetch(self, ref: int) -> Any:
        return self.objects[ref]

    def fetch_many(self, refs: Sequence[int]) -> list[Any]:
        return [self.objects[ref] for ref in refs]


class Shuffling(LocalCluster):
    """A cluster in this process. A seeded random draw decides what is ready first; a worker runs its calls in order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.store: Any = Handles()
        self._draw = random.Random(seed)

    def ready(self, things: Any, timeout_s: float, purpose: str, watch: Any = None, *, patient: bool = False) -> Any:
        first = {thing.whom: thing for thing in reversed(things) if isinstance(thing, LocalStream)}
        answers = [thing for thing in things if not isinstance(thing, LocalStream)]
        return [self._draw.choice([*answers, *first.values()])]


@dataclass
class FakeEngine:
    """Generates `length(request)` tokens drawn from the request's seed, the last of them END."""

    store: Any
    length: Callable[[GenerationRequest], int]
    seed: int
    ends: dict[tuple[str, int, int], str] = field(default_factory=dict)  # (uid, generation, turn) -> finish reason
    keep: Callable[[Trajectory], Any] = lambda trajectory: trajectory  # puts it into a store if the cluster does not
    calls: list[tuple[list[GenerationRequest], Sampling]] = field(default_factory=list)
    running: bool = False
    finished: list[Trajectory] = field(default_factory=list)  # not handed over yet
    open: str = ""  # name of the stream under way
    lock: threading.Lock = field(default_factory=threading.Lock)  # `join` may run beside the stream

    def give_up(self, uids: Sequence[str]) -> None:
        """Abort what these prompts have in the call under way."""
        with self.lock:
            self.finished = [trajectory for trajectory in self.finished if trajectory.uid not in uids]

    def generate_refs(self, requests: list[GenerationRequest], sampling: Sampling, name: str) -> Iterator[list[Parcel]]:
        assert not self.running, "one call at a time"
        with self.lock:
            self.running, self.open, self.finished = True, name, []
            self._add(requests, sampling)
        while (trajectory := self._next_finished()) is not None:
            yield [Parcel(TrajectoryRef.of(trajectory, None), self.keep(trajectory))]

    def _next_finished(self) -> Trajectory | None:
        """Return a sample; without one, end the call, so that no request joins it any more."""
        with self.lock:
            if self.finished:
                return self.finished.pop()
            self.running = False
            return None

    def join(self, name: str, requests: list[GenerationRequest], sampling: Sampling) -> bool:
        with self.lock:
            is_open = self.running and self.open == name
            if is_open:
                self._add(requests, sampling)
            return is_open

    def _add(self, requests: list[GenerationRequest], sampling: Sampling) -> None:
        self.calls.append((requests, sampling))
        self.finished += [self._generate(request) for request in with_trajectories(requests, self.store)]
        random.Random(self.seed + len(self.calls)).shuffle(self.finished)

    def _generate(self, request: GenerationRequest) -> Trajectory:
        turn = sum(turn.loss_mask for turn in request.turns) + 1
        draw = random.Random(request.seed)
        reason = self.ends.get((request.uid, request.generation_index, turn), "stop")
        tokens = [draw.randrange(10, 100) for _ in range(self.length(request) - 1)]
        tokens.append(END if reason == "stop" else 99)
        generated = Turn("assistant", torch.tensor(tokens), torch.zeros(len(tokens)), loss_mask=True, text=str(tokens))
        turns = (*request.turns, generated)
        return Trajectory(
            request.uid,
            request.generation_index,
            turns,
            ((1, 0, sum(map(len, turns))),),
            reason,
            truncated=reason == "length",
            stop_token=END if reason == "stop" else None,
        )


@dataclass
class FakeEnvironment:
    """Scores each trajectory with `decide(trajectory, metadata)`."""

    decide: Callable[[Trajectory, dict[str, Any]], Outcome]
    calls: list[list[tuple[str, int, int]]] = field(default_factory=list)  # (generation, turns) of each trajectory

    def advance(self, metadata: Sequence[dict[str, Any]], *trajectories: Trajectory) -> list[Outcome]:
        self.calls.append([(t.uid, t.generation_index, sum(turn.loss_mask for turn in t.turns)) for t in trajectories])
        return [self.decide(t, entry) for t, entry in zip(trajectories, metadata, strict=True)]


class CharacterTokenizer:
    """One token a character, none of them an engine's; its chat template ends answers with END."""

    eos_token_id = END
    chat_template = "as below"

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        text = "".join(
            f"({message['role'][0]}:{message['content']}" + ("$" if message["role"] == "assistant" else ")")
            for message in messages
        )
        return text + "(a:" * add_generation_prompt

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [END if character == "$" else 1000 + ord(character) for character in text]}


def engine_group(cluster: Shuffling, count: int, seed: int = 0, ends: Any = None, length: Any = None) -> EngineGroup:
    length = length or (lambda request: 2 + request.seed % 3)
    engines = [
        FakeEngine(cluster.store, length, seed + 100 * index, ends or {}, cluster.store.put) for index in range(count)
    ]
    workers = [LocalWorker(f"engine-{index}", engine) for index, engine in enumerate(engines)]
    return EngineGroup(cluster, list(map(EngineSlot, workers)), sleeps=False)


def prompt(number: int, **changes: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "?", "token_ids": torch.tensor([1, 2, number])}
    fields = {"uid": f"p{number}", "task_name": "game", "length": 3, "extra_env_info": {"number": number, "seen": []}}
    return fields | {"message_log": [message]} | changes


SAMPLING = Sampling(max_new_tokens=8)


def turns_of(trajectory: Trajectory) -> int:
    return sum(turn.loss_mask for turn in trajectory.turns)


def wanted(uid: str, index: int) -> int:
    """Return the number of turns, 1 to 4, after which the environment ends a sample."""
    return 1 + (int(uid[1:]) + index) % 4


def play(trajectory: Trajectory, metadata: dict[str, Any]) -> Outcome:
    """Give 1 point a turn. Keep a list of turns in the metadata, changed in place."""
    turn = turns_of(trajectory)
    metadata["seen"].append((trajectory.generation_index, turn))
    over = turn >= wanted(trajectory.uid, trajectory.generation_index)
    said = None if over else f"turn {turn}"
    return Outcome(1.0, str(turn), "", 0.5, {"turns": 1.0}, terminated=over, observation=said, metadata=metadata)


class World:
    def __init__(self, decide: Any = play, *, engines: int = 1, seed: int = 0, **how: Any) -> None:
        turns, room, together = how.pop("max_turns", 9), how.pop("max_model_len", 1000), how.pop("together", False)
        limits = TurnLimits(turns, room, together=together)
        self.cluster = Shuffling(seed)
        self.environment = FakeEnvironment(decide)
        self.engines = engine_group(self.cluster, engines, seed, **how)
        workers = as_workers({"game": self.environment}, self.cluster)
        self.finished: list[str] = []
        self.rollouts = Rollouts(
            self.engines,
            workers,
            CharacterTokenizer(),
            limits,
            seed=5,
            hooks=RolloutHooks(on_sample=lambda: self.finished.append("")),
        )

    def run(self, numbers: range, generations: int = 3, step: int = 1, **prompt_fields: Any) -> dict[str, Group]:
        prompts = [prompt(number, **prompt_fields) for number in numbers]
        self.rollouts.dispatch(prompts, SAMPLING, generations=generations, step=step)
        groups = [self.rollouts.next_group() for _ in prompts]
        assert not self.rollouts.generating
        return {group.uid: group for group in groups}

    def trajectory(self, group: Group, index: int) -> Trajectory:
        return self.cluster.store.fetch(group.samples[index].ref)

    def calls(self) -> list[Any]:
        return [call for worker in self.engines.workers for call in worker.target.calls]
