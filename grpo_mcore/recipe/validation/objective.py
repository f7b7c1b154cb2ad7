"""Rules of the objective: the loss by itself (`loss_findings`), and with rewards, advantages and dynamic sampling."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.derived import trains_on_rewards
from grpo_mcore.recipe.errors import in_yaml
from grpo_mcore.recipe.schema.grpo import ClippedPGLossConfig
from grpo_mcore.recipe.schema.master import RecipeSections, runs_grpo

_ESTIMATOR = "grpo.adv_estimator."
_LOSS = "loss_fn."
_TRUNCATION = "loss_fn.truncated_importance_sampling_"
# Keys of the loss that exclude each other, and why.
_EXCLUSIVE = (
    ("use_cispo", "disable_ppo_ratio", "CISPO weights tokens by the clipped ratio"),
    ("use_cispo", "force_on_policy_ratio", "with a ratio of 1 there is nothing to clip"),
    ("use_cispo", "sequence_level_importance_ratios", "CISPO clips token ratios"),
    ("use_cispo", "ratio_clip_c", "CISPO has no surrogate to clip twice"),
    ("ratio_clip_c", "disable_ppo_ratio", "it leaves no ratio to bound"),
    ("sequence_length_normalizer", "token_level_loss", "it divides the sum over each sequence"),
    ("sequence_length_normalizer", "sequence_level_importance_ratios", "it has one term per sequence"),
)
# Estimators with fixed options: their (normalize_rewards, use_leave_one_out_baseline, what they compute).
_FIXED: dict[str, tuple[bool, bool, str]] = {
    "dr_grpo": (False, False, "takes the reward minus the group's mean"),
    "rloo": (False, True, "takes the reward minus the mean of the others"),
    "reinforce_plus_plus": (True, False, "takes the reward, minus the group's mean if any, and standardises"),
}


def loss_findings(loss: ClippedPGLossConfig) -> list[Finding]:
    """Return what is wrong with the section `loss_fn` by itself, whatever the rest of the recipe."""
    return [*_custom_loss(loss), *_policy_term(loss), *_importance_weights(loss), *_kl_in_loss(loss)]


def _custom_loss(loss: ClippedPGLossConfig) -> Iterator[Finding]:
    """Options are only read by a custom loss."""
    if loss.options and loss.path is None:
        yield Finding((_LOSS + "options", _LOSS + "path"), "are for a loss of your own: set loss_fn.path")


def _policy_term(loss: ClippedPGLossConfig) -> Iterator[Finding]:
    """Terms of the loss that exclude or need each other."""
    for name, other, reason in _EXCLUSIVE:
        if loss[name] not in (None, False) and loss[other] not in (None, False):
            message = f"cannot be combined with {other}: {in_yaml(loss[other])}; {reason}"
            yield Finding((_LOSS + name, _LOSS + other), message)
    if loss.positive_example_nll_divisor != "all" and not loss.positive_example_nll_weight:
        keys = (_LOSS + "positive_example_nll_divisor", _LOSS + "positive_example_nll_weight")
        yield Finding(keys, "has no effect without positive_example_nll_weight above 0")
    if loss.use_cispo and not loss.token_level_loss:
        message = "cannot be combined with token_level_loss: false; CISPO is a token-level loss"
        yield Finding((_LOSS + "use_cispo", _LOSS + "token_level_loss"), message)
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        yield Finding(
            (_LOSS + "sequence_level_importance_ratios", _LOSS + "token_level_loss"),
            "needs token_level_loss: false, because one ratio per sequence goes with a mean over sequences",
        )


def _importance_weights(loss: ClippedPGLossConfig) -> Iterator[Finding]:
    """Importance weights of the loss and their bounds."""
    if loss.sequence_importance_weight == "product":
        for name in ("sequence_level_importance_ratios", "use_importance_sampling_correction"):
            if not loss[name]:
                yield Finding((_LOSS + "sequence_importance_weight", _LOSS + name), f"product needs {name}: true")
    kind, kind_key = loss.truncated_importance_sampling_type, _TRUNCATION + "type"
    high, low = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    by_age = loss.truncated_importance_sampling_ratio_by_age
    if kind is None:
        for suffix, value in (("", high), ("_by_age", by_age), ("_min", low)):
            if value is not None:
                yield Finding(
                    (_TRUNCATION + "ratio" + suffix, kind_key),
                    "has no effect without truncated_importance_sampling_type (such as tis)",
                )
                return
        return
    if not loss.use_importance_sampling_correction:
        yield Finding(
            (kind_key, _LOSS + "use_importance_sampling_correction"),
            f"{kind} needs use_importance_sampling_correction: true",
        )
    if high is None and by_age is None:
        yield Finding((kind_key,), f"{kind} needs an upper bound: truncated_importance_sampling_ratio, or ..._by_age")
    if high is not None and by_age is not None:
        yield Finding(
            (_TRUNCATION + "ratio_by_age", _TRUNCATION + "ratio"),
            "replaces truncated_importance_sampling_ratio; set only one of the two",
        )
    if by_age == []:
        yield Finding((_TRUNCATION + "ratio_by_age",), "the list is empty; give the bounds for age 0, 1, ...")
    if low is None and kind != "tis":
        yield Finding((kind_key,), f"{kind} needs a lower bound: truncated_importance_sampling_ratio_min")
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        yield Finding(
            (kind_key, _LOSS + "sequence_level_importance_ratios"),
            "seq-mask-tis keeps token weights, which sequence_level_importance_ratios does not have; use icepop",
        )
    bounds = {"ratio": high, "ratio_by_age": min(by_age, default=None) if by_age is not None else None}
    for name, bound in bounds.items():
        if bound is not None and low is not None and low > bound:
            yield Finding(
                (_TRUNCATION + "ratio_min", _TRUNCATION + name),
                f"the lower bound {low:g} is above the upper bound {bound:g}",
            )


def _kl_in_loss(loss: ClippedPGLossConfig) -> Iterator[Finding]:
    """Options of the KL need its weight, and the KL is in the loss or in the reward, not in both."""
    if loss.use_on_policy_kl_approximation and loss.reference_policy_kl_penalty == 0:
        yield Finding(
            ("loss_fn.use_on_policy_kl_approximation", "loss_fn.reference_policy_kl_penalty"),
            "weights the KL term of the loss, which reference_policy_kl_penalty: 0 switches off",
        )
    if not loss.use_kl_in_reward:
        return
    if loss.reference_policy_kl_penalty == 0:
        yield Finding(
            ("loss_fn.use_kl_in_reward", "loss_fn.reference_policy_kl_penalty"),
            "needs its weight: reference_policy_kl_penalty above 0",
        )
    if loss.use_on_policy_kl_approximation:
        yield Finding(
            ("loss_fn.use_on_policy_kl_approximation", "loss_fn.use_kl_in_reward"),
            "weights the KL term of the loss, which use_kl_in_reward: true removes",
        )


def check_loss(config: RecipeSections) -> Iterator[Finding]:
    """The section `loss_fn` must be right by itself."""
    yield from loss_findings(config.loss_fn)


def check_kl(config: RecipeSections) -> Iterator[Finding]:
    """The KL needs a reference, and in the reward an estimator that does not divide by the group's deviation."""
    loss = config.loss_fn
    if config.grpo.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty > 0:
        yield Finding(
            ("grpo.skip_reference_policy_logprobs_calculation", "loss_fn.reference_policy_kl_penalty"),
            "the KL penalty needs reference log-probs: set loss_fn.reference_policy_kl_penalty to 0",
        )
    if not loss.use_kl_in_reward:
        return
    estimator = config.grpo.adv_estimator
    normalizes = config.grpo.normalize_rewards if estimator.normalize_rewards is None else estimator.normalize_rewards
    if estimator.name == "grpo" and normalizes:
        yield Finding(
            ("loss_fn.use_kl_in_reward", "grpo.normalize_rewards", "grpo.adv_estimator.normalize_rewards"),
            "with normalize_rewards the differences in KL of a group with equal rewards would become advantages of 1, "
            "whatever the penalty: set grpo.normalize_rewards: false, or use rloo or reinforce_plus_plus",
        )


