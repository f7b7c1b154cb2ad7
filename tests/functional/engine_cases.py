"""Tiny engines and policies for the tests of generation and refit."""

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_mcore.cluster import Rendezvous
from grpo_mcore.families import params_of, read_hf_config, shape_of
from grpo_mcore.generation import Engine, EngineConfig, EngineError
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.parts import parts_of
from grpo_mcore.refit.plan.plan import RefitPlan, plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import Refit, RefitReport, refit
from grpo_mcore.refit.transport.board import Seat
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn
from grpo_mcore.tools.demo.tiny_models import SIZES, make_tiny_model
from grpo_mcore.tools.parity.parity import load_network, unstacked
from tests.functional.preload import preload
from tests.unit.refit.shards import Handle, ShardedModel
from tests.waiting import wait_until

VOCABULARY = SIZES["vocab_size"]
CONTEXT = 160
_NUMBER = itertools.count()


def make_model(folder: Path, **overrides: Any) -> Path:
    return make_tiny_model("qwen3", folder, words=True, num_hidden_layers=2, **overrides)


def config(folder: Path, **options: Any) -> EngineConfig:
    preload()
    return EngineConfig(str(folder), dtype="float32", max_model_len=CONTEXT, kv_cache_memory_gb=0.1, **options)


class Source:
    """A policy rank with the weights of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def parameters(self) -> dict[str, torch.Tensor]:
        shape = shape_of(read_hf_config(self.folder))
        whole = unstacked(load_file(self.folder / "model.safetensors"), shape)
        return ShardedModel(whole, shape, 0, 1).parameters()


def load_reference(folder: Path) -> torch.nn.Module:
    return load_network(folder, torch.float32)


def request(number: int, length: int = 0, **options: Any) -> GenerationRequest:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(2, VOCABULARY, (length or 3 + number % 9,), generator=generator)
    options = {"seed": 1000 + number} | options
    return GenerationRequest(f"prompt-{number}", 0, (Turn("user", tokens),), **options)


def generate(engine: Engine, requests: list[GenerationRequest], **options: Any) -> dict[str, Trajectory]:
    sampling = Sampling(**({"max_new_tokens": 24} | options))
    return {trajectory.uid: trajectory for trajectory in engine.generate(requests, sampling)}


@torch.no_grad()
def reference_logprobs(
    reference: torch.nn.Module, trajectory: Trajectory, temperature: float = 1.0, top_p: float = 1.0
) -> Tensor:
    """float32 [generated]: of the generated tokens, from the distribution that is sampled from."""
    tokens = trajectory.token_ids()
    logits = reference(tokens[None]).logits[0, trajectory.prompt_length - 1 : -1].float() / temperature
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all likelier tokens
        cut = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(cut, -torch.inf)
    return logits.log_softmax(-1).gather(-1, tokens[trajectory.prompt_length :, None])[:, 0]


def worst_difference(reference: torch.nn.Module, trajectories: dict[str, Trajectory], **how: float) -> float:
    return max(
        (reference_logprobs(reference, trajectory, **how) - trajectory.turns[-1].logprobs).abs().max().item()
        for trajectory in trajectories.values()
    )


class Policy:
    """Weights to refit from, as `size` tensor-parallel ranks in this process hold them."""

    def __init__(self, folder: Path, size: int = 2) -> None:
        self.reference = load_reference(folder)
        self.run_id = f"functional.{next(_NUMBER)}"
        self.shape = shape_of(read_hf_config(folder))
        self.size = size
        self.handles = [
            Handle(f"policy-{rank}", RefitSender(self.source(rank), rank, run_id=self.run_id)) for rank in range(size)
        ]

    def source(self, rank: int) -> Any:
        class Source:
            def parameters(_) -> Any:
                weights = dict(self.reference.named_parameters())
                return ShardedModel(weights, self.shape, rank, self.size).parameters()

        return Source()

    @torch.no_grad()
    def change(self, seed: int) -> None:
        torch.manual_seed(seed)
        for name, parameter in self.reference.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.08)

    def plan(
        self, engine: Engine, *, dtype: str = "float32", buffer_bytes: int = 2 * 34_304, **params: Any
    ) -> RefitPlan:
        """Small buckets: a layer's weight and bias, and rows of the embedding, come apart."""
        layout = EngineLayout(engine.config.tensor_parallel_size)
        params = params.get("params", params_of(self.shape))
        policy = PolicyLayout(self.size, expert_tensor=self.size)
        return plan_refit(params, self.shape, policy, layout, dtype=dtype, buffer_bytes=buffer_bytes)

    def refit(self, engine: Engine, version: int, plan: RefitPlan | None = None, **options: Any) -> RefitReport:
        return refit(self.handles, [Handle(engine.name, engine)], plan or self.plan(engine), version, **options)

    def manifest(self, engine: Engine) -> dict[str, Any]:
        """What an engine gets to open a refit, in which nobody sends."""
        plan, ranks = self.plan(engine), engine.config.ranks
        parts = parts_of(plan, self.size, (), (), ())
        seats = [Seat(next(_NUMBER), seat, self.size, ranks, 60.0) for seat in range(self.size + ranks)]
        transport = self.handles[0].target.open_refit(parts.senders[0], seats[0])["transport"]
        return {
            "parts": list(parts.readers), "seats": seats[self.size :], "digest": plan.digest,
            "transports": [transport], "version": 1, "verify": "off",
        }  # fmt: skip

    def refit_wrongly(self, engine: Engine) -> None:
        """A commit before anything has come: every rank of the engine refuses it."""
        engine.start_refit(self.manifest(engine))
        with pytest.raises(EngineError, match="only 0 of"):
            engine.commit_refit(1)
        engine.abort_refit()

    def close(self) -> None:
        for handle in self.handles:
            handle.target.close_refit()


