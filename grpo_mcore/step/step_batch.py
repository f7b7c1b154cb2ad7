"""From scored groups to the samples of every policy rank: rewards, filters, bins. Pure functions.

The driver first sends the ranks their samples, later the targets of these. Samples are known by their index in the
step, so that each value of all samples travels as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_mcore.batching.packing import PADDED
from grpo_mcore.batching.plan import StepPlan, plan_alone, plan_step
from grpo_mcore.batching.prefix_trees import Prefixes, computed_tokens, in_blocks, prefixes_of, saves_enough
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.objective import AdvantageEstimate, clip_advantages, overlong_filter
from grpo_mcore.recipe import Algorithm, MasterConfig, bin_tokens, samples_together
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, TrajectoryRef
from grpo_mcore.rollout.workers import Ref


@dataclass(frozen=True)
class RankStep:
    """The samples of one data-parallel rank."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Sample indices by optimizer step and bin."""
    trajectories: Mapping[int, Ref]
    """Sample index -> reference to its trajectory in the object store."""
    shares_prefixes: bool = False
    """Samples of a bin that begin alike share what is computed of their prefixes: the bins are planned for it."""
    teacher: Mapping[int, Ref] = field(default_factory=dict)
    """Sample index -> reference to what its teacher says of its trained tokens: log-probs, float32 [trained tokens], or
    hidden states, [trained tokens, hidden size]; empty without teachers."""
    prompts: Mapping[int, Tensor] = field(default_factory=dict)
    """Sample index -> the prompt that takes the place of its own, int64 [n], where a teacher gets a hint."""


@dataclass(frozen=True)
class TrainTargets:
    """Targets of a step, the same for every rank. Tensors are float64 [samples of the step], by sample index."""

    weights: Tensor
    """1 if the sample counts in the loss, 0 if it is masked."""
    valid_seqs: tuple[int, ...]
    """Samples that count, over all ranks, by optimizer step."""
    valid_toks: tuple[int, ...]
    """Trained tokens of these, by optimizer step."""
    advantages: Tensor | None = None
    kl_weight: float = 0.0
    """The advantage of token t is its sample's, minus this weight times the KL from t to the end of the sample."""
    clip: tuple[float | None, float | None] = (None, None)
    """Bounds of a token's advantage."""
    teacher_weight: float = 0.0
    """Weight of the teacher's log-prob minus the policy's, added to the advantage of a token."""
    teacher_gaps: Tensor | None = None
    """Mean over each sample's trained tokens of the teacher's log-prob minus the policy's; None without teachers."""
    rewards: Tensor | None = None
    """Rewards of the environment, if a term of the loss needs them."""
    flag_advantages: Mapping[str, float] = field(default_factory=dict)
    """Advantages of the tokens of flagged turns, by flag, in place of their sample's."""
    estimate: AdvantageEstimate | None = None
    """How the advantages came about, for the files of samples. The ranks do without it."""
    reference_sums: Tensor | None = None
    """Log-prob of each sample's trained tokens under the reference, if the loss needs it by sample."""

    def sample_advantages(self) -> Tensor | None:
        """Return the mean advantage of each sample's tokens, within the bounds; None for a loss without advantages."""
        if self.advantages is None:
            return None
        gaps = 0.0 if self.teacher_gaps is None else self.teacher_weight * self.teacher_gaps
        return clip_advantages(self.advantages + gaps, *self.clip)


@dataclass(frozen=True)
class StepBatch:
    """The samples of a step and how they are distributed. Tensors are [samples], by sample index."""

    groups: tuple[Group, ...]
    rewards: Tensor
    """float64: rewards of the environment, NaN for a failed sample."""
    weights: Tensor
    """float64: 1 if a sample counts in the loss, 0 if it failed, is empty or is filtered."""
    ranks: tuple[RankStep, ...]
    """By data-parallel rank; empty if fewer samples are left than ranks."""
    batches: tuple[tuple[int, ...], ...]
    """Sample indices of each optimizer step, over all ranks."""
    plan_metrics: dict[str, float]
    teachers: tuple[str, ...] = ()
    """Alias of each sample's teacher; empty without teachers."""

    @property
    def samples(self) -> list[TrajectoryRef]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def scores(self) -> list[Score]:
        return [score for group in self.groups for score in group.scores]

    @property
    def trained_tokens(self) -> Tensor:
        """int64: generated tokens of each sample, which the loss counts."""
        return torch.tensor([sample.generated_length for sample in self.samples], dtype=torch.int64)

    @property
    def tokens(self) -> int:
        """Tokens of all samples that the ranks process, prompts included."""
        samples = self.samples
        return sum(samples[i].length for indices in self.batches for i in indices)


