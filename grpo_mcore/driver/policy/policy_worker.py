"""A policy rank with its data: packs trajectories into micro-batches and keeps log-probs between phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_mcore.batching.packed_batch import PackedBatch, cut_row, join_rows, pack_rows, share_prefixes
from grpo_mcore.objective import CombinedMetrics, clip_advantages, kl_to_go, sample_stats, teacher_gap, token_advantages
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.platform import Platform, PlatformChoice
from grpo_mcore.parallel.policy import LossFn, Policy, TrainReport
from grpo_mcore.parallel.probes import gradient_products, trace_layers
from grpo_mcore.recipe import KLType, PolicyConfig, bins_per_logprob_row
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.rollout.trajectory import FLAGS, Trajectory
from grpo_mcore.rollout.workers import ObjectStore, Ref
from grpo_mcore.step.step_batch import RankStep, TrainTargets


@dataclass(frozen=True)
class Bin:
    """A packed micro-batch, and the indices of its samples in the step."""

    batch: PackedBatch
    samples: Tensor  # int64 [samples of the bin]


@dataclass(frozen=True)
class BinLogprobs:
    """Log-probs of a micro-batch's samples: rows, because a step has too many samples to send an array for each."""

    samples: list[int]
    """Indices in the step."""
    lengths: tuple[int, ...]
    """Tokens of each."""
    rows: dict[str, np.ndarray]
    """float32 [T], the samples side by side: "policy" before the update and, if they were computed, "reference" and
    "teacher"."""


