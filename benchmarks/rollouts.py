"""Seconds of a step's rollouts, in virtual time: each sample by itself, all turns together, and the physical bound.

The rollouts are the real class (`driver/rollouts/rollouts.py`); engines and environments are modelled. An engine
takes steps of 8 ms + 0.04 ms for each sample in its batch, each sample gets one token a step, and a request joins the
batch at the next step. A tool answers a call after a fixed time, or one that is drawn. With an age of A, prompts of A
further steps are in flight, and the time of a step is the mean over several of them.

The bound is the time of the same samples on engines that share them perfectly at any moment, where each turn starts
the moment its tool has answered: nothing waits for anything but its own tokens and its own tools.

    python -m benchmarks.rollouts --json
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_mcore.cluster import LocalCluster, Parcel
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot
from grpo_mcore.driver.rollouts.rollouts import Rollouts
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.rollout.life import TurnLimits
from grpo_mcore.rollout.trajectory import GenerationRequest, Outcome, Sampling, TrajectoryRef

STEP_S, SAMPLE_S = 0.008, 0.00004
GENERATIONS, ENGINES, MEAN_TOKENS = 16, 8, 400
END = 7


@dataclass(frozen=True)
class Case:
    """`turns` of each sample and the seconds in which its tool answers: between `tool_s` and `slowest_s`, evenly, or
    `slowest_s` in the share `slow` of the calls and `tool_s` in the others."""

    turns: int
    tool_s: float
    slowest_s: float | None = None
    slow: float | None = None

    def answers_in(self, draw: random.Random) -> float:
        if self.slowest_s is None:
            return self.tool_s
        if self.slow is None:
            return draw.uniform(self.tool_s, self.slowest_s)
        return self.slowest_s if draw.random() < self.slow else self.tool_s


CASES = {
    "math_1_turn": Case(1, 0.05),
    "tool_4_turns_1s": Case(4, 1.0),
    "swe_12_turns_5s": Case(12, 5.0),
    "tool_4_turns_even": Case(4, 0.2, 1.0),
    "tool_4_turns_tail": Case(4, 0.2, 1.0, slow=0.02),
    "tool_4_turns_tail_30": Case(4, 0.2, 1.0, slow=1 / 30),
}
FIXED = ["math_1_turn", "tool_4_turns_1s", "swe_12_turns_5s"]


class Answer:
    def __init__(self, whom: str, result: Any) -> None:
        self.whom, self.purpose, self.value, self.is_ready = whom, "an answer", result, False

    def result(self) -> Any:
        return self.value


@dataclass(eq=False)
class Stream:
    """A generation call: parcels that have come, and how many are missing."""

    whom: str
    what: str
    missing: int
    parcels: list[Parcel] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return bool(self.parcels) or not self.missing

    def __next__(self) -> list[Parcel]:
        if not self.parcels:
            raise StopIteration
        parcels, self.parcels = self.parcels, []
        return parcels


class Engine:
    """Decodes one token of each sample a step. A sample is a heap entry: the step number at which it ends."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.running: list[tuple[int, int, Stream, TrajectoryRef]] = []
        self.streams: dict[str, Stream] = {}
        self.joining: list[tuple[int, Stream, TrajectoryRef]] = []
        self.steps = 0
        self.busy = False

    def stream(
        self, method: str, requests: Sequence[GenerationRequest], sampling: Sampling, name: str, purpose: str
    ) -> Stream:
        stream = self.streams[name] = Stream(self.name, purpose, 0)
        self.add(stream, requests)
        return stream

    def call(self, method: str, *args: Any, purpose: str) -> Answer:
        answer = Answer(self.name, getattr(self, method)(*args))
        answer.is_ready = True
        self.world.came.append(answer)
        return answer

    def join(self, name: str, requests: Sequence[GenerationRequest], sampling: Sampling) -> bool:
        is_open = bool(self.streams[name].missing)
        if is_open:
            self.add(self.streams[name], requests)
        return is_open

    def give_up(self, uids: Sequence[str]) -> None:
        for entries in (self.running, self.joining):
            for *_, stream, _sample in [entry for entry in entries if entry[-1].uid in uids]:
                stream.missing -= 1
                self.world.came.append(stream)
            entries[:] = [entry for entry in entries if entry[-1].uid not in uids]  # type: ignore[misc]
        heapq.heapify(self.running)

    def add(self, stream: Stream, requests: Sequence[GenerationRequest]) -> None:
        stream.missing += len(requests)
        for request in requests:
            turn = 1 if request.continues is None else request.continues + 1
            tokens = self.world.tokens(request.uid, request.generation_index, turn)
            sample = TrajectoryRef(
                request.uid, request.generation_index, 9, 3, tokens, 1, False, "stop", None, turn, stop_token=END
            )
            self.joining.append((tokens, stream, sample))
        if not self.busy:
            self.busy = True
            self.world.at(0.0, self.step)

    def step(self) -> None:
        """Take steps up to the one at which a sample ends, or only one where others may join."""
        for tokens, stream, sample in self.joining:
            heapq.heappush(self.running, (self.steps + tokens, next(self.world.numbers), stream, sample))
        self.joining.clear()
        if not self.running:
            self.busy = False
            return
        step_s = STEP_S + SAMPLE_S * len(self.running)
        self.world.at(step_s, self.stepped)

    def stepped(self) -> None:
        self.steps += 1
        while self.running and self.running[0][0] <= self.steps:
            _, _, stream, sample = heapq.heappop(self.running)
            stream.missing -= 1
            stream.parcels.append(Parcel(sample, sample.turns))
            self.world.came.append(stream)
        self.step()


