"""Protocols of the policy and the engines that `grpo_train` takes. `PolicyGroup` and `EngineGroup` are ours; an object
with these members can take the place of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from grpo_mcore.cluster import BackgroundWork, Cluster, Future, Worker
from grpo_mcore.families import ModelShape
from grpo_mcore.generation.endpoint import Endpoint
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.parallel.policy import LossFn
from grpo_mcore.recipe import GAEConfig, KLType
from grpo_mcore.refit.refit import EngineNodes
from grpo_mcore.rollout.datum import DatumSpec
from grpo_mcore.rollout.images import ImageReader
from grpo_mcore.rollout.trajectory import TrajectoryRef
from grpo_mcore.step.step_batch import RankStep, StepBatch, TrainTargets

LossFunction = LossFn
"""A loss: (log-probs of the current policy, batch, *, global_valid_seqs, global_valid_toks) -> (loss, metrics), such as
`objective.ClippedPGLossFn`."""


class TokenScorers(Protocol):
    """Models that score the policy's samples token by token: `driver/policy/teachers.py`."""

    @property
    def by_alias(self) -> Mapping[str, Any]: ...

    @property
    def colocated(self) -> bool:
        """Whether one of them takes turns with the policy on its devices."""

    def score(self, batch: StepBatch, background: BackgroundWork | None = None) -> StepBatch:
        """Return the batch with what the models say of each sample's trained tokens."""

    def score_ranks(
        self,
        ranks: Sequence[RankStep],
        samples: Sequence[TrajectoryRef],
        prompts: Sequence[DatumSpec],
        aliases: Sequence[str],
        background: BackgroundWork | None = None,
    ) -> tuple[RankStep, ...]:
        """Do the same for the ranks' shares of a step. `aliases`: which model scores each sample."""


class PolicyInterface(Protocol):
    """A policy that trains. Its methods return when every rank has done its part."""

    updates: int
    """Steps trained since the run began."""
    background: BackgroundWork | None
    """Work that goes on while the driver waits for the ranks."""
    train_times: list[list[tuple[float, ...]]]
    """`TrainReport.times` of each optimizer step of the last step, by rank."""
    teachers: TokenScorers | None

    @property
    def cluster(self) -> Cluster: ...
    @property
    def workers(self) -> Sequence[Worker]: ...
    @property
    def layout(self) -> PolicyLayout: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def model_folder(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def shares_prefixes(self) -> bool:
        """Whether samples of a bin that begin alike may share what is computed of their prefixes."""

    def run_alongside(self, other: BackgroundWork | None) -> AbstractContextManager[None]:
        """Let `other` go on whenever the driver waits for the ranks, inside the context."""

    def receive(self, steps: Sequence[RankStep]) -> None:
        """Give every rank the samples of its data-parallel rank. `steps`: one of each data-parallel rank."""

    def infer_logprobs(
        self, samples: int, *, prev: bool, reference: bool, kl_kind: KLType | None, dropout: bool = False
    ) -> dict[str, Tensor]:
        """Compute log-probs of the step received; the ranks keep them. Return the objective.sample_stats of the step's
        `samples`: float64 [samples] each."""

    def infer_values(
        self, rewards: Tensor, cfg: GAEConfig, kl_kind: KLType | None, kl_penalty: float
    ) -> dict[str, Tensor]:
        """Compute values, advantages and returns of the step received; the ranks keep them. Return the
        objective.gae_stats of the samples: float64 [samples] each."""

    def train_critic(self, loss_fn: LossFunction, targets: TrainTargets) -> dict[str, float]:
        """Run the critic's optimizer steps on the step received, and return its metrics."""

    def train(
        self, loss_fn: LossFunction, targets: TrainTargets, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Run every optimizer step of the step received, and return its metrics. `meanwhile`: called by the driver
        while the ranks train."""

    def evaluate(self, loss_fn: LossFunction, targets: TrainTargets) -> dict[str, float]:
        """Return the metrics of the step received under the current weights, without training."""

    def skip(self) -> None:
        """Count a step that trains nothing: the weights stay."""

    def token_logprobs(self) -> list[Future]:
        """Ask the ranks for the log-probs of the last `train`, without waiting for the answers."""

    def memory(self) -> list[dict[str, Any]]:
        """Return what each rank held while it trained: see `Policy.memory`."""

    def start_profile(self) -> None:
        """Have every rank trace what it does with torch's profiler."""

    def stop_profile(self, folder: Path) -> None:
        """End the traces, and write them to `folder`."""

    def start_save(self, folder: str, optimizer: bool) -> None:
        """Start to save in the background. `optimizer`: save its state too."""

    def is_saved(self, wait: bool) -> bool:
        """Return whether every rank has finished what `start_save` began. `wait`: wait until it has."""

    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder."""


class ColocatablePolicyInterface(PolicyInterface, Protocol):
    """A policy whose weights reach engines, which may share its devices."""

    @property
    def refit(self) -> Any:
        """How its weights reach the engines: `driver/policy/refit_settings.py`."""

    def ready_for(self, work: Literal["teachers", "logprobs", "training"]) -> AbstractContextManager[None]:
        """Have on the ranks' devices what the work inside needs."""

    def offload(self) -> None:
        """Make room for the engines and the log-prob passes."""

    def onload(self) -> None:
        """Undo `offload`."""

    def node_of_rank(self, hosts: Sequence[Worker]) -> list[int]:
        """Return, for each rank, which of the nodes with these workers it is on; -1: on another one."""

    def shares_process(self, hosts: Sequence[Worker]) -> bool:
        """Return whether a rank runs in the process of one of these workers."""

    def connect_to(self, receivers: Sequence[Worker]) -> None:
        """Prepare a refit over the network to these workers."""


class GenerationInterface(Protocol):
    """Engines that generate, each known by its number: `driver/engines/engine_group.py` says what each member does."""

    endpoint: Endpoint | None
    images: ImageReader | None
    """Reads images for prompts; None if the run has no images."""
    lost: dict[int, str]
    deaths: dict[int, Any]

    @property
    def cluster(self) -> Cluster: ...
    @property
    def slots(self) -> Sequence[Any]: ...
    @property
    def workers(self) -> list[Worker]: ...
    @property
    def layout(self) -> EngineLayout: ...
    @property
    def restarts(self) -> Any: ...
    @property
    def colocated(self) -> bool: ...
    @property
    def sleeps(self) -> bool: ...
    @property
    def pauses(self) -> bool: ...
    @property
    def paused(self) -> bool: ...
    @property
    def weight_version(self) -> int: ...
    def all_hosts(self) -> list[Worker]: ...
    def nodes(self) -> EngineNodes: ...
    def prepare(self) -> None: ...
    def resume(self) -> None: ...
    def release(self, *, keep_weights: bool = True) -> None: ...
    def start_profile(self) -> None: ...
    def stop_profile(self, folder: Path) -> None: ...
    def close(self) -> None: ...
    def serving(self) -> list[int]: ...
    def reachable(self) -> list[int]: ...
    def subset(self, numbers: Sequence[int]) -> GenerationInterface: ...
    def committed(self, version: int) -> None: ...
    def mark_refitted(self, numbers: Sequence[int]) -> None: ...
    def find_dead(self, among: Sequence[int] | None = None) -> list[int]: ...
    def replace_dead(self, error: Exception, among: Sequence[int] | None = None) -> list[int]: ...
    def replace(self, numbers: Sequence[int], error: Exception) -> None: ...
    def await_successors(self) -> None: ...
