"""A policy rank with its data: packs trajectories into micro-batches and keeps log-probs between phases."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_mcore.base.files import CRITIC
from grpo_mcore.batching.packed_batch import PackedBatch, cut_row, join_rows, pack_rows, share_prefixes
from grpo_mcore.batching.row_images import RowImages, row_images
from grpo_mcore.objective import (
    CombinedMetrics,
    Marking,
    MaskedTokens,
    clip_advantages,
    credit_by_token,
    critic_columns,
    gae_stats,
    kl_to_go,
    sample_stats,
    teacher_gap,
    token_advantages,
)
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.platform import Platform, PlatformChoice
from grpo_mcore.parallel.policy import LossFn, Policy, TrainReport
from grpo_mcore.parallel.probes import gradient_products, trace_layers
from grpo_mcore.parallel.weights.checkpoint import CheckpointError
from grpo_mcore.recipe import GAEConfig, KLType, PolicyConfig, bins_per_logprob_row
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.rollout.trajectory import FLAGS, Trajectory
from grpo_mcore.rollout.workers import ObjectStore, Ref
from grpo_mcore.step.step_batch import RankStep, TrainTargets


@dataclass(frozen=True)
class Bin:
    """A packed micro-batch, and the indices of its samples in the step."""

    batch: PackedBatch
    samples: Tensor  # int64 [samples of the bin]
    starts: tuple[int, ...] = ()  # token of its sample at which each begins: above 0 for a later part of a sample


@dataclass(frozen=True)
class BinLogprobs:
    """Log-probs of a micro-batch's samples: rows, because a step has too many samples to send an array for each."""

    samples: list[int]
    """Indices in the step."""
    starts: tuple[int, ...]
    """Token of its sample at which each begins; above 0 for a later part of a sample that is longer than a bin."""
    lengths: tuple[int, ...]
    """Tokens of each."""
    rows: dict[str, np.ndarray]
    """float32 [T], the samples side by side: "policy" before the update and, if they were computed, "reference" and
    "teacher"."""


