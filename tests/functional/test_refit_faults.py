"""Processes that die in a refit: it ends inside its deadline, says who, and who lives has the old weights."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mcore.families import read_hf_config, shape_of
from grpo_mcore.generation import Engine, EngineError
from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import Refit, RefitState
from grpo_mcore.rollout.trajectory import Sampling
from tests.functional.engine_cases import Killer, Policy, config, generate, load_reference, make_model, request
from tests.functional.rank_server import CONTEXT, ranks
from tests.unit.refit.shards import Handle, ShardedModel

DEADLINE_S = 60.0


class PolicyProcess:
    """A policy rank in a process of its own; it dies in bucket `dies_in`."""

    def __init__(self, folder: Path, rank: int, dies_in: int | None) -> None:
        self.name = f"policy-{rank}"
        self._pipe, there = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=serve, args=(there, str(folder), rank, dies_in), daemon=True)
        self._process.start()
        there.close()

    def call(self, method: str, *args: Any, timeout_s: float, purpose: str) -> Any:
        self._pipe.send((method, args))
        return Answer(self._pipe, self.name, timeout_s)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


class Answer:
    def __init__(self, pipe: Any, name: str, timeout_s: float) -> None:
        self._pipe, self._name, self._timeout_s = pipe, name, timeout_s

    def result(self) -> Any:
        if not self._pipe.poll(self._timeout_s):
            raise TimeoutError(f"no answer from {self._name}")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self._name} has died") from None


def serve(pipe: Any, folder: str, rank: int, dies_in: int | None) -> None:
    weights = dict(load_reference(Path(folder)).named_parameters())
    shape = shape_of(read_hf_config(folder))
    sender = Mortal(ShardedModel(weights, shape, rank, 2), rank, run_id=f"faults.{rank}")
    sender.dies_in = dies_in
    while True:
        method, args = pipe.recv()
        pipe.send(getattr(sender, method)(*args))


class Mortal(RefitSender):
    dies_in: int | None = None

    def fill_bucket(self, index: int, *checked: Any) -> dict[str, Any]:
        if index == self.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fill_bucket(index, *checked)


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[Policy]:
    make_model(tmp_path)
    policy = Policy(tmp_path)
    yield policy
    policy.close()


def start_engine(folder: Path) -> tuple[Engine, list[psutil.Process]]:
    before = ranks()
    engine = Engine(config(folder, tensor_parallel_size=2))
    started = sorted(ranks() - before)
    assert len(started) == 2
    return engine, [psutil.Process(pid) for pid in started]


def test_a_policy_rank_or_an_engine_rank_is_killed(tmp_path: Path, policy: Policy) -> None:
    engine, processes = start_engine(tmp_path)
    try:
        old = generate(engine, [request(1), request(2)])
        one = Handle("policy-0", policy.handles[0].target)
        for dies_in in (0, 3):
            other = PolicyProcess(tmp_path, 1, dies_in)
            began = time.monotonic()
            with pytest.raises(RefitError, match="policy rank 1 has died|the process of policy-1 has died"):
                Refit([one, other], [Handle(engine.name, engine)], policy.plan(engine), 1, timeout_s=DEADLINE_S).stage()
            assert time.monotonic() - began < DEADLINE_S
            other.end()
            assert engine.weight_version == 0 and generate(engine, [request(1), request(2)]) == old
        policy.refit(engine, 1)
        message = r"commit_refit .* failed on engine-0: engine-0: rank 1 of 2 has died \(exit code -9\)"
        check_lost_engine(engine, Killer(engine, processes[1], "commit_refit"), policy, message)
    finally:
        engine.shutdown()


def test_an_engine_rank_is_killed_while_it_stages(tmp_path: Path, policy: Policy) -> None:
    engine, processes = start_engine(tmp_path)
    try:
        samples = engine.generate([request(number) for number in range(4)], Sampling(max_new_tokens=100))
        next(samples)
        message = r"engine-0: rank 0 of 2 has died \(exit code -9\)|engine-0 rank 0 (has died|left)"
        check_lost_engine(engine, Killer(engine, processes[0], "stage_refit"), policy, message)
        with pytest.raises(EngineError, match="rank 0 of 2 has died"):
            list(samples)
    finally:
        engine.shutdown()


def check_lost_engine(engine: Engine, killer: Killer, policy: Policy, message: str) -> None:
    """The refit ends in time and says why; the engine is lost, and the policy's ranks are well."""
    run = Refit(policy.handles, [killer], policy.plan(engine), 2, timeout_s=DEADLINE_S)
    began = time.monotonic()
    with pytest.raises(RefitError, match=message) as caught:
        run.stage()
        run.commit()
    assert time.monotonic() - began < DEADLINE_S
    assert run.state is RefitState.ABORTED
    assert "abort_refit" in " ".join(caught.value.__notes__), "nobody is there to go back"
    with pytest.raises(RefitError, match="start_refit .* failed on engine-0"):
        policy.refit(engine, 3)
