"""Rules of the objective: the loss by itself (`loss_findings`), and with rewards and advantages."""

import math
from collections.abc import Iterator
from typing import Any

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import reward_weights, trains_on_rewards
from grpo_mcore.recipe.errors import in_yaml
from grpo_mcore.recipe.schema.grpo import (
    POLICY_TERM_OPTIONS,
    AdvEstimatorConfig,
    ClippedPGLossConfig,
    policy_term_options,
)
from grpo_mcore.recipe.schema.master import RecipeSections, algorithm_of, runs_grpo, value_at
from grpo_mcore.recipe.schema.section import Section
from grpo_mcore.recipe.validation.rules import check_rules, check_rules_of_loss

_ESTIMATOR = "grpo.adv_estimator."
_LOSS = "loss_fn."
_TRUNCATION = "loss_fn.truncated_importance_sampling_"


def loss_findings(loss: ClippedPGLossConfig) -> list[Finding]:
    """Return what is wrong with the section `loss_fn` by itself, whatever the rest of the recipe."""
    return [*check_rules_of_loss(loss), *_term_options(loss), *_bounds(loss)]


def _term_options(loss: ClippedPGLossConfig) -> Iterator[Finding]:
    known = POLICY_TERM_OPTIONS.get(loss.policy_term, {})
    for name in sorted(set(loss.policy_term_options) - set(known)):
        message = f"{loss.policy_term} has no option {name!r}; it has {', '.join(known) or 'none'}"
        yield Finding((_LOSS + "policy_term_options", _LOSS + "policy_term"), message)
    if loss.policy_term_options.get("share", 0) > 1:
        yield Finding((_LOSS + "policy_term_options",), "share is that of all tokens, so at most 1")
    options = policy_term_options(loss)
    if options.get("low", 0) >= options.get("high", math.inf):
        yield Finding(
            (_LOSS + "policy_term_options",), "no covariance lies between low and high; low must be below high"
        )


def _bounds(loss: ClippedPGLossConfig) -> Iterator[Finding]:
    """The lower bound of an importance weight must not be above its upper bounds."""
    low, by_age = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio_by_age
    bounds = {"ratio": loss.truncated_importance_sampling_ratio, "ratio_by_age": min(by_age or (), default=None)}
    for name, bound in bounds.items():
        if loss.truncated_importance_sampling_type and bound is not None and low is not None and low > bound:
            yield Finding(
                (_TRUNCATION + "ratio_min", _TRUNCATION + name),
                f"the lower bound {low:g} is above the upper bound {bound:g}",
            )


def check_loss(config: RecipeSections) -> Iterator[Finding]:
    """The section `loss_fn` must be right by itself."""
    yield from loss_findings(config.loss_fn)


def check_kl(config: RecipeSections) -> Iterator[Finding]:
    """The KL in the reward needs an estimator that does not divide by the group's deviation."""
    if not config.loss_fn.use_kl_in_reward or config.ppo.enabled:
        return
    estimator = config.grpo.adv_estimator
    normalizes = config.grpo.normalize_rewards if estimator.normalize_rewards is None else estimator.normalize_rewards
    if estimator.name in ("grpo", "gfpo") and normalizes:
        yield Finding(
            ("loss_fn.use_kl_in_reward", "grpo.normalize_rewards", "grpo.adv_estimator.normalize_rewards"),
            "with normalize_rewards the differences in KL of a group with equal rewards would become advantages of 1, "
            "whatever the penalty: set grpo.normalize_rewards: false, or use rloo or reinforce_plus_plus",
        )


def check_shaping_acts(config: RecipeSections) -> Iterator[Finding]:
    """Some answers must be able to reach the length at which the penalty on long answers begins."""
    shaping, generation = config.grpo.reward_shaping, config.policy.generation
    longest, turns = shaping.max_response_length, config.grpo.max_rollout_turns
    if (
        not shaping.enabled
        or shaping.path is not None
        or shaping.stop_properly_penalty_coef is not None
        or longest is None
    ):
        return
    possible = generation.max_new_tokens * turns
    free = longest - shaping.overlong_buffer_length
    if free >= possible:
        yield Finding(
            tuple(f"grpo.reward_shaping.{key}" for key in ("max_response_length", "overlong_buffer_length", "enabled")),
            f"the penalty begins above {free} = {longest} - {shaping.overlong_buffer_length} generated tokens, but an "
            f"answer has at most {possible} (policy.generation.max_new_tokens x grpo.max_rollout_turns)",
        )


