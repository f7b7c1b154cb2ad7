from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.cluster import Parcel
from grpo_mcore.driver.policy.refit_parity import SHARE, EngineParity, Parity, SampledParity, measure_parity, probes
from grpo_mcore.driver.policy.refit_settings import ParityCheck


class Policy:
    """Records what it receives. Sample i has i + 1 tokens and an error of 1 + i / 10, with the second engine 1 + i."""

    def __init__(self, data: int) -> None:
        self.layout, self.shape = SimpleNamespace(data=data), SimpleNamespace(vocab_size=50)
        self.log: list[Any] = []
        self.received: list[Any] = []

    def receive(self, steps: list[Any]) -> None:
        self.received.append(steps)

    def infer_logprobs(self, samples: int, **_: Any) -> dict[str, torch.Tensor]:
        index = torch.arange(samples, dtype=torch.float64)
        return {"tokens": index + 1, "mult_error": 1 + index / (10 if len(self.received) == 1 else 1)}

    def onload(self) -> None:
        self.log.append("onload")

    def offload(self) -> None:
        self.log.append("offload")


class Worker:
    def __init__(self, name: str) -> None:
        self.name, self.asked = name, None

    def stream(self, method: str, requests: list[Any], sampling: Any, purpose: str) -> Any:
        assert method == "generate_refs"
        self.asked = requests, sampling
        return iter([[Parcel(request.uid, f"{self.name} {request.uid}")] for request in requests])


def measure(data: int, max_length: int = 64) -> tuple[Policy, list[Worker], Parity]:
    policy, workers = Policy(data), [Worker("engine-0"), Worker("engine-1")]
    engines: Any = SimpleNamespace(
        workers=workers,
        weight_version=3,
        release=lambda: policy.log.append("release"),
        prepare=lambda: policy.log.append("prepare"),
    )
    return policy, workers, measure_parity(policy, engines, ParityCheck(1.7, 0.5, max_length))  # type: ignore[arg-type]


@pytest.mark.parametrize(("data", "samples"), [(1, 8), (3, 9), (16, 16)])
def test_ranks_get_equally_many_samples_and_each_sample_goes_to_one(data: int, samples: int) -> None:
    policy, _, parity = measure(data)
    assert policy.log == ["release", "onload", "offload", "prepare"]
    for engine, steps in zip(("engine-0", "engine-1"), policy.received, strict=True):
        assert len(steps) == data and len({len(step.batches[0]) for step in steps}) == 1
        found = {index: ref for step in steps for index, ref in step.trajectories.items()}
        assert found == {index: f"{engine} refit-parity-{index}" for index in range(samples)}
        for step in steps:
            (bins,) = step.batches
            assert [index for bin in bins for index in bin] == list(step.trajectories)
    assert [engine.samples for engine in parity.engines] == [samples, samples]


def test_errors_are_means_over_tokens() -> None:
    *_, parity = measure(1)
    assert parity.version == 3
    first, second = parity.engines
    # Mean of 1 + i / 10 with weights i + 1: 1 + (sum of i * (i + 1)) / 360.
    assert (first.tokens, first.worst) == (36, pytest.approx(1.7))
    assert first.mult_error == pytest.approx(1 + 168 / 360)
    assert second.mult_error == pytest.approx(1 + 1680 / 360)
    assert parity.agrees(first) and not parity.agrees(second) and not parity.ok
    assert parity.difference() == (
        "at weight version 3 the log-probs of engine and policy differ: mean exp|difference| is engine-1 5.66667, "
        "the limit 1.7"
    )
    assert [line.split()[-1] for line in parity.table().splitlines()] == ["1.7", "ok", "DIFFERS"]


def test_an_error_that_is_not_finite_differs() -> None:
    assert not Parity(1, 2.0, (EngineParity("engine-0", 8, 8, float("nan"), float("nan")),)).ok


@pytest.mark.parametrize(("max_length", "prompt", "new"), [(64, 16, 32), (16, 8, 8), (2, 1, 1)])
def test_samples_fit_the_context(max_length: int, prompt: int, new: int) -> None:
    _, workers, _ = measure(1, max_length)
    for worker in workers:
        requests, sampling = worker.asked  # type: ignore[misc]
        assert {len(request.token_ids()) for request in requests} == {prompt}
        assert (sampling.max_new_tokens, sampling.temperature) == (new, 0.5)


def test_probes_are_always_the_same() -> None:
    one, two = probes(3, 50, 64), probes(4, 50, 64)
    assert [request.uid for request in one] == ["refit-parity-0", "refit-parity-1", "refit-parity-2"]
    for first, second in zip(one, two[:3], strict=True):
        assert torch.equal(first.token_ids(), second.token_ids()) and first.seed == second.seed
        assert first.token_ids().max() < 50


@pytest.mark.parametrize("check_s", [0.2, 1.0, 3.0], ids=["cheap", "a step", "three steps"])
def test_sampled_comparisons_cost_little_of_the_time_at_every_moment(check_s: float) -> None:
    now, spent, checked = 0.0, 0.0, []
    sampled = SampledParity(ParityCheck(1.05, 1.0, 64), clock=lambda: now)
    for refit in range(1, 5001):
        now += 1.0  # a step
        if sampled.due():
            with sampled.measured():
                now += check_s
            spent += check_s
            checked.append(refit)
            first = len(checked) == 1  # its cost is not known before
            assert spent <= SHARE * now * 1.01 + (check_s if first else 0.0)
    assert checked[0] == 200
    assert spent / now == pytest.approx(SHARE, rel=0.2)
