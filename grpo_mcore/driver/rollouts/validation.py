"""Validation: generate on held-out prompts, score, average, and keep some samples to show."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_mcore.data import DataError, DatumSpec
from grpo_mcore.driver.engines.sampling_config import sampling_of, turn_limits
from grpo_mcore.driver.interfaces import GenerationInterface
from grpo_mcore.driver.rollouts.rollouts import RolloutHooks, Rollouts
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.objective import pass_at_k, pass_numbers
from grpo_mcore.observe import ShownSample
from grpo_mcore.recipe import GRPOConfig, MasterConfig, Problem, RecipeError
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.pass_rates import rewards_by_column
from grpo_mcore.rollout.trajectory import Sampling, accuracy, mean_parts


@dataclass(frozen=True)
class Validation:
    """`metrics`: accuracy (share of scored samples that are solved), reward and its named parts, lengths; with several
    samples a prompt also `pass@k`; with several validation sets also all of these for each, as `TASK/accuracy`. A
    metric is None if too few samples were scored; accuracy and pass@k also where rewards are graded. `samples`:
    those to show. `seconds`: duration of the validation."""

    metrics: dict[str, float | None]
    samples: list[ShownSample]
    seconds: float
    groups: Sequence[Group] = ()


class GroupSource(Protocol):
    """Gives scored groups of the prompts that it gets: `Rollouts`, or what takes its place."""

    def dispatch(self, prompts: Sequence[DatumSpec], sampling: Sampling, *, generations: int, step: int) -> None: ...
    def next_group(self) -> Group: ...


def run_validation(
    engines: GenerationInterface,
    dataloader: Any,
    environments: Mapping[str, EnvironmentWorker],
    config: MasterConfig,
    *,
    tokenizer: Any,
    hooks: RolloutHooks | None = None,
    rollouts: GroupSource | None = None,
) -> Validation:
    """Validate on up to grpo.max_val_samples prompts, val_num_generations_per_prompt samples each. The engines must be
    ready.

    `hooks`: functions that the rollouts call. The seeds do not depend on the step: two validations of equal weights
    give equal samples. `rollouts`: takes the place of engines and environments, such as recorded samples. Raises
    DataError if the data loader yields nothing, ValueError without validation data or environments.
    """
    if dataloader is None or not (environments or rollouts):
        raise ValueError("there is nothing to validate on: set data.validation, or grpo.val_period to 0")
    clock, grpo = engines.cluster.clock, config.grpo
    started_at = clock.now()
    sampling = sampling_of(config.policy.generation, tokenizer, validation=True)
    rollouts = rollouts or Rollouts(
        engines, environments, tokenizer, turn_limits(config), seed=grpo.seed + 1, hooks=hooks or RolloutHooks()
    )
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
    if not groups:
        raise DataError("there is no validation prompt: check data.validation, or set grpo.val_period to 0")
    samples = [_shown(engines, group) for group in shown]
    metrics = validation_metrics(groups) | rewards_by_column(groups, config.logger.metrics_by)
    return Validation(metrics, samples, clock.now() - started_at, groups)


def stop_reason(metrics: Mapping[str, float | None], grpo: GRPOConfig) -> str | None:
    """Return why the run ends after a validation with these metrics: grpo.stop_at_validation_metric has reached its
    threshold. None if it has not. Raises RecipeError for an unknown metric."""
    if grpo.stop_at_validation_metric is None or grpo.stop_at_validation_threshold is None:
        return None
    name, threshold = grpo.stop_at_validation_metric.removeprefix("val:"), grpo.stop_at_validation_threshold
    if name not in metrics:
        message = f"there is no validation metric {name!r}; known: {', '.join(metrics)}"
        raise RecipeError([Problem("", "grpo.stop_at_validation_metric", message)])
    value = metrics[name]
    return None if value is None or value < threshold else f"validation {name} {value:.4g} has reached {threshold:g}"


def validation_metrics(groups: list[Group]) -> dict[str, float | None]:
    """Return the metrics described in Validation. There must be at least one group."""
    metrics = _scores(groups)
    by_task: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.prompt["task_name"]].append(group)
    if len(by_task) > 1:
        for task, members in by_task.items():
            metrics |= {f"{task}/{name}": value for name, value in _scores(members).items()}
    return metrics


def _scores(groups: list[Group]) -> dict[str, float | None]:
    scores = [score for group in groups for score in group.scores]
    scored = [score.reward for score in scores if score.reward is not None]
    samples = [sample for group in groups for sample in group.samples]
    metrics: dict[str, float | None] = {
        "accuracy": accuracy(scores),
        "reward": sum(scored) / len(scored) if scored else None,
        **mean_parts(scores),
        "num_samples": float(len(samples)),
        "num_failed_samples": float(len(scores) - len(scored)),
        "generated_length": sum(sample.generated_length for sample in samples) / len(samples),
        "truncation_rate": sum(sample.truncated for sample in samples) / len(samples),
    }
    generations = len(groups[0].samples)
    if generations > 1:
        solved = [[bool(score.solved) for score in group.scores if score.reward is not None] for group in groups]
        graded = metrics["accuracy"] is None
        metrics |= {f"pass@{k}": None if graded else pass_at_k(solved, k) for k in pass_numbers(generations)}
    return metrics


def _shown(engines: GenerationInterface, group: Group) -> ShownSample:
    reference, score = group.samples[0].ref, group.scores[0]
    turns = engines.cluster.store.fetch(reference).turns if reference is not None else ()  # None: its rollout failed
    first = next((i for i, turn in enumerate(turns) if turn.loss_mask), len(turns))
    return ShownSample(
        uid=group.uid,
        prompt="".join(turn.text for turn in turns[:first]),
        response="".join(turn.text for turn in turns[first:]),
        truth=str(group.prompt["extra_env_info"].get("ground_truth")),
        answer=score.answer,
        reward=score.reward,
        reason=score.reason,
    )
