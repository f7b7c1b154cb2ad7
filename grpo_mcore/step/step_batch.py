"""From scored groups to the samples of every policy rank: rewards, filters, bins. Pure functions.

The driver first sends the ranks their samples, later the targets of these. Samples are known by their index in the
step, so that each value of all samples travels as one tensor.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_mcore.batching.packing import PADDED, bin_room
from grpo_mcore.batching.plan import StepPlan, branch_runs, plan_alone, plan_step
from grpo_mcore.batching.prefix_trees import Prefixes, computed_tokens, in_blocks, prefixes_of, saves_enough
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.objective import AdvantageEstimate, clip_advantages, overlong_filter
from grpo_mcore.recipe import (
    Algorithm,
    MasterConfig,
    bin_tokens,
    has_greedy_baseline,
    reads_whole_samples,
    samples_together,
)
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Score, TrajectoryRef
from grpo_mcore.rollout.workers import Ref


@dataclass(frozen=True)
class SamplePart:
    """Branches `first` to `end` - 1 of a sample that is longer than a bin."""

    sample: int
    first: int
    end: int


@dataclass(frozen=True)
class RankStep:
    """The samples of one data-parallel rank."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Sample indices by optimizer step and bin, and numbers of `parts`."""
    trajectories: Mapping[int, Ref]
    """Sample index -> reference to its trajectory in the object store."""
    shares_prefixes: bool = False
    """Samples of a bin that begin alike share what is computed of their prefixes: the bins are planned for it."""
    teacher: Mapping[int, Ref] = field(default_factory=dict)
    """Sample index -> reference to what its teacher says of its trained tokens: log-probs, float32 [trained tokens], or
    hidden states, [trained tokens, hidden size]; empty without teachers."""
    prompts: Mapping[int, Tensor] = field(default_factory=dict)
    """Sample index -> the prompt that takes the place of its own, int64 [n], where a teacher gets a hint."""
    parts: Mapping[int, SamplePart] = field(default_factory=dict)
    """The parts of samples longer than a bin, by numbers that are no index of a sample."""
    images: Mapping[str, Ref] = field(default_factory=dict)
    """Digest -> reference to the bytes of an image of its samples."""

    def samples_of(self, step: int) -> set[int]:
        """Return the indices of the samples of an optimizer step of which this rank has at least a part."""
        numbers = {number for bin in self.batches[step] for number in bin}
        return {self.parts[number].sample if number in self.parts else number for number in numbers}


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
    epochs: int = 1
    """Passes of the policy over the optimizer steps."""
    critic_epochs: int = 1
    """Passes of the critic."""
    by_token: tuple[float, float] | None = None
    """(mean, scale) of a step with a critic: the advantage of a token is (that of its column `gae` - mean) x scale."""
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
    turn_credits: Tensor | None = None
    """[samples, turns]: added to the advantages of the tokens of each generated turn, with its weight. None: nothing
    is."""
    estimate: AdvantageEstimate | None = None
    """How the advantages came about, for the files of samples. The ranks do without it."""
    reference_sums: Tensor | None = None
    """Log-prob of each sample's trained tokens under the reference, if the loss needs it by sample."""

    def sample_advantages(self) -> Tensor | None:
        """Return the mean advantage of each sample's tokens, within the bounds and without the credit by turn; None for
        a loss without advantages."""
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
    too_long: int = 0
    """Samples that are left out because they are longer than a bin, and the loss reads a sample's tokens at once."""
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
    of `PolicyGroup`. Raises PackingError for a branch that is longer than a bin.
    """
    samples = [sample for group in groups for sample in group.samples]
    scores = [score for group in groups for score in group.scores]
    rewards = torch.tensor([float("nan") if s.reward is None else s.reward for s in scores], dtype=torch.float64)
    generated = torch.tensor([bool(sample.generated_length) for sample in samples])
    room = _room_of_bin(config) if reads_whole_samples(config) else None
    too_long = torch.tensor([room is not None and bool(s.branches) and s.length > room for s in samples])
    too_long &= generated & ~rewards.isnan()
    generated &= ~too_long
    weights = (~rewards.isnan() & generated).to(torch.float64)
    if config.grpo.overlong_filtering:
        weights = overlong_filter(weights, torch.tensor([sample.truncated for sample in samples]))
    if has_greedy_baseline(config):
        weights *= torch.tensor([float(sample.generation_index > 0) for sample in samples])
    # With the KL in the reward a filtered sample still counts in its group's baseline, which needs its KL.
    processed = ~rewards.isnan() & generated if config.loss_fn.use_kl_in_reward else weights > 0
    used = processed.nonzero().flatten().tolist()
    possible = min(optimizer_steps(config), len(used) // layout.data)
    if not possible:
        return StepBatch(tuple(groups), rewards, weights, (), (), {}, int(too_long.sum()))
    plan, ranks = rank_steps(
        {i: samples[i].ref for i in used},
        [samples[i].length for i in used],
        config,
        layout,
        optimizer_steps=possible,
        branches=[samples[i].branches for i in used],
        prefixes=prompt_prefixes([samples[i] for i in used]) if shares_prefixes else None,
        images=[samples[i].images for i in used],
    )
    batches = tuple(tuple(sorted(set().union(*(rank.samples_of(k) for rank in ranks)))) for k in range(possible))
    plan_metrics = {f"plan/{name}": value for name, value in plan.report().items()}
    return StepBatch(tuple(groups), rewards, weights, ranks, batches, plan_metrics, int(too_long.sum()))


def prompt_prefixes(samples: Sequence[TrajectoryRef]) -> list[Prefixes]:
    """Return the prefixes of the samples' prompts, one object for all samples of a prompt."""
    sketches = {(sample.prompt_sketch, sample.prompt_length) for sample in samples}
    known = {sketch: prefixes_of(*sketch) for sketch in sketches}
    return [known[sample.prompt_sketch, sample.prompt_length] for sample in samples]


