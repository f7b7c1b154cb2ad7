"""One policy rank with its data: turns trajectories into packed micro-batches and keeps log-probs between phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows
from grpo_mcore.parallel.policy import LossFn, Policy, TrainReport
from grpo_mcore.refit.sender import RefitSender
from grpo_mcore.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class TrainSample:
    """One sample as this step trains on it. `trajectory`: its place in the object store."""

    trajectory: Any
    advantage: float


@dataclass(frozen=True)
class RankStep:
    """What one data-parallel rank computes in a step: bins of samples for every optimizer step."""

    batches: tuple[tuple[tuple[TrainSample, ...], ...], ...]
    valid_seqs: tuple[int, ...]  # over all ranks, one number an optimizer step
    valid_toks: tuple[int, ...]


class PolicyWorker(Policy):
    """A policy rank that also holds the data of its step. Runs in a Ray actor, or in the driver's process."""

    def __init__(self, address: Any, config: Any, store: Any, seed: int, timeout_s: float, reference: bool) -> None:
        """`config`: the recipe's policy section. `store`: fetches trajectories by reference."""
        super().__init__(config, address, seed=seed, timeout_s=timeout_s, reference=reference)
        self._store = store
        self._step: RankStep | None = None
        self._batches: list[list[PackedBatch]] = []  # by optimizer step
        self._sender = RefitSender(self.weights, address.rank, through_host=self.layout.world_size > 1)

    def receive(self, step: RankStep) -> None:
        """Fetches the step's trajectories and packs them."""
        self._step = step
        flat = [sample for batch in step.batches for samples in batch for sample in samples]
        trajectories = iter(self._store.fetch_many([sample.trajectory for sample in flat]))
        multiple = self.row_multiple
        self._batches = []
        for bins in step.batches:
            rows = [_pack(bin, [next(trajectories) for _ in bin], multiple) for bin in bins if bin]
            # Every rank runs as many micro-batches; where a rank has too few samples, the last are padding.
            self._batches.append(rows + [rows[0].empty_like(multiple)] * (len(bins) - len(rows)))

    def infer_logprobs(self, prev: bool, reference: bool) -> None:
        """Adds log-probs under the weights of now, and under the reference, to the micro-batches."""
        flat = [batch for batches in self._batches for batch in batches]
        for wanted, column, compute in (
            (prev, "prev_logprobs", self.logprobs),
            (reference, "reference_policy_logprobs", self.reference_logprobs),
        ):
            values = compute(flat) if wanted else None
            for batch, logprobs in zip(flat, values or (), strict=values is not None):
                batch.columns[column] = logprobs.to("cpu")

    def train(self, loss_fn: LossFn) -> list[TrainReport]:
        """One optimizer step for every batch of the step received; then the step's data is dropped."""
        assert self._step is not None, "receive() comes first"
        reports = [
            self.train_step(batches, loss_fn, global_valid_seqs=seqs, global_valid_toks=toks)
            for batches, seqs, toks in zip(self._batches, self._step.valid_seqs, self._step.valid_toks, strict=True)
        ]
        self.advance_schedule()
        self._step, self._batches = None, []
        return reports

    def evaluate(self, loss_fn: LossFn) -> list[TrainReport]:
        """The loss of the step received, without training."""
        assert self._step is not None, "receive() comes first"
        return [
            self.eval_step(batches, loss_fn, global_valid_seqs=seqs, global_valid_toks=toks)
            for batches, seqs, toks in zip(self._batches, self._step.valid_seqs, self._step.valid_toks, strict=True)
        ]

    def host_link(self, policy_ranks: int, nodes: int, timeout_s: float) -> dict[str, Any]:
        return self._sender.host_link(policy_ranks, nodes, timeout_s)

    def close_refit(self) -> None:
        self._sender.close_refit()

    def open_refit(self, transport: dict[str, Any] | None, plan: str) -> dict[str, Any]:
        return self._sender.open_refit(transport, plan)

    def fill_bucket(self, index: int, *checked: Any) -> dict[str, Any]:
        return self._sender.fill_bucket(index, *checked)

    def shutdown(self) -> None:
        self._sender.close_refit()
        super().shutdown()


def _pack(samples: Sequence[TrainSample], trajectories: Sequence[Trajectory], multiple: int) -> PackedBatch:
    columns = [
        {
            "token_mask": trajectory.loss_mask().float(),
            "sample_mask": torch.tensor(1.0),
            "generation_logprobs": trajectory.logprobs(),
            "advantages": torch.tensor(sample.advantage),
        }
        for sample, trajectory in zip(samples, trajectories, strict=True)
    ]
    names = [trajectory.name for trajectory in trajectories]
    return pack_rows([trajectory.token_ids() for trajectory in trajectories], columns, multiple, names=names)