class PolicyWorker(Policy):
    """A policy rank that holds the data of its step. Runs in a Ray actor or in the driver's process."""

    critic: Policy | None = None

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
        images: bool = False,
        critic: PolicyConfig | None = None,
    ) -> None:
        """`store`: object store from which trajectories are fetched by reference. `reference`: keep the reference
        policy's weights too. `platform`: the recipe's cluster.platform. `build_later`: take no memory before `build` is
        called. `trains`: false for a teacher. `images`: samples may have images. `critic`: the section `value`, for a
        critic beside the policy."""
        self._critic_config = critic
        self._store = store
        self._bins: list[list[Bin]] = []  # by optimizer step
        self._trained: list[tuple[Bin, Tensor]] = []  # micro-batches of the last `train`, with their log-probs [1, T]
        self._kl_kind: KLType | None = None
        super().__init__(
            config, address, seed=seed, timeout_s=timeout_s, reference=reference, platform=Platform.detect(platform),
            trains=trains, build_later=build_later, images=images,
        )  # fmt: skip

    def build(self) -> None:
        """Join the mesh, build the model, and the critic, load their weights, and prepare to send the policy's to the
        engines."""
        super().build()
        if self._critic_config is not None:
            self.critic = Policy(
                self._critic_config, self._address, seed=self.seed, timeout_s=self._timeout_s, reference=False,
                platform=self.platform, beside=True,
            )  # fmt: skip
        self.is_reporting_rank = self.layout.is_reporting_rank(self._address.rank)
        self._sender = RefitSender(
            self.weights, self._address.rank, through_host=self.layout.world_size > 1, address=self._address.master_addr
        )

    def receive(self, step: RankStep, weight_version: int) -> None:
        """Fetch the step's trajectories and pack them. `weight_version`: version of the weights that will train on
        them."""
        trajectories = dict(
            zip(step.trajectories, self._store.fetch_many(list(step.trajectories.values())), strict=True)
        )
        trajectories |= {index: trajectories[index].with_prompt(prompt) for index, prompt in step.prompts.items()}
        teacher = dict(zip(step.teacher, self._store.fetch_many(list(step.teacher.values())), strict=True))
        owners, starts = {index: index for index in trajectories}, dict.fromkeys(trajectories, 0)
        sample_tokens = {index: it.generated_length for index, it in trajectories.items()} if step.parts else None
        for number, part in step.parts.items():
            whole = trajectories[part.sample]
            owners[number], starts[number] = part.sample, sum(whole.branches[: part.first])
            trajectories[number] = whole.part(part.first, part.end)
            if teacher:
                before = int(whole.loss_mask()[: starts[number]].sum())
                teacher[number] = teacher[part.sample][before : before + trajectories[number].generated_length]
        if self.tower is not None:
            self.tower.see(dict(zip(step.images, self._store.fetch_many(list(step.images.values())), strict=True)))
        multiple = self.row_multiple
        flagged = any(turn.flag for trajectory in trajectories.values() for turn in trajectory.turns)
        several = any(sum(turn.loss_mask for turn in trajectory.turns) > 1 for trajectory in trajectories.values())
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
                        several_turns=several,
                        sample_tokens=[sample_tokens[owners[i]] for i in bin] if sample_tokens else None,
                    ),
                    torch.tensor([owners[i] for i in bin]),
                    tuple(starts[i] for i in bin),
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
        several_turns: bool = False,
        sample_tokens: Sequence[int] | None = None,
    ) -> PackedBatch:
        columns = [
            {
                "token_mask": trajectory.loss_mask().float(),
                "sample_mask": torch.tensor(1.0),
                "generation_logprobs": trajectory.logprobs(),
                "ages": weight_version - trajectory.token_versions(default=weight_version),
            }
            | ({"flags": trajectory.flags()} if flagged else {})
            | ({"turns": trajectory.turn_of_tokens()} if several_turns else {})
            for trajectory in trajectories
        ]
        for of_sample, tokens in zip(columns, sample_tokens or (), strict=sample_tokens is not None):
            of_sample["sample_tokens"] = torch.tensor(tokens, dtype=torch.float64)
        hidden = teacher is not None and teacher[0].ndim == 2
        if teacher is not None and not hidden:
            for of_sample, logprobs in zip(columns, teacher, strict=True):
                mask = of_sample["token_mask"]
                of_sample["teacher_logprobs"] = torch.zeros_like(mask).masked_scatter(mask > 0, logprobs)
        names = [trajectory.name for trajectory in trajectories]
        routes = list(map(_routes, trajectories)) if self.config.router_replay.enabled else None
        ids = [trajectory.token_ids() for trajectory in trajectories]
        branches = [trajectory.sequences for trajectory in trajectories]
        images = self._images_of(trajectories)
        row = pack_rows(ids, columns, multiple, names=names, routes=routes, branches=branches, images=images)
        if teacher is not None and hidden:
            row = replace(row, teacher_hidden=torch.cat(list(teacher)))
        block = self.config.sequence_packing.shared_prefix.min_tokens
        return share_prefixes(row, multiple, block) if shares_prefixes else row

    def _images_of(self, trajectories: Sequence[Trajectory]) -> RowImages | None:
        """Return the images of samples side by side. Raises ValueError if this policy reads none."""
        shown = next((it for it in trajectories if any(turn.images for turn in it.turns)), None)
        if shown is None:
            return None
        if not self.reads_images or self.shape.vision is None:
            raise ValueError(f"sample {shown.name} has images, and the policy was started without the model's tower")
        sequences = [length for trajectory in trajectories for length in trajectory.sequences]
        images = [few for trajectory in trajectories for few in trajectory.images_by_sequence()]
        return row_images(sequences, images, self.shape.vision.merge_size)

    def infer_logprobs(
        self, prev: bool, reference: bool, kl_kind: KLType | None, dropout: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Add log-probs under the current weights, and under the reference, to the micro-batches.

        `dropout`: the current weights act as they do in training. `kl_kind`: estimator of the KL in the reward, None
        without it. One rank of those with the same samples returns (sample indices [n], their objective.sample_stats,
        [n] each); the others return None.
        """
        self._kl_kind = kl_kind
        passes: dict[str, Callable[[list[PackedBatch]], list[Tensor] | None]] = {}
        if prev:
            passes["prev_logprobs"] = partial(self.logprobs, dropout=dropout)
        if reference:
            passes["reference_policy_logprobs"] = self.reference_logprobs
        self._add_columns(passes)
        return self._reported(lambda batch: sample_stats(batch.loss_inputs(), kl_kind))

    def infer_values(
        self, rewards: Tensor, cfg: GAEConfig, kl_kind: KLType | None, kl_penalty: float
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Add the critic's values to the micro-batches, and the advantages and returns that follow: `critic_columns`.
        `rewards`: float64 [samples of the step]; the others as there. One rank of those with the same samples returns
        (sample indices [n], their objective.gae_stats); the others return None."""
        assert self.critic is not None
        self._add_columns({"values": self.critic.logprobs})
        for bin in (bin for bins in self._bins for bin in bins if self.is_last_stage):
            columns = bin.batch.columns
            columns["outcomes"] = bin.batch.per_token(rewards[bin.samples])
            columns |= critic_columns(bin.batch.loss_inputs(), cfg, kl_kind, kl_penalty)
        return self._reported(lambda batch: gae_stats(batch.loss_inputs()))

    def _add_columns(self, passes: Mapping[str, Callable[[list[PackedBatch]], list[Tensor] | None]]) -> None:
        """Add to the micro-batches of the step what passes over their rows return, by column."""
        batches = [bin.batch for bins in self._bins for bin in bins]
        count, multiple = bins_per_logprob_row(self.config), self.row_multiple
        block = self.config.sequence_packing.shared_prefix.min_tokens
        joined = [batches[i : i + count] for i in range(0, len(batches), count)]
        rows = [join_rows(few, multiple, block) if len(few) > 1 else few[0] for few in joined]
        for column, compute in passes.items():
            values = compute(rows)
            for few, of_row in zip(joined, values or (), strict=values is not None):
                for batch, row in zip(few, cut_row(of_row.to("cpu"), few), strict=True):
                    batch.columns[column] = row

    def _reported(
        self, stats_of: Callable[[PackedBatch], dict[str, Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return (sample indices, statistics of each sample) of this rank's micro-batches, on a reporting rank."""
        if not self.is_reporting_rank:
            return None
        bins = [bin for bins in self._bins for bin in bins]
        stats = [stats_of(bin.batch) for bin in bins]
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
        self._trained = []
        reports = self._passes(self, loss_fn, targets, targets.epochs)
        self._bins = []
        return reports

    def train_critic(self, loss_fn: LossFn, targets: TrainTargets) -> list[TrainReport]:
        """Run the critic's optimizer steps on the same batches, and keep the step's data."""
        assert self.critic is not None
        return self._passes(self.critic, loss_fn, targets, targets.critic_epochs)

    def _passes(self, model: Policy, loss_fn: LossFn, targets: TrainTargets, epochs: int) -> list[TrainReport]:
        reports = []
        steps = zip(self._bins, targets.valid_seqs, targets.valid_toks, strict=True)
        counted = [step for step in steps if step[2]] * epochs
        for number, (bins, seqs, toks) in enumerate(counted, start=1):
            batches, last = self._with_targets(bins, targets), number == len(counted)
            self._mark(bins, [loss_fn], number)
            report = model.train_step(batches, loss_fn, global_valid_seqs=seqs, global_valid_toks=toks, last=last)
            reports.append(report)
            if model is self and number <= len(counted) // epochs:
                self._trained += zip(bins, self.step_logprobs, strict=False)  # without rows that fill the schedule
        if model is self:
            self.advance_schedule()
        return reports

    def compare_losses(
        self, losses: Sequence[LossFn], parts: Sequence[LossFn], targets: TrainTargets, kinds: Tensor
    ) -> list[tuple[Tensor, list[CombinedMetrics]]]:
        """Return `gradient_products` for each optimizer step of the step received, and update by the first loss after
        each. `kinds`: int64 [vocabulary], what the column `token_kinds` is for each token."""
        compared = []
        for bins, seqs, toks in zip(self._bins, targets.valid_seqs, targets.valid_toks, strict=True):
            batches = self._with_targets(bins, targets)
            self._mark(bins, losses, 0)
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
            bins.append(BinLogprobs(bin.samples.tolist(), bin.starts, bin.batch.lengths, values))
        return bins

    def trace_layers(self) -> dict[tuple[int, int], dict[int, Tensor]]:
        """Return what comes out of this rank's layers for the samples received: (sample index, its first token here)
        -> layer -> float64 [2, tokens]. One rank of those with the same layers and samples has any."""
        bins = [bin for bins in self._bins for bin in bins]
        traces: dict[tuple[int, int], dict[int, Tensor]] = {}
        for bin, layers in zip(bins, trace_layers(self, [bin.batch for bin in bins]), strict=True):
            for number, rows in layers.items() if self.here.tensor == 0 else ():
                keys = zip(bin.samples.tolist(), bin.starts, strict=True)
                for key, row in zip(keys, rows.split(list(bin.batch.lengths), dim=1), strict=True):
                    traces.setdefault(key, {})[number] = row.clone()
        return traces

    def advance_schedule(self) -> None:
        """Advance the schedules of policy and critic by one step of the RL loop."""
        super().advance_schedule()
        if self.critic is not None:
            self.critic.advance_schedule()

    def skip(self) -> None:
        """Advance the learning rate schedules without training, and drop the step's data."""
        self.advance_schedule()
        self._bins = []

    def evaluate(self, loss_fn: LossFn, targets: TrainTargets) -> list[TrainReport]:
        """Return the loss of the step received, without training."""
        return [
            self.eval_step(self._with_targets(bins, targets), loss_fn, global_valid_seqs=seqs, global_valid_toks=toks)
            for bins, seqs, toks in zip(self._bins, targets.valid_seqs, targets.valid_toks, strict=True)
        ]

    def _with_targets(self, bins: Sequence[Bin], targets: TrainTargets) -> list[PackedBatch]:
        for bin in bins:
            batch, columns = bin.batch, bin.batch.columns
            columns["sample_mask"] = batch.per_token(targets.weights[bin.samples])
            if targets.rewards is not None:
                columns["rewards"] = batch.per_token(targets.rewards[bin.samples])
            if targets.reference_sums is not None:
                columns["reference_sums"] = batch.per_token(targets.reference_sums[bin.samples])
            if targets.advantages is None or not self.is_last_stage:
                continue
            if targets.by_token is not None:
                mean, scale = targets.by_token
                advantages = (columns["gae"] - mean) * scale
            else:
                to_go = kl_to_go(batch.loss_inputs(), self._kl_kind) if targets.kl_weight and self._kl_kind else None
                advantages = batch.per_token(targets.advantages[bin.samples])
                if targets.teacher_weight:
                    advantages = advantages + targets.teacher_weight * teacher_gap(batch.loss_inputs())
                advantages = token_advantages(advantages, to_go, targets.kl_weight)
            if targets.turn_credits is not None:
                turns = columns.get("turns", torch.zeros_like(batch.tokens))
                advantages = advantages + credit_by_token(targets.turn_credits[bin.samples], batch.segments, turns)
            for flag, value in targets.flag_advantages.items() if "flags" in columns else ():
                advantages = torch.where(columns["flags"] == 1 + FLAGS.index(flag), value, advantages)
            columns["advantages"] = clip_advantages(advantages, *targets.clip)
        return [bin.batch for bin in bins]

    def _mark(self, bins: Sequence[Bin], losses: Sequence[LossFn], number: int) -> None:
        """Add the column `covariance_marks` if a loss reads it. `number`: of the optimizer step, for the draw. Raises
        ValueError for losses that mark different tokens."""
        markings = {marking for loss in losses if (marking := Marking.of(loss)) is not None}
        if len(markings) > 1:
            raise ValueError(f"losses that mark different tokens cannot be compared: {sorted(map(str, markings))}")
        if not markings or not self.is_last_stage:
            return
        rows = []
        for batch, samples, starts in ((bin.batch, bin.samples, bin.starts) for bin in bins):
            columns, ends = batch.columns, [*batch.lengths, batch.padding]
            places = torch.cat([torch.arange(end) for end in ends]).double()
            places += batch.per_token(samples * 2.0**32 + torch.tensor(starts).double())[0]
            before = columns.get("prev_logprobs", columns["generation_logprobs"])
            rows.append(torch.stack([places, before[0].double(), columns["advantages"][0].double()]))
        valid = [MaskedTokens.from_batch(bin.batch.tokens.shape, bin.batch.loss_inputs(), 1, 1).valid for bin in bins]
        tokens = self.gather_over_data(torch.cat([row[:, its] for row, its in zip(rows, valid, strict=True)], 1))
        seed = self.seed + 1_000_003 * self.scheduler.num_steps + number
        chosen = next(iter(markings)).choose(tokens[0], tokens[1], tokens[2], seed)
        for bin, row in zip(bins, rows, strict=True):
            bin.batch.columns["covariance_marks"] = torch.isin(row[:1], chosen).float()

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

    def offload(self) -> None:
        super().offload()
        if self.critic is not None:
            self.critic.offload()

    def onload(self) -> None:
        super().onload()
        if self.critic is not None:
            self.critic.onload()

    def start_save(self, folder: str | Path, optimizer: bool = True) -> None:
        """Start a save of policy and critic: see `Policy.start_save`."""
        super().start_save(folder, optimizer)
        if self.critic is not None:
            self.critic.start_save(Path(folder) / CRITIC, optimizer)

    def is_saved(self, wait: bool) -> bool:
        saved = super().is_saved(wait)
        return (self.critic is None or self.critic.is_saved(wait)) and saved

    def load(self, folder: str | Path) -> bool:
        """Load what `start_save` wrote. Raises CheckpointError, also for one without the critic that this run has."""
        if self.critic is not None and not (Path(folder) / CRITIC).is_dir():
            raise CheckpointError(f"{folder} holds no critic, which this run trains: remove the section ppo")
        with_optimizer = super().load(folder)
        return (self.critic is None or self.critic.load(Path(folder) / CRITIC)) and with_optimizer

    def shutdown(self) -> None:
        self._sender.close_refit()
        if self.critic is not None:
            self.critic.shutdown()
        super().shutdown()


def _routes(trajectory: Trajectory) -> Tensor:
    if trajectory.routed_experts is None:
        raise ValueError(f"policy.router_replay: the engine recorded no experts of sample {trajectory.name}")
    return trajectory.routed_experts