def optimizer_steps(config: MasterConfig) -> int:
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
    branches: Sequence[Sequence[int]] | None = None,
    images: Sequence[Mapping[str, Ref]] = (),
) -> tuple[StepPlan, tuple[RankStep, ...]]:
    """Distribute samples over optimizer steps, data-parallel ranks and bins, as the recipe packs them.

    `trajectories`: sample index -> reference in the object store; `lengths`: tokens of each, in the same order.
    `algorithm`: pairs, two samples in a row, are planned as one of their joint length. The plan refers to samples
    (or pairs) by their position in that order, the rank steps by sample index. `prefixes`: those of each sample, if
    samples may share them; the answers of a pair then count their prompt once. `branches`: tokens of each branch of
    each sample, none for a sample that is one: a sample longer than a bin is cut into parts between them, which the
    plan counts as samples, and which may go to several bins and ranks. `images`: by digest, references to those of each
    sample; empty if no sample has any.
    """
    packing, dynamic = config.policy.sequence_packing, config.policy.dynamic_batching
    index, together = list(trajectories), samples_together(config, algorithm)
    capacity, block = bin_tokens(config, algorithm), packing.shared_prefix.min_tokens
    if config.policy.deterministic:
        prefixes = None
    if prefixes is not None:
        prefixes = [in_blocks(of_sample, block) for of_sample in prefixes]

    def samples(positions: Iterable[int]) -> tuple[int, ...]:
        return tuple(number for position in positions for number in numbers[position])

    together_at = [slice(i, i + together) for i in range(0, len(lengths), together)]
    numbers, sizes = [tuple(index[part]) for part in together_at], [sum(lengths[part]) for part in together_at]
    pairs_share = False
    if together > 1 and prefixes is not None:
        computed = [computed_tokens(lengths[part], prefixes[part], block) for part in together_at]
        pairs_share = saves_enough(sum(computed), sum(sizes))
        sizes, prefixes = computed if pairs_share else sizes, None
    parts, owners = dict[int, SamplePart](), None
    if branches is not None and (room := _room_of_bin(config)) is not None:
        numbers, sizes, hashes, owners = _cut_at_branches(index, sizes, branches, prefixes, room, parts)
        prefixes = None if prefixes is None else hashes
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
            owners=owners,
        )
    of_sample = dict(zip(index, images, strict=True)) if images else {}

    def rank_step(rank: int) -> RankStep:
        planned = samples(plan.samples_of(rank))
        held = [parts[number].sample if number in parts else number for number in planned]
        return RankStep(
            batches=tuple(tuple(samples(bin) for bin in bins) for bins in plan.for_rank(rank)),
            trajectories={i: trajectories[i] for i in held},
            shares_prefixes=pairs_share or plan.shares_prefixes,
            parts={number: parts[number] for number in planned if number in parts},
            images={digest: ref for i in held for digest, ref in of_sample.get(i, {}).items()},
        )

    return plan, tuple(map(rank_step, range(plan.dp)))


def _room_of_bin(config: MasterConfig) -> int | None:
    """Return the tokens that a bin of samples may hold; None where each sample is computed whole."""
    capacity, dynamic = bin_tokens(config, "grpo"), config.policy.dynamic_batching
    if capacity is None or config.policy.deterministic:
        return None
    return bin_room(capacity, dynamic.sequence_length_round if dynamic.enabled else 1)


def _cut_at_branches(
    index: Sequence[int],
    sizes: Sequence[int],
    branches: Sequence[Sequence[int]],
    prefixes: Sequence[Prefixes] | None,
    room: int,
    parts: dict[int, SamplePart],
) -> tuple[list[tuple[int, ...]], list[int], list[Prefixes], list[int]]:
    """Return numbers, tokens, prefixes and owners (`plan_step`) of the samples that fit into a bin and of the parts of
    those that do not; add these to `parts`. Of a sample's parts the planner knows only the prompt of the first."""
    planned: list[tuple[tuple[int, ...], int, Prefixes, int]] = []
    for owner, (sample, tokens, of_sample) in enumerate(zip(index, sizes, branches, strict=True)):
        prompt = prefixes[owner] if prefixes is not None else ()
        if tokens <= room or not of_sample:
            planned.append(((sample,), tokens, prompt, owner))
            continue
        for first, end in branch_runs(of_sample, room):
            number = max(index) + 1 + len(parts)
            parts[number] = SamplePart(sample, first, end)
            planned.append(((number,), sum(of_sample[first:end]), () if first else prompt, owner))
    numbers, tokens_of, hashes, owners = zip(*planned, strict=True)
    return list(numbers), list(tokens_of), list(hashes), list(owners)