class Environment:
    name = "tool"
    spawn_seconds = 0.0

    def __init__(self, world: World) -> None:
        self.world = world

    def call(self, method: str, metadata: Any, *turns: int, timeout_s: float, purpose: str) -> Answer:
        answer = self.world.answer_of(turns)
        self.world.at(max(self.world.answers_in() for _ in turns), lambda: self.answered(answer))
        return answer

    def answered(self, answer: Answer) -> None:
        answer.is_ready = True
        self.world.came.append(answer)


class Tokenizer:
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


class World(LocalCluster):
    """The cluster, and the clock: events by time."""

    def __init__(
        self, case: Case, seed: int, together: bool, engines: int = ENGINES, enough: int | None = None
    ) -> None:
        super().__init__(1e9)
        self.case, self.seed, self.now = case, seed, 0.0
        self.draw = random.Random(seed)
        self.events: list[tuple[float, int, Any]] = []
        self.numbers = itertools.count()
        self.came: list[Any] = []  # streams and answers of which something has come
        self.workers = [Engine(self, f"engine-{number}") for number in range(engines)]
        self.engines = EngineGroup(self, list(map(EngineSlot, self.workers)), sleeps=False)  # type: ignore[arg-type]
        tool = EnvironmentWorker(self, self.environment, calls=10**6, timeout_s=1e9)  # type: ignore[arg-type, return-value]
        limits = TurnLimits(case.turns, 10**9, together=together)
        self.rollouts = Rollouts(self.engines, {"task": tool}, Tokenizer(), limits, seed=seed, enough_samples=enough)

    def environment(self) -> Any:
        return Environment(self)

    def answer_of(self, turns: Sequence[int]) -> Answer:
        """Return an environment's answer to trajectories of so many turns."""
        return Answer(
            "tool",
            [Outcome(1.0, None, "", 0.0, terminated=turn == self.case.turns, observation="on") for turn in turns],
        )

    def tokens(self, uid: str, index: int, turn: int) -> int:
        """Tokens of one turn: log-normal, cut at eight times the mean."""
        draw = random.Random(f"{self.seed} {uid} {index} {turn}")
        return max(1, min(8 * MEAN_TOKENS, int(draw.lognormvariate(-0.125, 0.5) * MEAN_TOKENS)))

    def answers_in(self) -> float:
        """Return the seconds in which the tool answers the next call about one sample."""
        return self.case.answers_in(self.draw)

    def at(self, delay: float, event: Any) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.numbers), event))

    def ready(self, things: Any, timeout_s: float, purpose: str, watch: Any = None, *, patient: bool = False) -> Any:
        while not (came := list(dict.fromkeys(thing for thing in self.came if thing.is_ready))):
            self.now, _, event = heapq.heappop(self.events)
            event()
        self.came = []  # the rollouts take all that is returned
        return came

    def run(self, samples: int, age: int, steps: int) -> float:
        """Return the seconds a step, over that many steps."""
        prompts, sampling = samples // GENERATIONS, Sampling(max_new_tokens=8 * MEAN_TOKENS)
        message = {"role": "user", "content": "?", "token_ids": torch.tensor([1, 2, 3])}

        def dispatch(step: int) -> None:
            rows: Any = [
                {"uid": f"{step}-{n}", "task_name": "task", "length": 3, "extra_env_info": {}, "message_log": [message]}
                for n in range(prompts)
            ]
            self.rollouts.dispatch(rows, sampling, generations=GENERATIONS, step=step)

        ends, left = [], {}
        for step in range(1 + age):
            dispatch(step)
            left[step] = prompts
        for step in range(steps):
            while left[step]:
                left[int(self.rollouts.next_group().uid.partition("-")[0])] -= 1
            ends.append(self.now)
            dispatch(step + 1 + age)
            left[step + 1 + age] = prompts
        return ends[-1] / steps


