"""The policy's ranks as the driver holds them: one call goes to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mcore.algorithms.policy_worker import RankStep
from grpo_mcore.cluster import Cluster, Worker, call_all
from grpo_mcore.families import ModelShape
from grpo_mcore.objective import METRIC_REDUCTIONS, combine_metrics, without_empty_extremes
from grpo_mcore.parallel.mesh import Layout


@dataclass
class PolicyGroup:
    """`updates` counts the steps trained since the run began: the weights' next version is `updates` + 1."""

    cluster: Cluster
    workers: Sequence[Worker]
    layout: Layout
    shape: ModelShape
    model_folder: str
    precision: str
    refit_buffer_gb: float
    updates: int = 0

    def receive(self, steps: Sequence[RankStep]) -> None:
        """Gives every rank the share of its data-parallel rank (`steps`, by data-parallel rank)."""
        shares = [(steps[self.layout.coordinates(rank).data],) for rank in range(self.layout.world_size)]
        call_all(self.cluster, self.workers, "receive", args_per_worker=shares, what="receiving the step's samples")

    def infer_logprobs(self, *, prev: bool, reference: bool) -> None:
        self._all("infer_logprobs", prev, reference, what="log-probs")

    def train(self, loss_fn: Any) -> dict[str, float]:
        """Every optimizer step of the step received. Returns metrics over all ranks, averaged over optimizer steps
        (extremes: the extreme)."""
        reports = self._all("train", loss_fn, what="training")
        self.updates += 1
        return self._combined(reports) | {
            "grad_norm": sum(report.grad_norm for report in reports[0]) / len(reports[0]),
            "lr": reports[0][-1].learning_rate,
        }

    def evaluate(self, loss_fn: Any) -> dict[str, float]:
        """The metrics of the step received under the weights of now; nothing is trained."""
        return self._combined(self._all("evaluate", loss_fn, what="evaluation"))

    def _combined(self, reports: list[Any]) -> dict[str, float]:
        """Over data-parallel ranks, then over optimizer steps. One tensor-parallel rank of the last stage speaks."""
        speaking = [ranks for rank, ranks in enumerate(reports) if self._speaks(rank)]
        by_optimizer_step = [
            combine_metrics([report.metrics for report in ranks]) for ranks in zip(*speaking, strict=True)
        ]
        count = len(by_optimizer_step)
        metrics = {
            name: value / count if METRIC_REDUCTIONS[name] == "sum" and not name.startswith("num_") else value
            for name, value in combine_metrics(by_optimizer_step).items()
        }
        return without_empty_extremes(metrics)

    def _speaks(self, rank: int) -> bool:
        return self.layout.speaks(rank)

    def offload(self) -> None:
        self._all("offload", what="moving the policy to the host")

    def onload(self) -> None:
        self._all("onload", what="moving the policy back to the accelerator")

    def save(self, folder: str) -> None:
        self._all("save", folder, what=f"saving the policy to {folder}")

    def load(self, folder: str) -> None:
        self._all("load", folder, what=f"loading the policy from {folder}")

    def export_hf(self, folder: str) -> None:
        """Writes the weights as a Hugging Face folder."""
        self._all("export_hf", folder, what=f"exporting the policy to {folder}")

    def _all(self, method: str, *args: Any, what: str) -> list[Any]:
        return call_all(self.cluster, self.workers, method, *args, what=what)
