"""The driver's part, against policy ranks and engines that are only simulated: calls run late and in any
order, and any of them may fail."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import Any

import pytest

from grpo_mcore.families import HfTensor
from grpo_mcore.refit.plan import RefitError, plan_refit
from grpo_mcore.refit.refit import refit

PLAN = plan_refit([HfTensor(f"t{number}", (128,)) for number in range(5)], dtype="float32", buffer_bytes=1024)
HELD = {
    "policy-0": [(f"t{number}", ((0, 64),)) for number in range(5)],
    "policy-1": [(f"t{number}", ((64, 128),)) for number in range(5)],
    "policy-2": [],
}
assert len(PLAN.buckets) == 5


class World:
    """What the calls act on. A call runs when it is waited for, or earlier, as `choice` likes."""

    def __init__(self, choice: random.Random, fail: tuple[str, str, int] | None = None) -> None:
        self.choice = choice
        self.fail = fail  # worker, method, which of its calls of that method
        self.waiting: dict[str, list[Answer]] = {}
        self.halves: dict[tuple[str, int], int] = {}  # (policy rank, half) -> bucket it wrote last
        self.versions: dict[str, int | None] = {}
        self.updates: dict[str, list[int] | None] = {}
        self.log: list[str] = []

    def run_some(self) -> None:
        for queue in self.waiting.values():
            while queue and self.choice.random() < 0.3:
                queue.pop(0).run()

    def worker(self, name: str) -> Worker:
        self.waiting[name] = []
        if name.startswith("engine"):
            self.versions[name], self.updates[name] = 0, None
        return Worker(name, self)

    def act(self, worker: str, method: str, args: tuple[Any, ...]) -> Any:
        self.log.append(f"{worker}.{method}{args[:1] if method in ('fill_bucket', 'load_bucket') else ''}")
        if self.fail and self.fail[:2] == (worker, method):
            count = sum(entry.startswith(f"{worker}.{method}") for entry in self.log) - 1
            if count == self.fail[2]:
                raise RuntimeError(f"{worker} is ill")
        return getattr(self, method)(worker, *args)

    def open_refit(self, worker: str, transport: dict | None, plan: str) -> dict:
        assert (transport is None) == (worker == "policy-0")
        return {"digest": PLAN.digest, "transport": {"kind": "simulated"}, "held": HELD[worker]}

    def fill_bucket(self, worker: str, index: int) -> dict:
        for engine, update in self.updates.items():
            if update is not None and index >= 2:
                assert index - 2 in update, f"{index} is filled while {engine} reads {index - 2}"
        self.halves[worker, index % 2] = index
        return {"bytes": 1, "seconds": 0.001}

    def start_refit(self, worker: str, manifest: dict) -> dict:
        assert manifest["transport"] == {"kind": "simulated"} and manifest["digest"] == PLAN.digest
        self.updates[worker] = []
        return {"digest": PLAN.digest, "version": self.versions[worker]}

    def load_bucket(self, worker: str, index: int) -> dict:
        update = self.updates[worker]
        assert update is not None and update == list(range(index))
        for rank in HELD:
            assert self.halves[rank, index % 2] == index, f"{index} is loaded before {rank} filled it"
        update.append(index)
        return {"seconds": 0.002}

    def commit_refit(self, worker: str, version: int) -> dict:
        assert self.updates[worker] == list(range(5))
        self.updates[worker] = None
        self.versions[worker] = version
        return {"version": version, "tensors": 5}

    def abort_refit(self, worker: str) -> None:
        if self.updates[worker]:
            self.versions[worker] = None
        self.updates[worker] = None


class Worker:
    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world

    def call(self, method: str, *args: Any, timeout_s: float, what: str) -> Answer:
        assert timeout_s > 0 and what
        answer = Answer(self, method, args)
        self.world.waiting[self.name].append(answer)
        self.world.run_some()
        return answer


class Answer:
    def __init__(self, worker: Worker, method: str, args: tuple[Any, ...]) -> None:
        self.worker, self.method, self.args = worker, method, args
        self.value: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.value = self.worker.world.act(self.worker.name, self.method, self.args)
        except Exception as error:
            self.error = error

    def result(self) -> Any:
        queue = self.worker.world.waiting[self.worker.name]
        while self in queue:  # a worker's calls run in order
            queue.pop(0).run()
        self.worker.world.run_some()
        if self.error:
            raise self.error
        return self.value


def run(world: World, version: int = 7, **options: Any) -> Any:
    policy = [world.worker(name) for name in HELD]
    engines = [world.worker(name) for name in ("engine-0", "engine-1")]
    return refit(policy, engines, PLAN, version, **options)


@pytest.mark.parametrize("seed", range(30))
def test_every_engine_gets_every_bucket_whatever_the_timing(seed: int) -> None:
    world = World(random.Random(seed))
    report = run(world)
    assert world.versions == {"engine-0": 7, "engine-1": 7}
    assert (report.version, report.buckets, report.tensors, report.bytes) == (7, 5, 5, 5 * 128 * 4)
    assert report.stage_seconds["fill"] == pytest.approx(5 * 0.001)
    assert report.stage_seconds["load"] == pytest.approx(5 * 0.002)
    stages = [report.stage_seconds[name] for name in ("open", "stage", "commit")]
    assert report.seconds == pytest.approx(sum(stages))


def test_filling_a_bucket_overlaps_loading_the_one_before() -> None:
    world = World(random.Random(0))
    world.run_some = lambda: None  # nothing runs before it is waited for
    order: list[str] = []
    policy, engine = [world.worker(name) for name in HELD], world.worker("engine-0")
    for worker in (*policy, engine):
        call = worker.call

        def started(method: str, *args: Any, call=call, name=worker.name, **options: Any) -> Answer:
            order.append(f"{name} {method} {args[0] if args else ''}")
            return call(method, *args, **options)

        worker.call = started  # type: ignore[method-assign]
    refit(policy, [engine], PLAN, 1)
    load, fill = order.index("engine-0 load_bucket 1"), order.index("policy-0 fill_bucket 2")
    assert fill == load + 1, "started before the load is waited for"


CALLS = [
    *((worker, "open_refit", 0) for worker in HELD),
    *((worker, "fill_bucket", number) for worker in HELD for number in (0, 1, 4)),
    *((engine, "start_refit", 0) for engine in ("engine-0", "engine-1")),
    *((engine, "load_bucket", number) for engine in ("engine-0", "engine-1") for number in (0, 1, 4)),
    *((engine, "commit_refit", 0) for engine in ("engine-0", "engine-1")),
]


@pytest.mark.parametrize("fail", CALLS, ids=lambda call: "-".join(map(str, call)))
@pytest.mark.parametrize("seed", range(5))
def test_one_failure_anywhere_leaves_nothing_half_open(seed: int, fail: tuple[str, str, int]) -> None:
    world = World(random.Random(seed), fail)
    with pytest.raises(RefitError) as caught:
        run(world)
    worker, method, _ = fail
    assert f"{method}" in str(caught.value) and f"failed on {worker}: {worker} is ill" in str(caught.value)
    assert "the refit to weight version 7" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert world.updates == {"engine-0": None, "engine-1": None}
    assert not any(world.waiting.values()), "every call has ended"
    if method in ("open_refit", "start_refit"):
        assert set(world.versions.values()) == {0}, "no bucket had moved"
    if method == "commit_refit":
        assert world.versions[worker] is None
    # And the next refit works.
    world.fail = None
    world.halves.clear()
    run(world, version=8)
    assert set(world.versions.values()) == {8}


def test_a_failing_abort_is_told_with_the_first_error() -> None:
    world = World(random.Random(0), ("engine-1", "load_bucket", 1))

    def abort_refit(worker: str) -> None:
        raise RuntimeError(f"{worker} is gone")

    world.abort_refit = abort_refit  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="load_bucket 1 .* failed on engine-1") as caught:
        run(world)
    notes = " ".join(caught.value.__notes__)
    assert "engine-0 is gone" in notes and "engine-1 is gone" in notes


@pytest.mark.parametrize("side", ["policy-1", "engine-1"])
def test_another_plan_on_one_side_is_found_before_the_first_byte(side: str) -> None:
    world = World(random.Random(0))
    method = "open_refit" if side.startswith("policy") else "start_refit"
    honest = getattr(world, method)

    def other(worker: str, *args: Any) -> dict:
        answer = honest(worker, *args)
        return answer | {"digest": "0123456789ab" * 5} if worker == side else answer

    setattr(world, method, other)
    with pytest.raises(RefitError, match=f"{side} has the plan 0123456789ab, the driver {PLAN.digest[:12]}"):
        run(world)
    assert not any("fill_bucket" in entry for entry in world.log)
    assert world.updates == {"engine-0": None, "engine-1": None}


def test_weights_that_nobody_holds_are_found_before_the_first_byte() -> None:
    world = World(random.Random(0))
    honest = world.open_refit

    def forgetful(worker: str, *args: Any) -> dict:
        answer = honest(worker, *args)
        return answer | {"held": answer["held"][:-1]}

    world.open_refit = forgetful  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="hold 0 of the 128 elements of 't4'"):
        run(world)
    assert not any("fill_bucket" in entry for entry in world.log)


def test_a_commit_with_fewer_tensors_is_no_commit() -> None:
    world = World(random.Random(0))
    honest = world.commit_refit
    world.commit_refit = lambda worker, version: honest(worker, version) | {"tensors": 4}  # type: ignore
    with pytest.raises(RefitError, match="engine-0 committed weight version 7 with 4 tensors; .* with 5"):
        run(world)


def test_a_timer_and_nobody_to_refit() -> None:
    seen: list[str] = []

    class Timer:
        @contextmanager
        def time(self, label: str):
            yield seen.append(label)

    run(World(random.Random(0)), timeline=Timer())
    assert seen == ["refit/open", "refit/stage", "refit/commit"]
    with pytest.raises(RefitError, match="got 0 and 0"):
        refit([], [], PLAN, 1)