class PolicyWorker(Policy):
    """A policy rank that holds the data of its step. Runs in a Ray actor or in the driver's process."""

    def __init__(
        self,
        address: Address,
        config: PolicyConfig,
        store: ObjectStore,
        seed: int,
        timeout_s: float,
        reference: bool,
        platform: PlatformChoice,
        build_later: bool = False,
        trains: bool = True,
    ) -> None:
        """`store`: object store from which trajectories are fetched by reference. `reference`: keep the reference
        policy's weights too. `platform`: the recipe's cluster.platform. `build_later`: take no memory before `build` is
        called. `trains`: false for a teacher."""
        self._store = store
        self._bins: list[list[Bin]] = []  # by optimizer step
        self._trained: list[tuple[Bin, Tensor]] = []  # micro-batches of the last `train`, with their log-probs [1, T]
        self._kl_kind: KLType | None = None
        super().__init__(
            config, address, seed=seed, timeout_s=timeout_s, reference=reference, platform=Platform.detect(platform),
            trains=trains, build_later=build_later,
        )  # fmt: skip

    def build(self) -> None:
        """Join the mesh, build the model and load its weights, and prepare to send them to the engines."""
        super().build()
        self.is_reporting_rank = self.layout.is_reporting_rank(self._address.rank)
        self._sender = RefitSender(
            self.weights,
            self._address.rank,
            through_host=self.layout.world_size > 1,
            address=self._address.master_addr,
        )

    def receive(self, step: RankStep, weight_version: int) -> None:
        """Fetch the step's trajectories and pack them. `weight_version`: version of the weights that will train on
        them."""
        trajectories = dict(
            zip(step.trajectories, self._store.fetch_many(list(step.trajectories.values())), strict=True)
        )
        trajectories |= {index: trajectories[index].with_prompt(prompt) for index, prompt in step.prompts.items()}
        teacher = dict(zip(step.teacher, self._store.fetch_many(list(step.teacher.values())), strict=True))
        multiple = self.row_multiple
        flagged = any(turn.flag for trajectory in trajectories.values() for turn in trajectory.turns)
        self._bins, self._trained = [], []
        for bins in step.batches:
            rows = [
                Bin(
                    self._pack(
                        [trajectories[i] for i in bin],
                        multiple,
                        weight_version,
                        step.shares_prefixes,
                        [teacher[i] for i in bin] if teacher else None,
                        flagged=flagged,
                    ),
                    torch.tensor(bin),
                )
                for bin in bins
                if bin
            ]
            # Every rank runs equally many micro-batches; if a rank has too few samples, its last ones are padding.
            padding = Bin(rows[0].batch.empty_like(multiple), torch.empty(0, dtype=torch.int64))
            self._bins.append(rows + [padding] * (len(bins) - len(rows)))

    def _pack(
        self,
        trajectories: Sequence[Trajectory],
        multiple: int,
        weight_version: int,
        shares_prefixes: bool,
        teacher: Sequence[Tensor] | None = None,
        *,
        flagged: bool = False,
    ) -> PackedBatch:
        columns = [
            {
                "token_mask": trajectory.loss_mask().float(),
                "sample_mask": torch.tensor(1.0),
                "generation_logprobs": trajectory.logprobs(),
                "ages": weight_version - trajectory.token_versions(default=weight_version),
            }
            | ({"flags": trajectory.flags()} if flagged else {})
            for trajectory in trajectories
        ]
        hidden = teacher is not None and teacher[0].ndim == 2
        if teacher is not None and not hidden:
            for of_sample, logprobs in zip(columns, teacher, strict=True):
                mask = of_sample["token_mask"]
                of_sample["teacher_logprobs"] = torch.zeros_like(mask).masked_scatter(mask > 0, logprobs)
        names = [trajectory.name for trajectory in trajectories]
        routes = list(map(_routes, trajectories)) if self.config.router_replay.enabled else None
        tokens = [trajectory.token_ids() for trajectory in trajectories]
        branches = [trajectory.sequences for trajectory in trajectories]
        row = pack_rows(tokens, columns, multiple, names=names, routes=routes, branches=branches)
        if teacher is not None and hidden:
            row = replace(row, teacher_hidden=torch.cat(list(teacher)))
        block = self.config.sequence_packing.shared_prefix.min_tokens
        return share_prefixes(row, multiple, block) if shares_prefixes else row

    def infer_logprobs(
        self, prev: bool, reference: bool, kl_kind: KLType | None, dropout: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Add log-probs under the current weights, and under the reference, to the micro-batches.

        `dropout`: the current weights act as they do in training. `kl_kind`: estimator of the KL in the reward, None
        without it. One rank of those with the same samples returns (sample indices [n], their objective.sample_stats,
        [n] each); the others return None.
        """
        self._kl_kind = kl_kind
        bins = [bin for bins in self._bins for bin in bins]
        batches = [bin.batch for bin in bins]
        count, multiple = bins_per_logprob_row(self.config), self.row_multiple
        block = self.config.sequence_packing.shared_prefix.min_tokens
        joined = [batches[i : i + count] for i in range(0, len(batches), count)]
        rows = [join_rows(few, multiple, block) if len(few) > 1 else few[0] for few in joined]
        for needed, column, compute in (
            (prev, "prev_logprobs", partial(self.logprobs, dropout=dropout)),
            (reference, "reference_policy_logprobs", self.reference_logprobs),
        ):
            values = compute(rows) if needed else None
            for few, logprobs in zip(joined, values or (), strict=values is not None):
                for batch, row in zip(few, cut_row(logprobs.to("cpu"), few), strict=True):
                    batch.columns[column] = row
        if not self.is_reporting_rank:
            return None
        stats = [sample_stats(batch.loss_inputs(), kl_kind) for batch in batches]
        return torch.cat([bin.samples for bin in bins]), {
            name: torch.cat([part[name] for part in stats]) for name in stats[0]
        }

    def score(self, step: RankStep, hidden: bool = False) -> dict[int, Ref]:
        """Return references to the log-probs of each sample's trained tokens under the current weights, float32
        [trained tokens], by sample index; with `hidden` to what the output layer gets before these tokens, [trained
        tokens, hidden size]. One rank of those with the same samples returns them; the others return nothing."""
        self.receive(step, 0)
        bins = [bin for bins in self._bins for bin in bins]
        self._bins = []
        batches = [bin.batch for bin in bins]
        rows = self.hidden_states(batches) if hidden else self.logprobs(batches)
        if not self.is_reporting_rank or rows is None:
            return {}
        scored: dict[int, Ref] = {}
        for bin, row in zip(bins, rows, strict=True):
            values, mask = row.to("cpu"), bin.batch.columns["token_mask"] > 0
            if not hidden:
                values = values[mask]
            parts = values.split([int(of_sample.sum()) for of_sample in bin.batch.split(mask)])
            scored |= {
                index: self._store.put(part.clone()) for index, part in zip(bin.samples.tolist(), parts, strict=True)
            }
        return scored

    def train(self, loss_fn: LossFn, targets: TrainTargets) -> list[TrainReport]:
        """Run an optimizer step for every batch in which a token counts, then drop the step's data."""
        reports = []
        self._trained = []
        steps = zip(self._bins, targets.valid_seqs, targets.valid_toks, strict=True)
        counted = [step for step in steps if step[2]]
        for number, (bins, seqs, toks) in enumerate(counted, start=1):
            batches, last = self._with_targets(bins, targets), number == len(counted)
            reports.append(self.train_step(batches, loss_fn, global_valid_seqs=seqs, global_valid_toks=toks, last=last))
            self._trained += zip(bins, self.step_logprobs, strict=False)  # without rows that fill the schedule
        self.advance_schedule()
        self._bins = []
        return reports

    def compare_losses(
        self, losses: Sequence[LossFn], parts: Sequence[LossFn], targets: TrainTargets, kinds: Tensor
    ) -> list[tuple[Tensor, list[CombinedMetrics]]]:
        """Return `gradient_products` for each optimizer step of the step received, and update by the first loss after
        each. `kinds`: int64 [vocabulary], what the column `token_kinds` is for each token."""
        compared = []
        for bins, seqs, toks in zip(self._bins, targets.valid_seqs, targets.valid_toks, strict=True):
            batches = self._with_targets(bins, targets)
            for batch in batches:
                batch.columns["token_kinds"] = kinds[batch.tokens]
            if toks:
                compared.append(
                    gradient_products(self, batches, losses, parts, global_valid_seqs=seqs, global_valid_toks=toks)
                )
                self.train_step(batches, losses[0], global_valid_seqs=seqs, global_valid_toks=toks)
        self._bins = []
        return compared

    def token_logprobs(self) -> list[BinLogprobs]:
        """Return the log-probs of the samples of the last `train`. Only a reporting rank has any."""
        bins = []
        for bin, logprobs in self._trained if self.is_reporting_rank else ():
            columns = bin.batch.columns
            rows = {"policy": columns.get("prev_logprobs", logprobs)}
            for name, column in (("reference", "reference_policy_logprobs"), ("teacher", "teacher_logprobs")):
                if column in columns:
                    rows[name] = columns[column]
            values = {name: row[0].to("cpu", torch.float32).numpy() for name, row in rows.items()}
            bins.append(BinLogprobs(bin.samples.tolist(), bin.batch.lengths, values))
        return bins

    def trace_layers(self) -> dict[int, dict[int, Tensor]]:
        """Return what comes out of this rank's layers for the samples received: sample index -> layer -> float64
        [2, length]. One rank of those with the same layers and samples has any."""
        bins = [bin for bins in self._bins for bin in bins]
        traces: dict[int, dict[int, Tensor]] = {}
        for bin, layers in zip(bins, trace_layers(self, [bin.batch for bin in bins]), strict=True):
            for number, rows in layers.items() if self.here.tensor == 0 else ():
                for index, row in zip(bin.samples.tolist(), rows.split(list(bin.batch.lengths), dim=1), strict=True):
                    traces.setdefault(index, {})[number] = row.clone()
        return traces

    def skip(self) -> None:
        """Advance the learning rate schedule without training, and drop the step's data."""
        self.advance_schedule()
        self._bins = []

    def evaluate(self, loss_fn: LossFn, targets: TrainTargets) -> list[TrainReport]:
        """Return the loss of the step received, without training."""
        return [
            self.eval_step(self._with_targets(bins, targets), loss_fn, global_valid_seqs=seqs, global_valid_toks=toks)
            for bins, seqs, toks in zip(self._bins, targets.valid_seqs, targets.valid_toks, strict=True)
        ]

    def _with_targets(self, bins: Sequence[Bin], targets: TrainTargets) -> list[PackedBatch]:
        """Return the micro-batches, with the columns that `targets` gives each token."""
        for bin in bins:
            batch, columns = bin.batch, bin.batch.columns
            columns["sample_mask"] = batch.per_token(targets.weights[bin.samples])
            if targets.rewards is not None:
                columns["rewards"] = batch.per_token(targets.rewards[bin.samples])
            if targets.reference_sums is not None:
                columns["reference_sums"] = batch.per_token(targets.reference_sums[bin.samples])
            if targets.advantages is None or not self.is_last_stage:
                continue
            to_go = kl_to_go(batch.loss_inputs(), self._kl_kind) if targets.kl_weight and self._kl_kind else None
            advantages = batch.per_token(targets.advantages[bin.samples])
            if targets.teacher_weight:
                advantages = advantages + targets.teacher_weight * teacher_gap(batch.loss_inputs())
            advantages = token_advantages(advantages, to_go, targets.kl_weight)
            for flag, value in targets.flag_advantages.items() if "flags" in columns else ():
                advantages = torch.where(columns["flags"] == 1 + FLAGS.index(flag), value, advantages)
            columns["advantages"] = clip_advantages(advantages, *targets.clip)
        return [bin.batch for bin in bins]

    def host_network(self, *arguments: Any) -> dict[str, Any]:
        return self._sender.host_network(*arguments)

    def memory(self) -> dict[str, Any]:
        held = super().memory()
        return held | {"refit buffer": self._sender.buffer_bytes} if held else {}

    def close_refit(self) -> None:
        self._sender.close_refit()

    def open_refit(self, *arguments: Any) -> dict[str, Any]:
        return self._sender.open_refit(*arguments)

    def send_refit(self, *checked: Any) -> dict[str, Any]:
        return self._sender.send_refit(*checked)

    def shutdown(self) -> None:
        self._sender.close_refit()
        super().shutdown()


def _routes(trajectory: Trajectory) -> Tensor:
    if trajectory.routed_experts is None:
        raise ValueError(f"policy.router_replay: the engine recorded no experts of sample {trajectory.name}")
    return trajectory.routed_experts
