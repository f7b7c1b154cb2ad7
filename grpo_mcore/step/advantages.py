"""Turn a step's rewards into advantages, and decide which samples count in the loss. Pure functions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from grpo_mcore.objective import (
    EPS,
    AdvantageEstimate,
    SampleKL,
    StepSamples,
    custom_advantages,
    custom_shaping,
    difference_credit,
    distillation_metrics,
    estimate_advantages,
    gae_moments,
    gigpo_credit,
    group_index,
    group_stats,
    scale_reward_values,
    shape_rewards,
)
from grpo_mcore.recipe import MasterConfig, RewardScalingConfig, has_greedy_baseline, reward_weights, teacher_weight
from grpo_mcore.rollout.trajectory import INVALID_TOOL_CALL, MALFORMED_THINKING, Score, accuracy, mean_parts
from grpo_mcore.step.step_batch import StepBatch, TrainTargets

Stats = Mapping[str, Tensor]
T = TypeVar("T")


class TargetsError(ValueError):
    """Rewards or log-probs that cannot be trained on; the message says what to check."""


def compute_targets(
    batch: StepBatch, stats: Stats, config: MasterConfig, rewards: Tensor | None = None
) -> tuple[TrainTargets, dict[str, float]]:
    """Return the TrainTargets and the metrics of a step. `stats`: results of the log-prob passes, float64 [samples]
    each, see objective.sample_stats; empty if no pass was run. `rewards`: `shaped_rewards`, where they are known.

    Raises TargetsError if the estimator needs rewards that the environments do not give, and if engine and policy
    disagree on every sample.
    """
    grpo, loss = config.grpo, config.loss_fn
    if teacher_weight(config) and batch.ranks and not batch.teachers:
        raise TargetsError("grpo.adv_estimator reads a teacher's log-probs, but the policy has no teachers: start them")
    weights, metrics = _mask_mismatched(batch, stats, grpo.seq_logprob_error_threshold)
    rewards = shaped_rewards(batch.rewards, batch, config) if rewards is None else rewards
    estimator, first = grpo.adv_estimator, torch.tensor([sample.generation_index == 0 for sample in batch.samples])
    kl_in_reward = loss.use_kl_in_reward and "kl_sum" in stats
    named_rewards = _named_rewards(batch, config, needed=True) if estimator.name == "gdpo" else None
    kl = SampleKL(stats["kl_sum"], stats["kl_to_go_sum"], stats["kl_to_go_square"]) if kl_in_reward else None
    penalty = loss.reference_policy_kl_penalty if kl_in_reward else 0.0
    try:
        by_token = None
        if config.ppo.enabled:
            estimate, by_token = _of_critic(rewards, weights, batch, stats, config)
        elif estimator.path is not None:
            samples = step_samples(rewards, batch, config, weights > 0, kl, penalty)
            estimate = custom_advantages(estimator.path, samples, estimator.options)
        else:
            estimate = estimate_advantages(
                "grpo" if estimator.name == "opd" else estimator.name,
                rewards,
                _group_ids(batch),
                ~rewards.isnan(),
                normalize=_first(estimator.normalize_rewards, grpo.normalize_rewards),
                leave_one_out=_first(estimator.use_leave_one_out_baseline, grpo.use_leave_one_out_baseline),
                std_of_others=estimator.std_of_others,
                minus_baseline=estimator.minus_baseline,
                rewards_by_name=named_rewards,
                reward_weights=reward_weights(config),
                tokens=batch.trained_tokens * (weights > 0),
                lengths=batch.trained_tokens,
                keep=estimator.keep or 2,
                keep_by=estimator.keep_by,
                first=first,
                kl=kl,
                kl_penalty=penalty,
            )
    except ValueError as error:
        own = f"grpo.adv_estimator {estimator.path or estimator.name}"
        raise TargetsError(f"{'ppo.adv_estimator' if config.ppo.enabled else own}: {error}") from error
    if estimator.name == "opd":
        section = config.on_policy_distillation
        weight = section.orm_advantage_weight if section.use_orm_advantage else 0.0
        estimate = replace(estimate, advantages=weight * estimate.advantages)
    clip = (grpo.advantage_clip_low, grpo.advantage_clip_high)
    seqs, toks = counts(batch.batches, weights, batch.trained_tokens)
    targets = TrainTargets(
        weights=weights,
        valid_seqs=tuple(seqs),
        valid_toks=tuple(toks),
        advantages=estimate.advantages,
        by_token=by_token,
        epochs=config.ppo.ppo_epochs if config.ppo.enabled else 1,
        critic_epochs=config.ppo.critic_epochs,
        kl_weight=estimate.kl_weight,
        turn_credits=turn_credits(batch, config) if grpo.turn_credit.weight else None,
        flag_advantages={
            flag: advantage
            for flag, advantage in (
                (INVALID_TOOL_CALL, grpo.invalid_tool_call_advantage),
                (MALFORMED_THINKING, grpo.malformed_thinking_advantage),
            )
            if advantage is not None
        },
        estimate=estimate,
        clip=clip,
        teacher_weight=teacher_weight(config) if "gap_sum" in stats else 0.0,
        teacher_gaps=stats["gap_sum"] / batch.trained_tokens.clamp(min=1) if "gap_sum" in stats else None,
        rewards=batch.rewards.nan_to_num() if loss.positive_example_nll_weight > 0 else None,
    )
    advantages = targets.sample_advantages()
    assert advantages is not None
    metrics |= _rollout_metrics(batch, weights, advantages, first & has_greedy_baseline(config))
    if targets.turn_credits is not None:
        metrics |= _turn_metrics(batch, weights, advantages, targets.turn_credits)
    metrics["num_valid_tokens"] = float(sum(toks))
    if grpo.reward_shaping.enabled or grpo.reward_scaling.enabled:
        metrics["shaped_reward"] = _mean(rewards[~rewards.isnan()])
    if kl_in_reward:
        metrics["kl_in_reward"] = _mean(stats["kl_sum"][weights > 0])
    if batch.teachers and "gap_sum" in stats:
        metrics |= _teacher_metrics(batch, stats, targets)
    elif batch.teachers:
        metrics["zero_advantage_rate"] = 0.0  # the loss reads no advantages
    return targets, metrics


def _of_critic(
    rewards: Tensor, weights: Tensor, batch: StepBatch, stats: Stats, config: MasterConfig
) -> tuple[AdvantageEstimate, tuple[float, float]]:
    """Return the mean advantage of each sample's tokens, and (mean, scale) by which the ranks normalise their tokens'.
    Raises TargetsError without a critic's values."""
    groups, zeros = group_stats(rewards, _group_ids(batch), ~rewards.isnan()), torch.zeros_like(batch.rewards)
    if not batch.ranks:
        return AdvantageEstimate(zeros, groups), (0.0, 1.0)
    if "gae_sum" not in stats:
        raise TargetsError("it reads a critic's values, and there are none of these samples")
    tokens, (mean, scale) = batch.trained_tokens * weights, (0.0, 1.0)
    if config.ppo.adv_estimator.normalize_advantages:
        mean, std = gae_moments(stats, tokens)
        scale = 1 / (std + EPS)
    of_samples = (stats["gae_sum"] / stats["tokens"].clamp(min=1) - mean) * scale
    return AdvantageEstimate(torch.where(tokens > 0, of_samples, 0.0), groups), (mean, scale)