def bound_seconds(case: Case, seed: int, samples: int, age: int, steps: int) -> float:
    """Return the seconds a step of engines that share all samples perfectly, without any driver."""
    tokens, draw = World(case, seed, together=False).tokens, random.Random(seed)
    now = clock = 0.0  # seconds; tokens that a sample gets which runs all the time
    running: list[tuple[float, int, tuple[int, int, int, int]]] = []
    tools: list[tuple[float, int, tuple[int, int, int, int]]] = []
    numbers, left, ends = itertools.count(), dict[int, int](), list[float]()

    def begin(sample: tuple[int, int, int, int]) -> None:
        step, group, index, turn = sample
        length = tokens(f"{step}-{group}", index, turn)
        heapq.heappush(running, (clock + length, next(numbers), sample))

    def dispatch(step: int) -> None:
        left[step] = samples
        for number in range(samples):
            begin((step, number // GENERATIONS, number % GENERATIONS, 1))

    for step in range(1 + age):
        dispatch(step)
    while len(ends) < steps:
        token_s = STEP_S + SAMPLE_S * len(running) / ENGINES
        decoded_at = now + (running[0][0] - clock) * token_s if running else float("inf")
        answered_at = tools[0][0] if tools else float("inf")
        then = min(decoded_at, answered_at)
        clock, now = clock + (then - now) / token_s, then
        if decoded_at <= answered_at:
            _, _, sample = heapq.heappop(running)
            heapq.heappush(tools, (now + case.answers_in(draw), next(numbers), sample))
            continue
        _, _, (step, group, index, turn) = heapq.heappop(tools)
        if turn < case.turns:
            begin((step, group, index, turn + 1))
            continue
        left[step] -= 1
        while len(ends) < steps and not left[len(ends)]:
            ends.append(now)
            dispatch(len(ends) + age)
    return ends[-1] / steps


def measure(name: str, samples: int, age: int, seeds: int, enough: int | None = None) -> dict[str, Any]:
    """Return the means over the seeds, and the largest ratio to the bound. `enough`: samples that complete a group."""
    case, steps = CASES[name], 1 if age == 0 else 2 * (1 + age)
    seconds, together, bounds = [], [], []
    for seed in range(seeds):
        seconds.append(World(case, seed, together=False, enough=enough).run(samples, age, steps))
        together.append(World(case, seed, together=True).run(samples, age, steps))
        bounds.append(bound_seconds(case, seed, samples, age, steps))
    return {
        "case": name,
        "samples": samples,
        "age": age,
        "seconds": round(statistics.mean(seconds), 2),
        "together_seconds": round(statistics.mean(together), 2),
        "bound_seconds": round(statistics.mean(bounds), 2),
        "worst_ratio": round(max(mine / best for mine, best in zip(seconds, bounds, strict=True)), 3),
    }


def main() -> int:
    """Return 1 if a case takes more than 1.10 times its bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a case")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=FIXED)
    parser.add_argument("--samples", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--ages", nargs="+", type=int, default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--enough", type=int, help="complete a group with so many of its 16 samples")
    options = parser.parse_args()
    worst = 0.0
    for name, samples, age in itertools.product(options.cases, options.samples, options.ages):
        row = measure(name, samples, age, options.seeds, options.enough)
        worst = max(worst, row["worst_ratio"])
        cells = " ".join(f"{key}={value}" for key, value in row.items())
        print(json.dumps(row) if options.json else cells, flush=True)
    return int(worst > 1.10)


if __name__ == "__main__":
    raise SystemExit(main())
