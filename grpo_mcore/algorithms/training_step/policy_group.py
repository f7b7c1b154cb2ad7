"""The policy's ranks as the driver holds them: one call goes to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_mcore.algorithms.training_step.rank_step import RankStep, TrainTargets
from grpo_mcore.algorithms.weight_sync.refit_parity import ParityCheck
from grpo_mcore.cluster import BackgroundWork, Cluster, Worker, call_all
from grpo_mcore.families import ModelShape
from grpo_mcore.objective import combine_metrics, step_metrics
from grpo_mcore.objective.config import KLType
from grpo_mcore.parallel.mesh import Layout
from grpo_mcore.refit import TrainerLayout, Verify


@dataclass
class PolicyGroup:
    """`updates` counts the steps trained since the run began: the weights' next version is `updates` + 1.

    `meanwhile`: what the driver goes on with while it waits for the ranks. `colocated`: engines share the ranks'
    devices, which are to have room for them.
    """

    cluster: Cluster
    workers: Sequence[Worker]
    layout: Layout
    shape: ModelShape
    model_folder: str
    precision: str
    refit_buffer_gb: float
    refit_layout: TrainerLayout
    refit_verify: Verify = "sample"
    refit_parity: ParityCheck | None = None
    colocated: bool = True
    updates: int = 0
    meanwhile: BackgroundWork | None = None
    linked: tuple[tuple[str, int], ...] = ()  # (node, process) of those to whom the ranks have a wire

    @contextmanager
    def run_alongside(self, other: BackgroundWork) -> Iterator[None]:
        """Inside, `other` goes on while the driver waits for the ranks."""
        self.meanwhile = other
        try:
            yield
        finally:
            self.meanwhile = None

    def receive(self, steps: Sequence[RankStep]) -> None:
        """Gives every rank the share of its data-parallel rank (`steps`, by data-parallel rank)."""
        version = self.updates + 1
        shares = [(steps[self.layout.coordinates(rank).data], version) for rank in range(self.layout.world_size)]
        call_all(
            self.cluster,
            self.workers,
            "receive",
            args_per_worker=shares,
            what="receiving the step's samples",
            meanwhile=self.meanwhile,
        )

    def infer_logprobs(self, samples: int, *, prev: bool, reference: bool, kl_kind: KLType | None) -> dict[str, Tensor]:
        """Log-probs of the step received, kept by the ranks. Returns what objective.sample_stats says about each of the
        step's `samples`: float64 [samples], 0 for those that no rank has."""
        parts = self._all("infer_logprobs", prev, reference, kl_kind, what="log-probs")
        stats: dict[str, Tensor] = {}
        for index, found in filter(None, parts):
            for name, values in found.items():
                stats.setdefault(name, values.new_zeros(samples))[index] = values
        return stats

    def train(self, loss_fn: Any, targets: TrainTargets) -> dict[str, float]:
        """Every optimizer step of the step received. Returns metrics over all ranks and optimizer steps."""
        reports = self._all("train", loss_fn, targets, what="training")
        self.updates += 1
        return self._combined(reports) | {
            "grad_norm": sum(report.grad_norm for report in reports[0]) / len(reports[0]),
            "lr": reports[0][-1].learning_rate,
        }

    def skip(self) -> None:
        """A step that trains nothing: it counts, and the weights stay."""
        self._all("skip", what="leaving out a step")
        self.updates += 1

    def evaluate(self, loss_fn: Any, targets: TrainTargets) -> dict[str, float]:
        """The metrics of the step received under the weights of now; nothing is trained."""
        return self._combined(self._all("evaluate", loss_fn, targets, what="evaluation"))

    def _combined(self, reports: list[Any]) -> dict[str, float]:
        """Over data-parallel ranks, then over optimizer steps. One tensor-parallel rank of the last stage speaks."""
        speaking = [ranks for rank, ranks in enumerate(reports) if self.layout.is_reporting_rank(rank)]
        by_optimizer_step = zip(*speaking, strict=True)
        return step_metrics([combine_metrics([report.metrics for report in ranks]) for ranks in by_optimizer_step])

    def homes(self, hosts: Sequence[Worker]) -> list[int]:
        """On which of the nodes with these workers each rank is; -1: on another one."""
        numbers = {host.place().node: number for number, host in enumerate(hosts)}
        return [numbers.get(worker.place().node, -1) for worker in self.workers]

    def link_to(self, receivers: Sequence[Worker]) -> None:
        """Before a refit over a wire: the ranks leave one that leads elsewhere, as to an engine that was replaced."""
        places = [worker.place() for worker in receivers]
        found = tuple((place.node, place.pid) for place in places)
        if self.linked and self.linked != found:
            self._all("close_refit", what="leaving the wire to the engines")
        self.linked = found

    def memory(self) -> list[dict[str, Any]]:
        """What each rank held while it trained: see `Policy.memory`."""
        return self._all("memory", what="what the policy's ranks hold")

    def offload(self) -> None:
        """Makes room for the engines, where they share devices."""
        if self.colocated:
            self._all("offload", what="moving the policy to the host")

    def onload(self) -> None:
        """Undoes `offload`."""
        if self.colocated:
            self._all("onload", what="moving the policy back to the accelerator")

    def save(self, folder: str) -> None:
        self._all("save", folder, what=f"saving the policy to {folder}")

    def start_save(self, folder: str) -> None:
        """`save` beside what follows; the next one only after `is_saved`."""
        self._all("start_save", folder, what=f"copying the policy for {folder}")

    def is_saved(self, wait: bool) -> bool:
        """Whether every rank has written what `start_save` began."""
        return all(self._all("is_saved", wait, what="writing the policy's checkpoint"))

    def load(self, folder: str) -> None:
        self._all("load", folder, what=f"loading the policy from {folder}")

    def export_hf(self, folder: str) -> None:
        """Writes the weights as a Hugging Face folder."""
        self._all("export_hf", folder, what=f"exporting the policy to {folder}")

    def _all(self, method: str, *args: Any, what: str) -> list[Any]:
        return call_all(self.cluster, self.workers, method, *args, what=what, meanwhile=self.meanwhile)