def turn_credits(batch: StepBatch, config: MasterConfig) -> Tensor:
    """Return the weighted credit of each turn, float64 [samples, turns of the longest]; 0 for turns that a sample does
    not have, and for samples without a reward."""
    section, samples = config.grpo.turn_credit, batch.samples
    found = torch.zeros(len(samples), max(sample.turns for sample in samples), dtype=torch.float64)
    scored = [index for index, score in enumerate(batch.scores) if score.reward is not None]
    scores, turns = [batch.scores[index] for index in scored], [samples[index].turns for index in scored]
    if section.mode == "difference":
        credits = [difference_credit(score.turn_rewards, section.gamma) for score in scores]
    else:
        unknown = [[(index, turn) for turn in range(samples[index].turns)] for index in scored]
        credits = gigpo_credit(
            list(map(_rewards_of_turns, scores, turns)),
            [score.turn_states or nowhere for score, nowhere in zip(scores, unknown, strict=True)],
            [samples[index].uid for index in scored],
            section.gamma,
            normalize=_first(config.grpo.adv_estimator.normalize_rewards, config.grpo.normalize_rewards),
        )
    for index, of_sample in zip(scored, credits, strict=True):
        found[index, : len(of_sample)] = torch.tensor(of_sample, dtype=torch.float64)
    return section.weight * found


def _rewards_of_turns(score: Score, turns: int) -> list[float]:
    """Return the reward of each turn. An agent's sample has its reward for the last one."""
    return list(score.step_rewards) or [*[0.0] * (turns - 1), score.reward or 0.0][:turns]


