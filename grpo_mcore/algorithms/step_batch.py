"""From scored groups to what every policy rank computes: rewards, advantages, masks, bins. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_mcore.algorithms.policy_worker import RankStep, TrainSample
from grpo_mcore.batching.plan import StepPlan, plan_step
from grpo_mcore.objective import clip_advantages, group_index, grpo_advantages, overlong_filter, scale_reward_values
from grpo_mcore.parallel.mesh import Layout
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import TrajectoryRef


@dataclass(frozen=True)
class StepBatch:
    """`ranks`: by data-parallel rank; empty where too few samples are left for one each. `metrics`: of the rollouts and
    the plan."""

    ranks: tuple[RankStep, ...]
    metrics: dict[str, float]
    tokens: int  # of all samples trained on, prompts included


def build_step_batch(groups: Sequence[Group], config: Any, layout: Layout) -> StepBatch:
    """`config`: the whole recipe. Samples without a reward, and filtered ones, take no part but are counted.

    Fewer samples than the recipe's batches need make fewer optimizer steps. Raises PackingError where one is longer
    than a bin.
    """
    samples = [sample for group in groups for sample in group.samples]
    scores = [score for group in groups for score in group.scores]
    rewards = torch.tensor([float("nan") if s.reward is None else s.reward for s in scores], dtype=torch.float64)
    scored = ~rewards.isnan()
    advantages = _advantages(rewards, groups, scored, config.grpo)
    kept = scored.clone()
    if config.grpo.overlong_filtering:
        kept = overlong_filter(kept, torch.tensor([sample.truncated for sample in samples]))
    used = [i for i in range(len(samples)) if kept[i] and samples[i].generated_length]
    metrics = _rollout_metrics(samples, rewards, advantages, kept)
    possible = min(optimizer_steps(config), len(used) // layout.data)
    if not possible:
        return StepBatch((), metrics, 0)
    plan, ranks = rank_steps(
        [TrainSample(samples[i].ref, advantages[i].item()) for i in used],
        [samples[i].length for i in used],
        [samples[i].generated_length for i in used],
        config,
        layout,
        optimizer_steps=possible,
    )
    metrics |= {f"plan/{name}": value for name, value in plan.report().items()}
    return StepBatch(ranks, metrics, sum(samples[i].length for i in used))


def optimizer_steps(config: Any) -> int:
    """Optimizer steps of one step."""
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    return max(1, samples // config.policy.train_global_batch_size)


def _advantages(rewards: torch.Tensor, groups: Sequence[Group], scored: torch.Tensor, grpo: Any) -> torch.Tensor:
    scaling = grpo.reward_scaling
    if scaling.enabled:
        rewards = scale_reward_values(
            rewards,
            source_min=scaling.source_min,
            source_max=scaling.source_max,
            target_min=scaling.target_min,
            target_max=scaling.target_max,
        )
    found = grpo_advantages(
        rewards,
        group_index([group.uid for group in groups for _ in group.samples]),
        scored,
        normalize=grpo.normalize_rewards,
        leave_one_out=grpo.use_leave_one_out_baseline,
    )
    return clip_advantages(found.advantages, grpo.advantage_clip_low, grpo.advantage_clip_high)


def rank_steps(
    samples: Sequence[TrainSample],
    lengths: Sequence[int],
    trained_tokens: Sequence[int],
    config: Any,
    layout: Layout,
    *,
    optimizer_steps: int,
) -> tuple[StepPlan, tuple[RankStep, ...]]:
    """Deals samples of these lengths to optimizer steps, data-parallel ranks and bins, as the recipe packs them.

    `trained_tokens`: how many tokens of each sample the loss counts.
    """
    packing = config.policy.sequence_packing
    plan = plan_step(
        lengths,
        dp=layout.data,
        optimizer_steps=optimizer_steps,
        capacity=packing.train_mb_tokens if packing.enabled else None,
        algorithm=packing.algorithm,
        micro_batch_size=None if packing.enabled else config.policy.train_micro_batch_size,
        seed=config.grpo.seed,
    )
    steps = tuple(
        RankStep(
            batches=tuple(tuple(tuple(samples[i] for i in bin) for bin in bins) for bins in plan.for_rank(rank)),
            valid_seqs=tuple(len(batch.samples) for batch in plan.batches),
            valid_toks=tuple(sum(trained_tokens[i] for i in batch.samples) for batch in plan.batches),
        )
        for rank in range(plan.dp)
    )
    return plan, steps


def _rollout_metrics(
    samples: Sequence[TrajectoryRef], rewards: torch.Tensor, advantages: torch.Tensor, kept: torch.Tensor
) -> dict[str, float]:
    scored = rewards[~rewards.isnan()]
    generated = torch.tensor([sample.generated_length for sample in samples], dtype=torch.float64)
    used = advantages[kept]
    return {
        "reward": scored.mean().item(),
        "accuracy": (scored == 1.0).double().mean().item(),
        "reward_std": scored.std(correction=0).item(),
        "num_samples": float(len(samples)),
        "num_failed_samples": float(len(samples) - len(scored)),
        "num_trained_samples": float(kept.sum()),
        "prompt_length": sum(sample.prompt_length for sample in samples) / len(samples),
        "generated_length": generated.mean().item(),
        "generated_length_max": generated.max().item(),
        "truncation_rate": sum(sample.truncated for sample in samples) / len(samples),
        "advantage_max": used.max().item() if len(used) else 0.0,
        "advantage_min": used.min().item() if len(used) else 0.0,
        "zero_advantage_rate": (used == 0).double().mean().item() if len(used) else 1.0,
    }