def check_advantages(config: RecipeSections) -> Iterator[Finding]:
    """Options of the advantage estimator must be options that it reads."""
    grpo, estimator = config.grpo, config.grpo.adv_estimator
    name: str = estimator.path or estimator.name
    leaves_out, divides = (
        grpo[key] if estimator[key] is None else estimator[key]
        for key in ("use_leave_one_out_baseline", "normalize_rewards")
    )
    if estimator.std_of_others and not (name in ("grpo", "gdpo") and leaves_out and divides):
        yield Finding(
            (_ESTIMATOR + "std_of_others", _ESTIMATOR + "name"),
            "has no effect but with the estimators grpo and gdpo, use_leave_one_out_baseline and normalize_rewards",
        )
    try:
        reward_weights(config)
    except ValueError as error:
        yield Finding((_ESTIMATOR + "reward_weights", "env"), str(error).removeprefix("reward_weights "))
    no_group = estimator.path is not None or name == "flash_reinforce"
    no_group = no_group or (name == "reinforce_plus_plus" and not estimator.minus_baseline)
    no_group = no_group or not trains_on_rewards(config) or config.ppo.enabled
    if runs_grpo(config) and grpo.num_generations_per_prompt == 1 and not no_group:
        yield Finding(
            ("grpo.num_generations_per_prompt",),
            "a group of 1 has nothing to be compared with, so every advantage would be 0; use 2 or more",
        )


_SAME = (
    *("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size", "max_total_sequence_length"),
    *("make_sequence_length_divisible_by", "sequence_packing", "dynamic_batching", "deterministic"),
    *(f"megatron_cfg.{size}_model_parallel_size" for size in ("tensor", "pipeline", "expert", "virtual_pipeline")),
    *("megatron_cfg.context_parallel_size", "megatron_cfg.expert_tensor_parallel_size"),
    *("megatron_cfg.sequence_parallel", "megatron_cfg.num_layers_in_first_pipeline_stage"),
    *("megatron_cfg.num_layers_in_last_pipeline_stage",),
)
"""Keys that a critic shares with the policy: it trains in the same ranks, on the same bins."""


def check_critic(config: RecipeSections) -> Iterator[Finding]:
    """A critic trains beside the policy, on its ranks, and takes the place of the estimator."""
    critic, policy, ppo = config.value, config.policy, config.ppo
    if policy.head != "tokens" and algorithm_of(config) != "rm":
        yield Finding(("policy.head",), "a policy needs logits; a critic is the section value, a reward model rm")
    if not ppo.enabled:
        if critic is not None and not ppo.model_fields_set:
            yield Finding(("value",), "is for a run with a critic: add the section ppo, or remove this one")
        return
    if critic is None:
        return
    known, alone = set(check_rules(config)), config.model_copy(update={"policy": critic, "value": None})
    for finding in check_rules(alone):
        if finding not in known and not any(".generation." in key for key in finding.keys):
            keys = tuple(key.replace("policy.", "value.", 1) for key in finding.keys)
            yield Finding(keys, finding.message.replace("policy.", "value."))
    for key in _SAME:
        if (own := value_at(critic, key)) != (other := value_at(policy, key)):
            shown = "" if isinstance(own, Section) else f": {in_yaml(own)} is not {in_yaml(other)}"
            yield Finding(
                (f"value.{key}", f"policy.{key}"),
                f"the critic trains in the policy's ranks, on its bins, so this is policy.{key}{shown}; remove it",
            )
    if config.grpo.adv_estimator != AdvEstimatorConfig():
        key = next(key for key in AdvEstimatorConfig.model_fields if config.grpo.adv_estimator[key] != _default(key))
        message = "has no effect with a critic, whose advantages are those of ppo.adv_estimator; remove it"
        yield Finding((_ESTIMATOR + key,), message)


def _default(key: str) -> Any:
    return AdvEstimatorConfig()[key]