def _turn_metrics(batch: StepBatch, weights: Tensor, advantages: Tensor, credits: Tensor) -> dict[str, float]:
    """Return the metrics of credit by turn, over the turns of the samples that count."""
    turns = torch.tensor([sample.turns for sample in batch.samples])
    counted = (torch.arange(credits.shape[1]) < turns[:, None]) & (weights > 0)[:, None]
    size, of_sample = credits[counted].abs(), advantages[:, None].expand_as(credits)[counted].abs()
    total = float((size + of_sample).sum())
    return {
        "turn_credit/mean_abs": _mean(size),
        "turn_credit/share": float(size.sum()) / total if total else 0.0,
        "turn_credit/nonzero_rate": _mean((size > 0).double()),
    }


def _teacher_metrics(batch: StepBatch, stats: Stats, targets: TrainTargets) -> dict[str, float]:
    """Return the metrics of distillation; with several teachers also the estimated KL(policy || teacher) for each."""
    assert targets.advantages is not None
    tokens, gaps = batch.trained_tokens * targets.weights, stats["gap_sum"]
    metrics = distillation_metrics(gaps, stats["gap_square"], tokens, targets.advantages, targets.teacher_weight)
    for alias in sorted(set(batch.teachers)) if len(set(batch.teachers)) > 1 else ():
        scored = torch.tensor([name == alias for name in batch.teachers]) & (tokens > 0)
        if scored.any():
            metrics[f"kl/{alias}"] = -float(gaps[scored].sum() / tokens[scored].sum())
    return {f"on_policy_distillation/{name}": value for name, value in metrics.items()}


def counts(batches: tuple[tuple[int, ...], ...], weights: Tensor, tokens: Tensor) -> tuple[list[int], list[int]]:
    """Return the exact numbers of (samples, trained tokens) that count in each optimizer step.

    `batches`: sample indices of each optimizer step over all ranks; `weights` 0 or 1, `tokens` int64, both [samples].
    """
    seqs, toks = [], []
    for indices in batches:
        index = torch.tensor(indices, dtype=torch.int64)
        counting = weights[index] > 0
        seqs.append(int(counting.sum()))
        toks.append(int(tokens[index][counting].sum()))
    return seqs, toks


def shaped_rewards(rewards: Tensor, batch: StepBatch, config: MasterConfig) -> Tensor:
    """Return the rewards [samples] to learn from: scaled, then shaped. NaN stays NaN."""
    rewards = _scaled(rewards, config.grpo.reward_scaling)
    shaping = config.grpo.reward_shaping
    if not shaping.enabled:
        return rewards
    if shaping.path is not None:
        return custom_shaping(shaping.path, step_samples(rewards, batch, config, batch.weights > 0), shaping.options)
    return shape_rewards(
        rewards,
        generated_lengths=batch.trained_tokens,
        truncated=torch.tensor([sample.truncated for sample in batch.samples]),
        max_response_length=shaping.max_response_length or config.policy.max_total_sequence_length,
        overlong_buffer_length=shaping.overlong_buffer_length,
        overlong_buffer_penalty=shaping.overlong_buffer_penalty,
        stop_properly_penalty_coef=shaping.stop_properly_penalty_coef,
    )


def step_samples(
    rewards: Tensor,
    batch: StepBatch,
    config: MasterConfig,
    trained: Tensor,
    kl: SampleKL | None = None,
    kl_penalty: float = 0.0,
) -> StepSamples:
    """Return what a user's own estimator or reward shaping gets. `rewards`, `trained`: [samples]."""
    samples = batch.samples
    return StepSamples(
        rewards=rewards,
        group_ids=_group_ids(batch),
        valid=~rewards.isnan(),
        rewards_by_name=_named_rewards(batch, config),
        prompt_lengths=torch.tensor([sample.prompt_length for sample in samples]),
        generated_lengths=batch.trained_tokens,
        truncated=torch.tensor([sample.truncated for sample in samples]),
        turns=torch.tensor([sample.turns for sample in samples]),
        turn_rewards=tuple(score.turn_rewards for score in batch.scores),
        trained=trained,
        kl=kl,
        kl_penalty=kl_penalty,
    )


def _group_ids(batch: StepBatch) -> Tensor:
    return group_index([group.uid for group in batch.groups for _ in group.samples])


def _scaled(rewards: Tensor, scaling: RewardScalingConfig) -> Tensor:
    return scale_reward_values(rewards, **scaling.model_dump(exclude={"enabled"})) if scaling.enabled else rewards


