"""Validation: generate on held-out prompts, score, average, and keep some samples to look at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mcore.algorithms.engine_group import EngineGroup
from grpo_mcore.algorithms.rollouts import Rollouts, sampling_of
from grpo_mcore.cluster import Worker
from grpo_mcore.rollout.group import Group


@dataclass(frozen=True)
class ShownSample:
    """A validation sample as a person reads it."""

    uid: str
    prompt: str
    response: str
    truth: str
    answer: str | None
    reward: float | None
    reason: str


@dataclass(frozen=True)
class Validation:
    """`metrics`: accuracy (share of scored samples with reward 1), reward, lengths, and per task `TASK/accuracy`; None
    where no sample was scored."""

    metrics: dict[str, float | None]
    samples: list[ShownSample]


def run_validation(
    engines: EngineGroup,
    dataloader: Any,
    environments: Mapping[str, Worker],
    config: Any,
    *,
    eos_token_id: int,
) -> Validation:
    """Up to grpo.max_val_samples prompts, val_num_generations_per_prompt samples each; the engines must be ready.

    The seeds do not depend on the step: two validations of equal weights give equal samples.
    """
    grpo = config.grpo
    sampling = sampling_of(config.policy.generation, eos_token_id, validation=True)
    rollouts = Rollouts(engines, environments, seed=grpo.seed + 1)
    groups: list[Group] = []
    left = grpo.max_val_samples
    for batch in dataloader:
        prompts = batch if left is None else batch[:left]
        rollouts.dispatch(prompts, sampling, generations=grpo.val_num_generations_per_prompt, step=0)
        groups += [rollouts.next_group() for _ in prompts]
        if left is not None:
            left -= len(prompts)
            if left <= 0:
                break
    shown = sorted(groups, key=lambda group: group.uid)[: config.logger.num_val_samples_to_print]
    return Validation(_metrics(groups), [_shown(engines, group) for group in shown])


def _metrics(groups: list[Group]) -> dict[str, float | None]:
    metrics = _scores(groups)
    by_task: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.prompt["task_name"]].append(group)
    if len(by_task) > 1:
        for task, members in by_task.items():
            metrics |= {f"{task}/{name}": value for name, value in _scores(members).items()}
    return metrics


def _scores(groups: list[Group]) -> dict[str, float | None]:
    rewards = [score.reward for group in groups for score in group.scores]
    scored = [reward for reward in rewards if reward is not None]
    samples = [sample for group in groups for sample in group.samples]
    metrics: dict[str, float | None] = {
        "accuracy": sum(reward == 1.0 for reward in scored) / len(scored) if scored else None,
        "reward": sum(scored) / len(scored) if scored else None,
        "num_samples": float(len(samples)),
        "num_failed_samples": float(len(rewards) - len(scored)),
        "generated_length": sum(sample.generated_length for sample in samples) / len(samples),
        "truncation_rate": sum(sample.truncated for sample in samples) / len(samples),
    }
    generations = len(groups[0].samples)
    if generations > 1:
        solved = [any(score.reward == 1.0 for score in group.scores) for group in groups if group.failure is None]
        metrics[f"pass@{generations}"] = sum(solved) / len(solved) if solved else None
    return metrics


def _shown(engines: EngineGroup, group: Group) -> ShownSample:
    trajectory, score = engines.cluster.fetch(group.samples[0].ref), group.scores[0]
    return ShownSample(
        uid=group.uid,
        prompt="".join(turn.text for turn in trajectory.turns if not turn.loss_mask),
        response=trajectory.generated_text,
        truth=str(group.prompt["extra_env_info"].get("ground_truth")),
        answer=score.answer,
        reward=score.reward,
        reason=score.reason,
    )