def check_refit_in_flight(engine: Engine, policy: Policy, version: int, in_place: bool = False) -> None:
    """Staging runs beside generation; each sample says which token is of which version, and its log-probs agree.
    `in_place`: the engine has no memory for that, and generation waits for the whole refit."""
    policy.change(seed=version)
    with torch.no_grad():
        old = {name: parameter.clone() for name, parameter in policy.reference.named_parameters()}
    policy.refit(engine, version)
    policy.change(seed=version + 1)
    run = Refit(policy.handles, [Handle(engine.name, engine)], policy.plan(engine), version + 1)
    samples: list[Any] = []
    # The last request has room for four tokens only: when its sample comes, the others are under way.
    requests = [*(request(number) for number in range(8)), request(8, CONTEXT - 4)]
    committed, under_way = threading.Event(), 0

    def work() -> None:
        nonlocal under_way
        while not committed.is_set():
            for index, sample in enumerate(engine.generate(requests, Sampling(max_new_tokens=120))):
                samples.append(sample)
                under_way += index == 0

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(lambda: under_way, "the first batch")
        run.stage()
        staged_in = under_way  # however long staging took, the commit falls into the first steps of a batch
        if not in_place:
            wait_until(lambda: under_way > staged_in, "the batch after staging")
        report = run.commit(recompute_kv=True)
    finally:
        committed.set()
        thread.join(100)
    assert len(samples) == 9 * under_way and engine.weight_version == version + 1
    assert (report.pause_seconds == report.seconds) == bool(report.in_place) == in_place
    new = {name: parameter.detach().clone() for name, parameter in policy.reference.named_parameters()}
    mixed = [sample for sample in samples if len(sample.weight_versions) == 2]
    assert mixed, "no request was under way at the commit"
    check_spans(policy.reference, samples, {version: old, version + 1: new})
    assert worst_difference(policy.reference, generate(engine, requests)) < 1e-4


def check_pause(engine: Engine, policy: Policy, version: int) -> None:
    """Samples stand still from `release` to `prepare`, through a refit, and go on with the new weights; new ones wait
    with them."""
    policy.change(seed=version)
    weights = {version: _copies(policy.reference)}
    policy.refit(engine, version)
    # The last request has room for four tokens only: when its sample comes, the others are under way.
    samples = engine.generate([*map(request, range(6)), request(6, CONTEXT - 4)], Sampling(max_new_tokens=120))
    found = [next(samples)]
    left = engine.health()["requests"]
    engine.release(pause=True)
    thread = threading.Thread(target=lambda: found.extend(engine.generate([request(7)], Sampling(max_new_tokens=8))))
    thread.start()
    try:
        wait_until(lambda: engine.health()["requests"] == left + 1, "the request of the other caller")
        policy.change(seed=version + 1)
        weights[version + 1] = _copies(policy.reference)
        policy.refit(engine, version + 1, recompute_kv=True)
        thread.join(0.2)
        assert thread.is_alive() and engine.health()["requests"] == left + 1
    finally:
        engine.prepare(version + 1)
        thread.join(100)
    found += samples
    assert len(found) == 8 and engine.health()["requests"] == 0
    assert sum(len(sample.weight_versions) == 2 for sample in found) == left > 0
    check_spans(policy.reference, found, weights)


def _copies(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def check_spans(reference: torch.nn.Module, samples: list[Trajectory], weights: dict[int, dict[str, Tensor]]) -> None:
    """Each sample's spans cover it, and the log-probs of each agree with the weights of its version. `reference` then
    has the last of `weights`."""
    for version, values in weights.items():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[name])
        for sample in samples:
            ends = [0, *(end for _, _, end in sample.weight_versions)]
            assert [start for _, start, _ in sample.weight_versions] == ends[:-1] and ends[-1] == sample.length
            versions = [of for of, _, _ in sample.weight_versions]
            assert versions == sorted(set(versions) & set(weights)), f"versions {versions} of {sorted(weights)}"
            found = None
            for of, start, end in sample.weight_versions:
                if of == version:
                    found = (
                        reference_logprobs(reference, sample) - sample.turns[-1].logprobs if found is None else found
                    )
                    span = found[max(0, start - sample.prompt_length) : end - sample.prompt_length]
                    assert not len(span) or span.abs().max() < 1e-4, f"tokens {start}:{end} are not of version {of}"


class PolicyRank(Policy):
    """A tensor-parallel rank of the tests' policy in a process of its own; `change` draws what the driver's draws."""

    def __init__(self, rendezvous: Rendezvous, folder: str) -> None:
        self.reference = load_reference(Path(folder))
        self.shape = shape_of(read_hf_config(folder))
        self.size = rendezvous.world_size
        self.sender = RefitSender(self.source(rendezvous.rank), rendezvous.rank, run_id=f"ray.{os.getppid()}")

    def open_refit(self, *arguments: Any) -> dict[str, Any]:
        return self.sender.open_refit(*arguments)

    def send_refit(self, *checked: Any) -> dict[str, Any]:
        return self.sender.send_refit(*checked)

    def offload(self) -> None: ...

    def shutdown(self) -> None:
        self.sender.close_refit()


class Killer:
    """The engine to the driver; kills one of its ranks before it passes the call `at` on."""

    def __init__(self, engine: Engine, rank: psutil.Process, at: str) -> None:
        self.name, self._handle, self._rank, self._at = engine.name, Handle(engine.name, engine), rank, at

    def call(self, method: str, *args: Any, **how: Any) -> Any:
        if method == self._at:
            self._rank.kill()
        return self._handle.call(method, *args)
