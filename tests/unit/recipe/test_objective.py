"""Rules between the keys of loss, rewards and advantages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from grpo_mcore.recipe import ClippedPGLossConfig, RecipeError, checked_loss
from grpo_mcore.recipe.validation.objective import loss_findings
from tests.unit.recipe.conftest import MINIMAL

CHOICES: dict[str, tuple[Any, ...]] = {
    "disable_ppo_ratio": (False, True),
    "token_level_loss": (True, False),
    "sequence_level_importance_ratios": (False, True),
    "sequence_importance_weight": ("geometric_mean", "product"),
    "sequence_length_normalizer": (None, 8),
    "ratio_clip_c": (None, 3.0),
    "use_importance_sampling_correction": (False, True),
    "truncated_importance_sampling_type": (None, "tis", "icepop", "seq-mask-tis"),
    "truncated_importance_sampling_ratio": (None, 2.0),
    "truncated_importance_sampling_ratio_by_age": (None, [], [2.0, 4.0], [2.0, 0.5]),
    "truncated_importance_sampling_ratio_min": (None, 1.0, 3.0),
    "force_on_policy_ratio": (False, True),
    "use_cispo": (False, True),
}


@pytest.mark.parametrize("share", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_findings_name_keys_that_are_set(share: int) -> None:
    """Every `share`-th of 49,152 combinations; 13 divides no number of choices, so every two values meet."""
    accepted = 0
    for combination in itertools.islice(itertools.product(*CHOICES.values()), 0, None, share):
        values = dict(zip(CHOICES, combination, strict=True))
        found = loss_findings(ClippedPGLossConfig.model_construct(**values))
        accepted += not found
        for finding in found:
            assert all(key.removeprefix("loss_fn.") in ClippedPGLossConfig.model_fields for key in finding.keys)
            name = finding.keys[0].removeprefix("loss_fn.")
            assert values[name] != CHOICES[name][0], "the first key is not at its default"
    assert accepted > 100 // share


def test_a_loss_built_in_python_gets_the_problems_of_a_recipe(problems) -> None:
    values = {"use_cispo": True, "ratio_clip_c": 3.0}
    (line,) = problems(MINIMAL + "loss_fn: {use_cispo: true, ratio_clip_c: 3.0}\n")
    for source in (values, ClippedPGLossConfig(**values)):
        with pytest.raises(RecipeError) as error:
            checked_loss(source)
        assert [f"r.yaml:6: {problem}" for problem in error.value.problems] == [line]
    with pytest.raises(
        RecipeError, match="loss_fn.ratio_clip_mim: unknown key; nearest known key: loss_fn.ratio_clip_min"
    ):
        checked_loss({"ratio_clip_mim": 0.1})


def test_a_wrong_key_is_reported_with_its_line(problems) -> None:
    text = MINIMAL + (
        "loss_fn:\n"
        "  sequence_importance_weight: product\n"
        "  sequence_length_normalizer: 8\n"
        "  use_importance_sampling_correction: true\n"
        "  truncated_importance_sampling_type: tis\n"
        "  truncated_importance_sampling_ratio: 2\n"
        "  truncated_importance_sampling_ratio_by_age: [2, 1.5]\n"
        "  truncated_importance_sampling_ratio_min: 1.75\n"
        "  disable_ppo_ratio: true\n"
        "  ratio_clip_c: 3\n"
    )
    assert problems(text) == [
        "r.yaml:7: loss_fn.sequence_importance_weight: product needs sequence_level_importance_ratios: true",
        "r.yaml:8: loss_fn.sequence_length_normalizer: cannot be combined with token_level_loss: true; "
        "it divides the sum over each sequence",
        "r.yaml:12: loss_fn.truncated_importance_sampling_ratio_by_age: replaces "
        "truncated_importance_sampling_ratio; set only one of the two",
        "r.yaml:13: loss_fn.truncated_importance_sampling_ratio_min: the lower bound 1.75 is above the upper bound 1.5",
        "r.yaml:15: loss_fn.ratio_clip_c: cannot be combined with disable_ppo_ratio: true; it leaves no ratio to bound",
    ]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["loss_fn.truncated_importance_sampling_ratio_by_age=[2, 1.5]"],
            "loss_fn.truncated_importance_sampling_ratio_by_age: has no effect without",
        ),
        (
            ["loss_fn.truncated_importance_sampling_ratio_by_age=[2, 0]"],
            "loss_fn.truncated_importance_sampling_ratio_by_age.1: must be above 0, got 0",
        ),
        (
            ["loss_fn.sequence_length_normalizer=0"],
            "loss_fn.sequence_length_normalizer: must be above 0, got 0",
        ),
        (["loss_fn.use_kl_in_reward=true"], "use_kl_in_reward: with normalize_rewards the differences in KL"),
        (
            ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.max_response_length=512"]
            + ["policy.generation.max_new_tokens=64"],
            "the penalty begins above 384 = 512 - 128 generated tokens, but an answer has at most 64",
        ),
        (
            ["grpo.normalize_rewards=false", "loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0"],
            "use_kl_in_reward: needs its weight",
        ),
        (
            [
                "grpo.normalize_rewards=false",
                "loss_fn.use_kl_in_reward=true",
                "loss_fn.use_on_policy_kl_approximation=true",
            ],
            "loss_fn.use_on_policy_kl_approximation: weights the KL term of the loss",
        ),
        (["grpo.adv_estimator.name=opd"], "grpo.adv_estimator.name: needs a teacher"),
        (
            ["grpo.adv_estimator={name: rloo, normalize_rewards: true}"],
            "grpo.adv_estimator.normalize_rewards: true contradicts the estimator rloo, which takes the reward minus "
            "the mean of the others; remove the key",
        ),
        (
            ["grpo.adv_estimator={name: rloo, use_leave_one_out_baseline: false}"],
            "grpo.adv_estimator.use_leave_one_out_baseline: false contradicts the estimator rloo",
        ),
        (
            ["grpo.adv_estimator={name: dr_grpo, use_leave_one_out_baseline: true}"],
            "grpo.adv_estimator.use_leave_one_out_baseline: true contradicts the estimator dr_grpo",
        ),
        (
            ["grpo.adv_estimator={name: reinforce_plus_plus, normalize_rewards: false}"],
            "grpo.adv_estimator.normalize_rewards: false contradicts the estimator reinforce_plus_plus",
        ),
        (
            ["grpo.adv_estimator={name: reinforce_plus_plus, use_leave_one_out_baseline: true}"],
            "grpo.adv_estimator.use_leave_one_out_baseline: true contradicts the estimator reinforce_plus_plus",
        ),
        (
            ["grpo.adv_estimator.minus_baseline=false"],
            "grpo.adv_estimator.minus_baseline: only the estimator reinforce_plus_plus can do without a baseline, not",
        ),
        (
            ["grpo.adv_estimator.reward_weights={correct: 1}"],
            "grpo.adv_estimator.reward_weights: only the estimator gdpo reads rewards by name, not grpo",
        ),
        *(
            (
                [f"grpo.adv_estimator={{name: gdpo, reward_weights: {weights}}}"],
                "grpo.adv_estimator.reward_weights: expected numbers by reward name, a list of numbers or null, got ",
            )
            for weights in ("1", "[]", "{}", "[.nan, 1]", "{correct: high}", "[true, 1]")
        ),
        (
            ["grpo.adv_estimator.name=gdpo", "loss_fn.use_kl_in_reward=true"],
            "loss_fn.use_kl_in_reward: the estimator gdpo has no single reward to subtract the KL from",
        ),
        (
            ["grpo.adv_estimator.name=gdpo", "grpo.reward_shaping.enabled=true"],
            "grpo.reward_shaping.enabled: the estimator gdpo reads the named rewards",
        ),
        (
            ["grpo.num_generations_per_prompt=1", "grpo.adv_estimator.name=reinforce_plus_plus"],
            "grpo.num_generations_per_prompt: a group of 1",
        ),
        (
            ["grpo.reward_shaping={enabled: true, overlong_buffer_length: 5, max_response_length: 4}"],
            "overlong_buffer_length: overlong_buffer_length = 5 tokens exceed max_response_length = 4",
        ),
        (
            ["grpo.reward_shaping.enabled=true", "policy.max_total_sequence_length=100"],
            "shaping.enabled: overlong_buffer_length = 128 tokens exceed max_response_length = 100",
        ),
        (["grpo.reward_shaping.stop_properly_penalty_coef=1.5"], "must be at most 1, got 1.5"),
        (["grpo.seq_logprob_error_threshold=1"], "grpo.seq_logprob_error_threshold: must be above 1, got 1"),
    ],
)
def test_rejected_combinations(problems, overrides: list[str], line: str) -> None:
    base = ["policy.train_global_batch_size=32"] if any("prompt=1" in text for text in overrides) else []
    (found,) = problems(MINIMAL, *base, *overrides)
    assert line in found and found.startswith("command line: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.adv_estimator.name=rloo", "grpo.normalize_rewards=true", "grpo.use_leave_one_out_baseline=false"],
        ["grpo.adv_estimator={name: rloo, normalize_rewards: false, use_leave_one_out_baseline: true}"],
        [
            "grpo.adv_estimator={name: dr_grpo}",
            "loss_fn.token_level_loss=false",
            "loss_fn.sequence_length_normalizer=8",
        ],
        ["grpo.adv_estimator={name: grpo, normalize_rewards: false, use_leave_one_out_baseline: false}"],
        ["grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}", "loss_fn.use_kl_in_reward=true"],
        ["grpo.adv_estimator={name: reinforce_plus_plus, normalize_rewards: true, use_leave_one_out_baseline: false}"],
        [
            "grpo.adv_estimator={name: reinforce_plus_plus, minus_baseline: false}",
            "grpo.num_generations_per_prompt=1",
            "policy.train_global_batch_size=32",
        ],
        ["grpo.adv_estimator={name: gdpo, reward_weights: {correct: 1, format: 0.5}}"],
        ["grpo.adv_estimator={name: gdpo, reward_weights: [1, 0.5]}"],
        ["grpo.adv_estimator=null"],
        ["grpo.reward_shaping.enabled=true"],
        ["grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0, max_response_length: 8}"],
        ["grpo.reward_shaping={enabled: false, overlong_buffer_length: 600}"],
        ["grpo.seq_logprob_error_threshold=2", "loss_fn.positive_example_nll_weight=0.1"],
        ["loss_fn.use_cispo=true", "loss_fn.ratio_clip_min=1", "loss_fn.ratio_clip_max=5"],
        [
            "loss_fn.use_importance_sampling_correction=true",
            "loss_fn.truncated_importance_sampling_type=tis",
            "loss_fn.truncated_importance_sampling_ratio_by_age=[2, 1.5]",
        ],
    ],
)
def test_allowed_combinations(load, overrides: list[str]) -> None:
    load(MINIMAL, *overrides)


def test_the_overlong_penalty_is_largest_at_the_longest_sequence_by_default(load) -> None:
    assert load(MINIMAL, "policy.max_total_sequence_length=300").config.grpo.reward_shaping.max_response_length == 300


def test_the_settings_of_prorl_load(load) -> None:
    """The settings of ProRL v2 in NeMo RL: REINFORCE++ with baseline, dynamic sampling, IcePop, shaping."""
    config = load(
        """\
        defaults: grpo_math_1B
        grpo:
          use_dynamic_sampling: true
          batch_multiplier: 1.5
          adv_estimator:
            name: reinforce_plus_plus
            normalize_rewards: true
            use_leave_one_out_baseline: false
            minus_baseline: true
          reward_shaping: {enabled: true, stop_properly_penalty_coef: 0.0}
        loss_fn:
          reference_policy_kl_penalty: 0.0001
          reference_policy_kl_type: k2
          ratio_clip_max: 0.27
          use_importance_sampling_correction: true
          truncated_importance_sampling_type: icepop
          truncated_importance_sampling_ratio: 5.0
          truncated_importance_sampling_ratio_min: 0.5
          use_kl_in_reward: false
        """
    ).config
    assert config.loss_fn.truncated_importance_sampling_ratio == 5.0
