"""Check that policy and engines agree after a refit: the engines generate a few samples, the policy computes their
log-probs. Unlike the checksums of a refit this also covers the model's code on both sides.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.cluster import remote_stream
from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.driver.interfaces import ColocatablePolicyInterface, GenerationInterface
from grpo_mcore.driver.policy.refit_settings import ParityCheck, parity_check
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Turn
from grpo_mcore.rollout.workers import Ref
from grpo_mcore.step.step_batch import RankStep

SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 16, 32
"""For each engine. Fewer tokens if the context is shorter, more samples if there are more data-parallel ranks."""

SHARE = 0.005
"""Largest share of a run's time that the comparisons of policy.refit_parity=sample take."""


class SampledParity:
    """Chooses the refits after which engines and policy are compared, so that this takes at most SHARE of the time.

    The next comparison is expected to take as long as the longest so far; the first one as long as a step.
    """

    def __init__(self, check: ParityCheck, clock: Callable[[], float] = REAL.now) -> None:
        self.check = check
        self._clock, self._began = clock, clock()
        self._refits, self._spent_s, self._longest_s = 0, 0.0, 0.0

    def due(self) -> bool:
        """Return whether there is time for a comparison after this refit. To be called once for each refit."""
        self._refits += 1
        elapsed_s = self._clock() - self._began
        return self._spent_s + (self._longest_s or elapsed_s / self._refits) <= SHARE * elapsed_s

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the block's time as that of a comparison."""
        started_at = self._clock()
        yield
        spent_s = self._clock() - started_at
        self._spent_s += spent_s
        self._longest_s = max(self._longest_s, spent_s)


def sampled_parity(config: MasterConfig, clock: Clock = REAL) -> SampledParity | None:
    """Return the comparisons of a run that has policy.refit_parity=sample."""
    return SampledParity(parity_check(config), clock.now) if config.policy.refit_parity == "sample" else None


@dataclass(frozen=True)
class EngineParity:
    """Result for one engine. `mult_error`: mean over its tokens of exp|engine's log-prob - policy's|; `worst`: the same
    for the worst sample."""

    name: str
    samples: int
    tokens: int
    mult_error: float
    worst: float


@dataclass(frozen=True)
class Parity:
    """Results of all engines at one weight version."""

    version: int
    limit: float
    engines: tuple[EngineParity, ...]

    def agrees(self, engine: EngineParity) -> bool:
        return engine.mult_error <= self.limit  # False for NaN

    @property
    def ok(self) -> bool:
        return all(map(self.agrees, self.engines))

    @property
    def mult_error(self) -> float:
        """The error of the engine that differs most."""
        return max(engine.mult_error for engine in self.engines)

    def table(self) -> str:
        width = max(len("engine"), *(len(engine.name) for engine in self.engines))
        lines = [f"{'engine':{width}}  samples  tokens  mult_prob_error  worst sample  limit {self.limit:g}"]
        for engine in self.engines:
            lines.append(
                f"{engine.name:{width}}  {engine.samples:7}  {engine.tokens:6}  {engine.mult_error:15.6f}  "
                f"{engine.worst:12.6f}  " + ("ok" if self.agrees(engine) else "DIFFERS")
            )
        return "\n".join(lines)

    def difference(self) -> str:
        """Describe the engines that differ, for an error message."""
        differing = [engine for engine in self.engines if not self.agrees(engine)]
        errors = ", ".join(f"{engine.name} {engine.mult_error:.6g}" for engine in differing)
        return (
            f"at weight version {self.version} the log-probs of engine and policy differ: mean exp|difference| is "
            f"{errors}, the limit {self.limit:g}"
        )


def measure_parity(policy: ColocatablePolicyInterface, engines: GenerationInterface, check: ParityCheck) -> Parity:
    """Compare the log-probs of all engines with the policy's.

    The engines must be ready to generate with the policy's weights, and are ready again at the end; the policy must be
    between two steps. Raises WorkerFailed and DeadlineExceeded."""
    data = policy.layout.data
    requests = probes(-(-SAMPLES // data) * data, policy.shape.vocab_size, check.max_length)
    new_tokens = min(NEW_TOKENS, check.max_length - _prompt_tokens(check.max_length))
    sampling = Sampling(new_tokens, check.temperature, check.top_p, check.top_k)
    purpose = "samples to compare engine and policy by"
    streams = [
        remote_stream(worker, EngineWorker.generate_refs, purpose=purpose)(requests, sampling)
        for worker in engines.workers
    ]
    by_engine = [[parcel.content for parcels in stream for parcel in parcels] for stream in streams]
    engines.release()
    policy.onload()
    results = [
        _compare(policy, worker.name, samples) for worker, samples in zip(engines.workers, by_engine, strict=True)
    ]
    policy.offload()
    engines.prepare()
    return Parity(engines.weight_version, check.limit, tuple(results))


def probes(count: int, vocabulary: int, max_length: int) -> list[GenerationRequest]:
    """Return prompts of random tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    length = _prompt_tokens(max_length)
    return [
        GenerationRequest(
            f"refit-parity-{number}",
            0,
            (Turn("user", torch.randint(vocabulary, (length,), generator=generator)),),
            seed=number,
        )
        for number in range(count)
    ]


def _prompt_tokens(max_length: int) -> int:
    return min(PROMPT_TOKENS, max(1, max_length // 2))


def _compare(policy: ColocatablePolicyInterface, name: str, trajectories: list[Ref]) -> EngineParity:
    """Each sample is a bin of its own; every data-parallel rank gets equally many."""
    data = policy.layout.data
    steps = [
        RankStep(
            batches=(tuple((index,) for index in range(rank, len(trajectories), data)),),
            trajectories={index: trajectories[index] for index in range(rank, len(trajectories), data)},
        )
        for rank in range(data)
    ]
    policy.receive(steps)
    stats = policy.infer_logprobs(len(trajectories), prev=True, reference=False, kl_kind=None)
    tokens, errors = stats["tokens"], stats["mult_error"]
    mean = ((tokens * errors).sum() / tokens.sum()).item()
    return EngineParity(name, len(trajectories), int(tokens.sum()), mean, errors.max().item())
