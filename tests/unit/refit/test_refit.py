"""The driver's part, against policy ranks and engines that are only simulated: calls run late and in any order, and any
of them may fail. The small case is explored to the end: every order of events, with a failure at every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from grpo_mcore.refit.layout import EngineLayout, TrainerLayout
from grpo_mcore.refit.plan import RefitError, plan_refit
from grpo_mcore.refit.refit import Refit, RefitState, refit
from tests.unit.refit.whole_split import make_shape, params_of

SHAPE = make_shape(num_layers=1)
PARAMS = [
    param for param in params_of(SHAPE) if param.megatron.endswith(("layernorm.weight", "word_embeddings.weight"))
]


def make_plan(buckets: int) -> Any:
    plan = plan_refit(
        PARAMS, SHAPE, TrainerLayout(2), EngineLayout(), dtype="float32", buffer_bytes={2: 384, 3: 224}[buckets],
        alignment=16,
    )  # fmt: skip
    assert len(plan.buckets) == buckets
    return plan


class Branches:
    """All answers to a run of questions, one run after the other: a depth-first search that starts anew each time."""

    def __init__(self, limit: int) -> None:
        self.limit, self.runs = limit, 0
        self._path: list[list[int]] = []  # [answer, number of answers]
        self._at = 0

    def __iter__(self) -> Iterator[Branches]:
        while self.runs < self.limit:
            self.runs, self._at = self.runs + 1, 0
            yield self
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            self._path[-1][0] += 1
        raise AssertionError(f"more than {self.limit} runs")

    def ask(self, answers: int) -> int:
        if answers < 2:
            return 0
        if self._at == len(self._path):
            self._path.append([0, answers])
        self._at += 1
        assert self._path[self._at - 1][1] == answers, "a run is not repeatable"
        return self._path[self._at - 1][0]


class World:
    """The state that the calls act on. Each worker runs its calls in order; `branches` decides which worker
    is next, whenever the driver waits. `fail`: (worker, method, which of its calls of it, "before" or "after" it has
    acted)."""

    def __init__(
        self, plan: Any, branches: Branches | None = None, fail: tuple[str, str, int, str] | None = None
    ) -> None:
        self.plan, self.branches, self.fail = plan, branches or Branches(1), fail
        self.waiting: dict[str, list[Answer]] = {}
        self.halves: dict[tuple[str, int], int] = {}  # (policy rank, half) -> bucket it wrote last
        self.version: dict[str, int] = {}  # with which the engine generates
        self.before: dict[str, int | None] = {}  # of a commit that can be taken back
        self.staged: dict[str, int | None] = {}
        self.held: dict[str, bool] = {}
        self.log: list[tuple[str, str]] = []
        self.state: Any = None
        self.near = fail is None

    def worker(self, name: str) -> Worker:
        self.waiting[name] = []
        if name.startswith("engine"):
            self.version[name], self.before[name], self.staged[name], self.held[name] = 0, None, None, False
        return Worker(name, self)

    def run_until(self, answer: Answer) -> None:
        while not answer.done:
            ready = [name for name, queue in self.waiting.items() if queue]
            # Orders before the call that will fail are those of the run without failures.
            self.near = self.near or any(a.method == self.fail[1] for q in self.waiting.values() for a in q)
            self.waiting[ready[self.branches.ask(len(ready)) if self.near else 0]].pop(0).run()

    def act(self, worker: str, method: str, args: tuple[Any, ...]) -> Any:
        self.log.append((worker, method))
        fails = self.fail and self.fail[:2] == (worker, method) and self.log.count((worker, method)) == self.fail[2] + 1
        if fails and self.fail[3] == "before":
            raise RuntimeError(f"{worker} is ill")
        answer = getattr(self, method)(worker, *args)
        if fails:
            raise RuntimeError(f"{worker} is ill")
        return answer

    def open_refit(self, worker: str, transport: dict | None, plan: str, network: dict | None = None) -> dict:
        assert (transport is None) == (worker == "policy-0")
        sent = sum(block.nbytes for block in self.plan.blocks() if worker == f"policy-{block.source}")
        return {"digest": self.plan.digest, "transport": {"kind": "simulated"}, "bytes": sent}

    def fill_bucket(self, worker: str, index: int, verify: str, version: int, dtype: str) -> dict:
        for engine, count in self.staged.items():
            if count is not None and index >= 2:
                assert count >= index - 1, f"{index} is filled while {engine} reads {index - 2}"
        self.halves[worker, index % 2] = index
        return {"bytes": 1, "seconds": 0.001, "sums": {(index, 0, 0): 5}}

    def start_refit(self, worker: str, manifest: dict) -> dict:
        assert manifest["transports"] == [{"kind": "simulated"}] and manifest["digest"] == self.plan.digest
        self.abort_refit(worker)
        self.staged[worker] = 0
        return {"digest": self.plan.digest, "in_place": False, "dtype": "float32", "verify": "sample"}

    def stage_bucket(self, worker: str, index: int) -> dict:
        assert self.staged[worker] == index
        for rank in ("policy-0", "policy-1"):
            assert self.halves[rank, index % 2] == index, f"{index} is taken before {rank} filled it"
        self.staged[worker] = index + 1
        return {"seconds": 0.002, "sums": {f"{worker} rank 0": {(index, 0, 0): 5}}}

    def commit_refit(self, worker: str, version: int, recompute_kv: bool) -> dict:
        assert self.staged[worker] == len(self.plan.buckets) and self.state() is RefitState.COMMITTING
        self.staged[worker], self.held[worker] = None, True
        self.before[worker], self.version[worker] = self.version[worker], version
        return {"version": version, "parameters": 3, "fallbacks": 0}

    def finish_refit(self, worker: str) -> None:
        assert set(self.version.values()) == {self.version[worker]}, "an engine goes on before all have committed"
        self.before[worker], self.held[worker] = None, False

    def abort_refit(self, worker: str) -> None:
        if (before := self.before[worker]) is not None:
            self.version[worker] = before
        self.before[worker], self.staged[worker], self.held[worker] = None, None, False


class Worker:
    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world

    def call(self, method: str, *args: Any, timeout_s: float, what: str) -> Answer:
        assert timeout_s > 0 and what
        answer = Answer(self, method, args)
        self.world.waiting[self.name].append(answer)
        return answer


class Answer:
    def __init__(self, worker: Worker, method: str, args: tuple[Any, ...]) -> None:
        self.worker, self.method, self.args = worker, method, args
        self.value: Any = None
        self.error: Exception | None = None
        self.done = False

    def run(self) -> None:
        self.done = True
        try:
            self.value = self.worker.world.act(self.worker.name, self.method, self.args)
        except Exception as error:
            self.error = error

    def result(self) -> Any:
        self.worker.world.run_until(self)
        if self.error:
            raise self.error
        return self.value


def run(world: World, version: int = 7, **options: Any) -> Any:
    policy = [world.worker(name) for name in ("policy-0", "policy-1")]
    engines = [world.worker(name) for name in ("engine-0", "engine-1")]
    one = Refit(policy, engines, world.plan, version, **options)
    world.state = lambda: one.state
    one.stage()
    assert one.state is RefitState.STAGED and set(world.version.values()) == {0}
    return one.commit()


def test_every_order_of_events_ends_on_the_new_version() -> None:
    plan = make_plan(2)
    branches = Branches(100_000)
    for branch in branches:
        world = World(plan, branch)
        report = run(world)
        assert world.version == {"engine-0": 7, "engine-1": 7} and not any(world.held.values())
        assert (report.version, report.buckets, report.bytes) == (7, 2, plan.block_bytes)
    assert branches.runs > 500


ENGINES, POLICY = ("engine-0", "engine-1"), ("policy-0", "policy-1")
FAILURES = [
    (worker, method, number, when)
    for when in ("before", "after")
    for workers, methods in (
        (POLICY, [("open_refit", 0), ("fill_bucket", 0), ("fill_bucket", 1)]),
        (
            ENGINES,
            [("start_refit", 0), ("stage_bucket", 0), ("stage_bucket", 1), ("commit_refit", 0), ("finish_refit", 0)],
        ),
    )
    for worker in workers
    for method, number in methods
]


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: "-".join(map(str, fail)))
def test_a_failure_anywhere_in_any_order_leaves_all_on_the_old_version_or_all_on_the_new(
    fail: tuple[str, str, int, str],
) -> None:
    plan = make_plan(2)
    for branch in Branches(100_000):
        world = World(plan, branch, fail)
        with pytest.raises(RefitError) as caught:
            run(world)
        worker, method, _, _ = fail
        assert f"{method}" in str(caught.value) and f"failed on {worker}: {worker} is ill" in str(caught.value)
        assert "the refit to weight version 7" in str(caught.value)
        assert not any(world.waiting.values()), "every call has ended"
        committed = method == "finish_refit"  # then every engine had said that it has the new weights
        assert world.state() is (RefitState.COMMITTED if committed else RefitState.ABORTED)
        assert set(world.version.values()) == {7 if committed else 0}
        assert all(staged is None for staged in world.staged.values())
        if not committed:
            assert not any(world.held.values())
        # And the next refit works.
        world.fail, world.branches = None, Branches(1)
        world.halves.clear()
        workers = [Worker(name, world) for name in (*POLICY, *ENGINES)]
        again = Refit(workers[:2], workers[2:], plan, 8)
        world.state = lambda again=again: again.state
        again.stage()
        again.commit()
        assert set(world.version.values()) == {8} and not any(world.held.values())


def test_filling_a_bucket_overlaps_taking_the_one_before() -> None:
    world = World(make_plan(3))
    order: list[str] = []
    policy, engine = [world.worker(name) for name in POLICY], world.worker("engine-0")
    for worker in (*policy, engine):
        call = worker.call

        def started(method: str, *args: Any, call=call, name=worker.name, **options: Any) -> Answer:
            order.append(f"{name} {method} {args[0] if args else ''}")
            return call(method, *args, **options)

        worker.call = started  # type: ignore[method-assign]
    one = Refit(policy, [engine], world.plan, 1)
    world.state = lambda: one.state
    one.stage()
    assert one.commit().stage_seconds["fill"] == pytest.approx(3 * 0.001)
    load, fill = order.index("engine-0 stage_bucket 1"), order.index("policy-0 fill_bucket 2")
    assert fill == load + 1, "started before the other is waited for"


def test_a_failing_abort_is_told_with_the_first_error() -> None:
    world = World(make_plan(2), fail=("engine-1", "stage_bucket", 1, "before"))
    honest = world.start_refit

    def abort_refit(worker: str) -> None:
        raise RuntimeError(f"{worker} is gone")

    def start_refit(worker: str, manifest: dict) -> dict:
        answer = honest(worker, manifest)
        world.abort_refit = abort_refit  # type: ignore[method-assign]
        return answer

    world.start_refit = start_refit  # type: ignore[method-assign]
    with pytest.raises(RefitError) as caught:
        policy, engines = [world.worker(name) for name in POLICY], [world.worker("engine-1")]
        refit(policy, engines, world.plan, 7)
    assert "stage_bucket 1" in str(caught.value) and "engine-1 is gone" in " ".join(caught.value.__notes__)


@pytest.mark.parametrize("side", ["policy-1", "engine-1"])
def test_another_plan_on_one_side_is_found_before_the_first_byte(side: str) -> None:
    world = World(make_plan(2))
    method = "open_refit" if side.startswith("policy") else "start_refit"
    honest = getattr(world, method)

    def other(worker: str, *args: Any) -> dict:
        answer = honest(worker, *args)
        return answer | {"digest": "0123456789ab" * 5} if worker == side else answer

    setattr(world, method, other)
    with pytest.raises(RefitError, match=f"{side} has the plan 0123456789ab, the driver {world.plan.digest[:12]}"):
        run(world)
    assert not any(method == "fill_bucket" for _, method in world.log)


def test_ranks_that_would_send_less_than_planned_are_found_before_the_first_byte() -> None:
    world = World(make_plan(2))
    honest = world.open_refit
    world.open_refit = lambda *args: honest(*args) | {"bytes": 0}  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="the 2 policy ranks would send 0 bytes, the plan has"):
        run(world)
    assert not any(method == "fill_bucket" for _, method in world.log)


def test_a_checksum_that_differs_names_the_tensor_and_nothing_is_committed() -> None:
    world = World(make_plan(2))
    honest = world.stage_bucket

    def stage_bucket(worker: str, index: int) -> dict:
        answer = honest(worker, index)
        return answer if worker == "engine-0" else answer | {"sums": {"engine-1 rank 0": {(index, 0, 0): 6}}}

    world.stage_bucket = stage_bucket  # type: ignore[method-assign]
    with pytest.raises(
        RefitError, match=r"model.embed_tokens.weight \[.*\] on engine-1 rank 0 is not what policy rank 0"
    ):
        run(world)
    assert world.version == {"engine-0": 0, "engine-1": 0}
    assert all(staged is None for staged in world.staged.values())


def test_a_timer_and_nobody_to_refit() -> None:
    seen: list[str] = []

    class Timer:
        @contextmanager
        def time(self, label: str):
            yield seen.append(label)

    run(World(make_plan(2)), timeline=Timer())
    assert seen == ["refit/open", "refit/stage", "refit/commit"]
    with pytest.raises(RefitError, match="got 0 and 0"):
        refit([], [], make_plan(2), 1)