def check_rewards(config: RecipeSections) -> Iterator[Finding]:
    """Intervals of reward scaling and lengths of reward shaping must not be empty."""
    scaling, shaping = config.grpo.reward_scaling, config.grpo.reward_shaping
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield Finding(
            ("grpo.reward_scaling.source_min", "grpo.reward_scaling.source_max"),
            f"the source interval [{scaling.source_min:g}, {scaling.source_max:g}] is empty",
        )
    longest, buffer = shaping.max_response_length, shaping.overlong_buffer_length
    if shaping.path is not None:
        return
    if shaping.enabled and shaping.stop_properly_penalty_coef is None and longest is not None and buffer > longest:
        yield Finding(
            tuple(f"grpo.reward_shaping.{key}" for key in ("overlong_buffer_length", "max_response_length", "enabled")),
            f"overlong_buffer_length = {buffer} tokens exceed max_response_length = {longest}",
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
    if estimator.path is not None:
        for key in ("normalize_rewards", "use_leave_one_out_baseline", "reward_weights"):
            if estimator[key] is not None:
                yield Finding(
                    (_ESTIMATOR + key, _ESTIMATOR + "path"),
                    f"has no effect on the custom estimator {estimator.path}; pass it in options",
                )
    if name in _FIXED:
        *values, reason = _FIXED[name]
        for key, fixed in zip(("normalize_rewards", "use_leave_one_out_baseline"), values, strict=True):
            if estimator[key] not in (None, fixed):
                yield Finding(
                    (_ESTIMATOR + key, _ESTIMATOR + "name"),
                    f"{in_yaml(estimator[key])} contradicts the estimator {name}, which {reason}; remove the key",
                )
    if not estimator.minus_baseline and name != "reinforce_plus_plus":
        yield Finding(
            (_ESTIMATOR + "minus_baseline", _ESTIMATOR + "name"),
            f"only the estimator reinforce_plus_plus can do without a baseline, not {name}",
        )
    leaves_out, divides = (
        grpo[key] if estimator[key] is None else estimator[key]
        for key in ("use_leave_one_out_baseline", "normalize_rewards")
    )
    if estimator.std_of_others and not (name in ("grpo", "gdpo") and leaves_out and divides):
        yield Finding(
            (_ESTIMATOR + "std_of_others", _ESTIMATOR + "name"),
            "has no effect but with the estimators grpo and gdpo, use_leave_one_out_baseline and normalize_rewards",
        )
    if estimator.reward_weights is not None and name != "gdpo":
        yield Finding(
            (_ESTIMATOR + "reward_weights", _ESTIMATOR + "name"),
            f"only the estimator gdpo reads rewards by name, not {name}",
        )
    if name == "gdpo" and config.loss_fn.use_kl_in_reward:
        yield Finding(
            ("loss_fn.use_kl_in_reward", _ESTIMATOR + "name"),
            "the estimator gdpo has no single reward to subtract the KL from; keep it in the loss",
        )
    if name == "gdpo" and grpo.reward_shaping.enabled:
        yield Finding(
            ("grpo.reward_shaping.enabled", _ESTIMATOR + "name"),
            "the estimator gdpo reads the named rewards, which shaping does not change",
        )
    no_group = estimator.path is not None or (name == "reinforce_plus_plus" and not estimator.minus_baseline)
    no_group = no_group or not trains_on_rewards(config)
    if runs_grpo(config) and grpo.num_generations_per_prompt == 1 and not no_group:
        yield Finding(
            ("grpo.num_generations_per_prompt",),
            "a group of 1 has nothing to be compared with, so every advantage would be 0; use 2 or more",
        )


def check_dynamic_sampling(config: RecipeSections) -> Iterator[Finding]:
    """Dynamic sampling needs groups, and only it generates more prompts than a step trains on."""
    grpo, use_key = config.grpo, "grpo.use_dynamic_sampling"
    if grpo.use_dynamic_sampling and grpo.num_generations_per_prompt == 1:
        yield Finding((use_key, "grpo.num_generations_per_prompt"), "the rewards of a group of 1 never differ")
    if grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling:
        yield Finding(("grpo.batch_multiplier", use_key), "has no effect without use_dynamic_sampling: true")