def build_step_batch(
    groups: Sequence[Group], config: MasterConfig, layout: PolicyLayout, *, shares_prefixes: bool = False
) -> StepBatch:
    """Build a step from scored groups, without failed and filtered samples.

    If fewer samples are left than the recipe's batches need, there are fewer optimizer steps. `shares_prefixes`: those
    of `PolicyGroup`. Raises PackingError for a sample that is longer than a bin.
    """
    samples = [sample for group in groups for sample in group.samples]
    scores = [score for group in groups for score in group.scores]
    rewards = torch.tensor([float("nan") if s.reward is None else s.reward for s in scores], dtype=torch.float64)
    generated = torch.tensor([bool(sample.generated_length) for sample in samples])
    weights = (~rewards.isnan() & generated).to(torch.float64)
    if config.grpo.overlong_filtering:
        weights = overlong_filter(weights, torch.tensor([sample.truncated for sample in samples]))
    # With the KL in the reward a filtered sample still counts in its group's baseline, which needs its KL.
    processed = ~rewards.isnan() & generated if config.loss_fn.use_kl_in_reward else weights > 0
    used = processed.nonzero().flatten().tolist()
    possible = min(optimizer_steps(config), len(used) // layout.data)
    if not possible:
        return StepBatch(tuple(groups), rewards, weights, (), (), {})
    plan, ranks = rank_steps(
        {i: samples[i].ref for i in used},
        [samples[i].length for i in used],
        config,
        layout,
        optimizer_steps=possible,
        prefixes=prompt_prefixes([samples[i] for i in used]) if shares_prefixes else None,
    )
    batches = tuple(tuple(used[i] for i in batch.samples) for batch in plan.batches)
    plan_metrics = {f"plan/{name}": value for name, value in plan.report().items()}
    return StepBatch(tuple(groups), rewards, weights, ranks, batches, plan_metrics)


def prompt_prefixes(samples: Sequence[TrajectoryRef]) -> list[Prefixes]:
    """Return the prefixes of the samples' prompts, one object for all samples of a prompt."""
    sketches = {(sample.prompt_sketch, sample.prompt_length) for sample in samples}
    known = {sketch: prefixes_of(*sketch) for sketch in sketches}
    return [known[sample.prompt_sketch, sample.prompt_length] for sample in samples]


def optimizer_steps(config: MasterConfig) -> int:
    """Return the number of optimizer steps in a step."""
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    return max(1, samples // config.policy.train_global_batch_size)


def rank_steps(
    trajectories: dict[int, Ref],
    lengths: Sequence[int],
    config: MasterConfig,
    layout: PolicyLayout,
    *,
    optimizer_steps: int,
    algorithm: Algorithm = "grpo",
    prefixes: Sequence[Prefixes] | None = None,
) -> tuple[StepPlan, tuple[RankStep, ...]]:
    """Distribute samples over optimizer steps, data-parallel ranks and bins, as the recipe packs them.

    `trajectories`: sample index -> reference in the object store; `lengths`: tokens of each, in the same order.
    `algorithm`: DPO's pairs, two samples in a row, are planned as one of their joint length. The plan refers to samples
    (or pairs) by their position in that order, the rank steps by sample index. `prefixes`: those of each sample, if
    samples may share them; the answers of a pair then count their prompt once.
    """
    packing, dynamic = config.policy.sequence_packing, config.policy.dynamic_batching
    index, together = list(trajectories), samples_together(algorithm)
    capacity, block = bin_tokens(config, algorithm), packing.shared_prefix.min_tokens
    if config.policy.deterministic:
        prefixes = None
    if prefixes is not None:
        prefixes = [in_blocks(of_sample, block) for of_sample in prefixes]

    def samples(positions: Iterable[int]) -> tuple[int, ...]:
        return tuple(index[i] for first in positions for i in range(together * first, together * (first + 1)))

    together_at = [slice(i, i + together) for i in range(0, len(lengths), together)]
    sizes = [sum(lengths[part]) for part in together_at]
    pairs_share = False
    if together > 1 and prefixes is not None:
        computed = [computed_tokens(lengths[part], prefixes[part], block) for part in together_at]
        pairs_share = saves_enough(sum(computed), sum(sizes))
        sizes, prefixes = computed if pairs_share else sizes, None
    if config.policy.deterministic:
        plan = plan_alone(sizes, dp=layout.data, optimizer_steps=optimizer_steps)
    else:
        plan = plan_step(
            sizes,
            dp=layout.data,
            optimizer_steps=optimizer_steps,
            capacity=capacity,
            algorithm=PADDED if dynamic.enabled else packing.algorithm,
            multiple=dynamic.sequence_length_round if dynamic.enabled else 1,
            micro_batch_size=None if capacity else config.policy.train_micro_batch_size,
            prefixes=prefixes,
            block=block,
            seed=config.grpo.seed,
        )
    steps = tuple(
        RankStep(
            batches=tuple(tuple(samples(bin) for bin in bins) for bins in plan.for_rank(rank)),
            trajectories={i: trajectories[i] for i in samples(plan.samples_of(rank))},
            shares_prefixes=pairs_share or plan.shares_prefixes,
        )
        for rank in range(plan.dp)
    )
    return plan, steps
