"""The driver's part, against policy ranks and engines that are only simulated: calls run late and in any order, and any
of them may fail. The small case is explored to the end: every order of events, with a failure at every one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.parts import CALLS_PER_PROCESS, Part
from grpo_mcore.refit.plan.plan import RefitError, plan_refit
from grpo_mcore.refit.refit import Refit, RefitState, refit
from grpo_mcore.refit.transport.board import Seat
from tests.unit.refit.whole_split import make_shape, params_of

SHAPE = make_shape(num_layers=1)
PARAMS = [
    param for param in params_of(SHAPE) if param.megatron.endswith(("layernorm.weight", "word_embeddings.weight"))
]


def make_plan(buckets: int) -> Any:
    plan = plan_refit(
        PARAMS, SHAPE, PolicyLayout(2), EngineLayout(), dtype="float32", buffer_bytes={2: 384, 3: 224}[buckets],
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
        self.sending: set[str] = set()  # policy ranks that have not sent everything
        self.left = ""  # who has failed in the middle
        self.seats: dict[tuple[int, int], str] = {}
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
            ready = [name for name, queue in self.waiting.items() if queue and self.can_end(queue[0].method)]
            # Orders before the call that will fail are those of the run without failures.
            self.near = self.near or any(a.method == self.fail[1] for q in self.waiting.values() for a in q)
            self.waiting[ready[self.branches.ask(len(ready)) if self.near else 0]].pop(0).run()

    def can_end(self, method: str) -> bool:
        """The engines have taken everything when all policy ranks have sent it, or when one has left."""
        return method != "stage_refit" or bool(self.left) or not self.sending

    def act(self, worker: str, method: str, args: tuple[Any, ...]) -> Any:
        self.log.append((worker, method))
        fails = self.fail and self.fail[:2] == (worker, method) and self.log.count((worker, method)) == self.fail[2] + 1
        if method in ("send_refit", "stage_refit") and self.left:
            self.sending.discard(worker)
            raise RuntimeError(f"{self.left} left the refit: {self.left} is ill")
        if fails and self.fail[3] == "before":
            self.leave(worker, method)
        answer = getattr(self, method)(worker, *args)
        if fails:
            self.leave(worker, method)
        return answer

    def leave(self, worker: str, method: str) -> None:
        if method in ("send_refit", "stage_refit"):
            self.left = worker
            self.sending.discard(worker)
        raise RuntimeError(f"{worker} is ill")

    def open_refit(self, worker: str, packed: bytes, seat: Seat, transport: dict | None, network: None) -> dict:
        assert (transport is None) == (worker == "policy-0") and network is None
        part = Part.unpacked(packed)
        self.sit(worker, seat)
        self.sending.add(worker)
        sent = sum(block.nbytes for block in self.plan.blocks() if worker == f"policy-{block.source}")
        assert sent == sum(fill.nbytes for fills in part.fills for fill in fills), "each gets its own part"
        return {"digest": part.digest, "transport": {"kind": "simulated"}, "bytes": sent}

    def sit(self, worker: str, seat: Seat) -> None:
        assert self.seats.setdefault((seat.session, seat.seat), worker) == worker, "a seat each"
        assert (seat.writers, seat.readers) == (2, len(self.version))
        assert (seat.seat < seat.writers) == worker.startswith("policy")

    def send_refit(self, worker: str, verify: str, version: int, dtype: str) -> dict:
        assert all(staged == 0 for staged in self.staged.values()), "all engines are ready to take"
        self.sending.discard(worker)
        return {"bytes": 1, "seconds": 0.001, "sums": {(0, 0): 5}}

    def start_refit(self, worker: str, manifest: dict) -> dict:
        assert manifest["transports"] == [{"kind": "simulated"}] and manifest["digest"] == self.plan.digest
        self.abort_refit(worker)
        for seat in manifest["seats"]:
            self.sit(worker, seat)
        self.staged[worker] = 0
        return {"digest": self.plan.digest, "in_place": False, "dtype": "float32", "verify": "sample"}

    def stage_refit(self, worker: str) -> dict:
        assert self.staged[worker] == 0 and not self.sending
        self.staged[worker] = len(self.plan.buckets)
        return {"seconds": 0.002, "sums": {f"{worker} rank 0": {(0, 0, 0): 5}}}

    def commit_refit(self, worker: str, version: int, recompute_kv: bool) -> dict:
        assert self.staged[worker] == len(self.plan.buckets) and self.state() is RefitState.COMMITTING
        self.staged[worker], self.held[worker] = None, True
        self.before[worker], self.version[worker] = self.version[worker], version
        return {"version": version, "parameters": 3, "fallbacks": 0, "quantized": []}

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

    def call(self, method: str, *args: Any, timeout_s: float, purpose: str) -> Answer:
        assert timeout_s > 0 and purpose
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
    assert branches.runs > 50


ENGINES, POLICY = ("engine-0", "engine-1"), ("policy-0", "policy-1")
FAILURES = [
    (worker, method, number, when)
    for when in ("before", "after")
    for workers, methods in (
        (POLICY, [("open_refit", 0), ("send_refit", 0)]),
        (ENGINES, [("start_refit", 0), ("stage_refit", 0), ("commit_refit", 0), ("finish_refit", 0)]),
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
        told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert any(
            f"{method} of the refit to weight version 7 failed on {worker}{too}: {worker} is ill" in told
            for too in ("", " too")
        )
        assert f"{worker} is ill" in str(caught.value), "the cause comes first"
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
        world.sending.clear()
        world.left = ""
        workers = [Worker(name, world) for name in (*POLICY, *ENGINES)]
        again = Refit(workers[:2], workers[2:], plan, 8)
        world.state = lambda again=again: again.state
        again.stage()
        again.commit()
        assert set(world.version.values()) == {8} and not any(world.held.values())


@pytest.mark.parametrize("buckets", [2, 3])
def test_a_process_is_called_four_times_whatever_the_number_of_buckets(buckets: int) -> None:
    world = World(make_plan(buckets))
    run(world)
    calls = Counter(worker for worker, method in world.log)
    assert calls == {"policy-0": 2, "policy-1": 2, "engine-0": 4, "engine-1": 4}
    assert max(calls.values()) == CALLS_PER_PROCESS


def test_a_failing_abort_is_told_with_the_first_error() -> None:
    world = World(make_plan(2), fail=("engine-1", "stage_refit", 0, "before"))
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
    assert "stage_refit" in str(caught.value) and "engine-1 is gone" in " ".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("method", "side", "wrong", "message"),
    [
        ("open_refit", "policy-1", {"digest": "0123456789abc"}, "policy-1 has the plan 0123456789ab, the driver {}"),
        ("start_refit", "engine-1", {"digest": "0123456789abc"}, "engine-1 has the plan 0123456789ab, the driver {}"),
        ("open_refit", "policy-0", {"bytes": 0}, "policy-0 would send 0 bytes, the plan has"),
    ],
)
def test_another_plan_on_one_side_is_found_before_the_first_byte(
    method: str, side: str, wrong: dict[str, Any], message: str
) -> None:
    world = World(make_plan(2))
    honest = getattr(world, method)
    setattr(world, method, lambda worker, *args: honest(worker, *args) | (wrong if worker == side else {}))
    with pytest.raises(RefitError, match=message.format(world.plan.digest[:12])):
        run(world)
    assert not any(method == "send_refit" for _, method in world.log)


def test_a_checksum_that_differs_names_the_tensor_and_nothing_is_committed() -> None:
    world = World(make_plan(2))
    honest = world.stage_refit

    def stage_refit(worker: str) -> dict:
        answer = honest(worker)
        return answer if worker == "engine-0" else answer | {"sums": {"engine-1 rank 0": {(0, 0, 0): 6}}}

    world.stage_refit = stage_refit  # type: ignore[method-assign]
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