def _named_rewards(batch: StepBatch, config: MasterConfig, *, needed: bool = False) -> dict[str, Tensor]:
    """Return each named reward of all samples, NaN for failed ones and where it does not apply. `needed`: raise
    TargetsError where a sample has none of them."""
    scores = batch.scores
    names = sorted({name for score in scores for name in score.rewards_by_name})
    for sample, score in zip(batch.samples, scores, strict=True):
        if needed and score.reward is not None and not score.rewards_by_name:
            raise TargetsError(
                f"grpo.adv_estimator gdpo needs named rewards of every sample: the step has {names or 'none'}, "
                f"{sample.uid}#{sample.generation_index} has none"
            )
    nan = float("nan")
    return {
        name: _scaled(
            torch.tensor(
                [nan if s.reward is None else s.rewards_by_name.get(name, nan) for s in scores], dtype=torch.float64
            ),
            config.grpo.reward_scaling,
        )
        for name in names
    }


def _mask_mismatched(batch: StepBatch, stats: Stats, threshold: float | None) -> tuple[Tensor, dict[str, float]]:
    """Return the weights with 0 for samples whose log-probs differ too much between engine and policy, and metrics."""
    if threshold is None or not stats:
        return batch.weights, {}
    error = stats["mult_error"]
    counted = batch.weights > 0
    above = counted & ~(error <= threshold)  # NaN is above
    if counted.any() and bool((above == counted).all()):
        raise TargetsError(
            f"all {int(counted.sum())} samples of the step are above grpo.seq_logprob_error_threshold = "
            f"{threshold:g}: engine and policy do not compute the same model. Look at token_mult_prob_error of the "
            "steps before, at the precision of both, and at the last refit"
        )
    checked = error[counted & error.isfinite()]
    metrics = {
        "seq_logprob_error": _mean(checked),
        "seq_logprob_error_p95": checked.quantile(0.95).item() if len(checked) else 0.0,
        "seq_logprob_error_max": checked.max().item() if len(checked) else 0.0,
        "seq_logprob_error_above_threshold": above.sum().item() / max(1.0, counted.sum().item()),
        "num_nonfinite_seq_logprob_error": float((counted & ~error.isfinite()).sum()),
        "num_masked_by_seq_logprob_error": float(above.sum()),
    }
    masked = [score for score, is_above in zip(batch.scores, above.tolist(), strict=True) if is_above]
    if (correct := accuracy(masked)) is not None or not masked:
        metrics["masked_correct_pct"] = 100 * (correct or 0.0)
    return torch.where(above, 0.0, batch.weights), metrics


def _rollout_metrics(batch: StepBatch, weights: Tensor, advantages: Tensor, greedy: Tensor) -> dict[str, float]:
    """`greedy` [samples]: those whose rewards are only a baseline."""
    samples, rewards, drawn = batch.samples, batch.rewards, ~batch.rewards.isnan() & ~greedy
    scored, used = rewards[drawn], advantages[weights > 0]
    generated = batch.trained_tokens.to(torch.float64)
    metrics = {
        "reward": _mean(scored),
        "reward_std": scored.std(correction=0).item() if len(scored) else 0.0,
        "num_samples": float(len(samples)),
        "num_failed_samples": float(rewards.isnan().sum()),
        "num_trained_samples": float((weights > 0).sum()),
        "prompt_length": sum(sample.prompt_length for sample in samples) / len(samples),
        "generated_length": _mean(generated),
        "generated_length_max": generated.max().item(),
        "truncation_rate": sum(sample.truncated for sample in samples) / len(samples),
        "advantage_mean": _mean(used),
        "advantage_max": used.max().item() if len(used) else 0.0,
        "advantage_min": used.min().item() if len(used) else 0.0,
        "zero_advantage_rate": _mean((used == 0).double()) if len(used) else 1.0,
    }
    scores = [score for score, counts in zip(batch.scores, drawn.tolist(), strict=True) if counts]
    if (correct := accuracy(scores)) is not None:
        metrics["accuracy"] = correct
    metrics |= mean_parts(scores)
    if max(sample.turns for sample in samples) > 1:
        metrics |= {
            "turns_mean": sum(sample.turns for sample in samples) / len(samples),
            "turns_max": float(max(sample.turns for sample in samples)),
            "environment_tokens": sum(sample.environment_tokens for sample in samples) / len(samples),
            "natural_termination_rate": sum(score.terminated for score in scores) / max(1, len(scores)),
        }
    if batch.too_long:
        metrics["num_samples_over_a_bin"] = float(batch.too_long)
    return metrics


def _mean(values: Tensor) -> float:
    return values.mean().item() if len(values) else 0.0


def _first(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value
