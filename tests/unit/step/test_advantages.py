"""Targets of a step: each key of the recipe changes them as documented."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_mcore.layout import PolicyLayout
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.step.advantages import TargetsError, compute_targets
from grpo_mcore.step.step_batch import TrainTargets, build_step_batch
from tests.unit.step.step_cases import config, group

GROUPS = [group("a", [1, 0, 0, 0]), group("b", [1, 1, None, 0])]


def targets(
    recipe: MasterConfig, groups: list[Group] | None = None, stats: dict[str, Any] | None = None
) -> tuple[TrainTargets, dict[str, float]]:
    batch = build_step_batch(groups or GROUPS, recipe, PolicyLayout(1, 1, 1))
    stats = {name: torch.as_tensor(values, dtype=torch.float64) for name, values in (stats or {}).items()}
    return compute_targets(batch, stats, recipe)


def advantages(*args: Any, **kwargs: Any) -> list[float]:
    found = targets(*args, **kwargs)[0].advantages
    assert found is not None
    return found.tolist()


def test_counts_and_metrics() -> None:
    found, metrics = targets(config())
    assert found.valid_seqs == (3, 4) and sum(found.valid_toks) == 6 + 7 + 8 + 9 + 6 + 7 + 9
    assert found.weights.tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
    assert metrics["num_failed_samples"] == 1 and metrics["num_trained_samples"] == 7
    assert metrics["reward"] == metrics["accuracy"] == pytest.approx(3 / 7)
    assert found.kl_weight == 0 and found.rewards is None


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ({}, [1 / 0.5, *[-1 / 3 / 0.5] * 3]),
        ({"normalize_rewards": False}, [1, *[-1 / 3] * 3]),
        ({"use_leave_one_out_baseline": False}, [0.75 / 0.5, *[-0.25 / 0.5] * 3]),
        ({"name": "dr_grpo"}, [0.75, *[-0.25] * 3]),
        ({"name": "rloo"}, [1, *[-1 / 3] * 3]),
    ],
)
def test_the_estimator_and_its_keys(estimator: dict[str, Any], expected: list[float]) -> None:
    found = advantages(config(adv_estimator=estimator))
    assert found[:4] == pytest.approx(expected, rel=1e-5)
    assert found[6] == 0


def test_grpo_keys_apply_where_the_estimator_sets_none() -> None:
    plain = advantages(config(normalize_rewards=False, use_leave_one_out_baseline=False))
    assert plain[:4] == pytest.approx([0.75, *[-0.25] * 3])


def test_scaling_and_shaping_change_the_targets_and_not_the_reported_reward() -> None:
    scaling = {"enabled": True, "target_min": -1.0, "target_max": 1.0}
    shaping = {"enabled": True, "overlong_buffer_length": 4, "max_response_length": 10, "overlong_buffer_penalty": 0.5}
    found, metrics = targets(
        config(reward_scaling=scaling, reward_shaping=shaping, adv_estimator={"name": "dr_grpo"}),
        [group("a", [1, 0, 0, 0], lengths=[6, 8, 10, 12])],
    )
    shaped = [1.0, -1 - 0.25, -1 - 0.5, -1 - 0.5]
    assert found.advantages is not None
    assert found.advantages.tolist() == pytest.approx([r - sum(shaped) / 4 for r in shaped])
    assert metrics["reward"] == 0.25 and metrics["shaped_reward"] == pytest.approx(sum(shaped) / 4)


def test_stop_properly() -> None:
    recipe = config(
        reward_shaping={"enabled": True, "stop_properly_penalty_coef": 0.5}, adv_estimator={"name": "dr_grpo"}
    )
    found = advantages(recipe, [group("a", [1, 0, 1, 0], truncated=True)])
    assert found == pytest.approx([0.25, -0.25, 0.25, -0.25])


def test_mismatched_samples_are_masked_but_stay_in_the_baseline() -> None:
    recipe = config(seq_logprob_error_threshold=2.0)
    errors = [1.0, 1.1, 2.5, 1.0, math.nan, 2.0, 0.0, 1.0]
    found, metrics = targets(recipe, stats={"mult_error": errors})
    assert found.weights.tolist() == [1, 1, 0, 1, 0, 1, 0, 1]
    assert found.valid_seqs == (2, 3) and sum(found.valid_toks) == 6 + 7 + 9 + 7 + 9
    assert found.advantages is not None and found.advantages[:4].tolist() == pytest.approx([2, *[-2 / 3] * 3], rel=1e-5)
    assert metrics["num_masked_by_seq_logprob_error"] == 2
    assert metrics["masked_correct_pct"] == 50.0
    assert metrics["seq_logprob_error_above_threshold"] == pytest.approx(2 / 7)


def test_it_is_an_error_if_engine_and_policy_agree_on_no_sample() -> None:
    with pytest.raises(TargetsError, match="all 7 samples of the step are above .* do not compute the same model"):
        targets(config(seq_logprob_error_threshold=2.0), stats={"mult_error": [3.0, math.nan, *[9.0] * 6]})


def test_kl_in_the_reward_with_a_group_estimator() -> None:
    recipe = config({"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5}, adv_estimator={"name": "dr_grpo"})
    kl = [0.2, 0.4, 0.0, 0.6, 0, 0, 0, 0]
    stats = {"kl_sum": kl, "kl_to_go_sum": kl, "kl_to_go_square": kl}
    found, metrics = targets(recipe, stats=stats)
    penalised = [1 - 0.1, -0.2, 0.0, -0.3]
    assert found.advantages is not None
    assert found.advantages[:4].tolist() == pytest.approx([r - sum(penalised) / 4 for r in penalised])
    assert found.kl_weight == 0 and metrics["kl_in_reward"] == pytest.approx(1.2 / 7)


def test_reinforce_plus_plus_is_standardised_over_the_trained_tokens() -> None:
    found, _ = targets(config(adv_estimator={"name": "reinforce_plus_plus"}))
    assert found.advantages is not None
    tokens = torch.tensor([6.0, 7, 8, 9, 6, 7, 0, 9], dtype=torch.float64)
    mean = (tokens * found.advantages).sum() / tokens.sum()
    variance = (tokens * (found.advantages - mean).square()).sum() / tokens.sum()
    assert abs(mean) < 1e-9 and variance == pytest.approx(1, rel=1e-2)


def test_gdpo_uses_the_named_rewards() -> None:
    parts = [{"correct": r, "format": f} for r, f in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0))]
    recipe = config(adv_estimator={"name": "gdpo", "reward_weights": {"correct": 1.0, "format": 0.5}})
    found, metrics = targets(recipe, [group("a", [1, 0, 0, 1], parts=parts)])
    assert found.advantages is not None
    order = found.advantages.argsort().tolist()
    assert order == [2, 1, 0, 3]
    assert metrics["reward/correct"] == metrics["reward/format"] == 0.5


def test_gdpo_names_the_sample_whose_named_rewards_are_missing() -> None:
    with pytest.raises(TargetsError, match="named rewards"):
        targets(config(adv_estimator={"name": "gdpo"}))
    parts: list[dict[str, float]] = [{"x": 1.0, "y": 0.0}, {}, {"x": 0.0, "y": 1.0}, {"x": 0.0, "y": 0.0}]
    with pytest.raises(TargetsError, match="has \\['x', 'y'\\], a#1 has none"):
        targets(config(adv_estimator={"name": "gdpo"}), [group("a", [1, 0, 0, 1], parts=parts)])


def test_gdpo_compares_a_named_reward_among_the_samples_to_which_it_applies() -> None:
    parts: list[dict[str, float]] = [{"x": 1.0, "y": 1.0}, {"x": 1.0}, {"x": 0.0, "y": 0.0}, {"x": 0.0}]
    recipe = config(adv_estimator={"name": "gdpo"}, use_leave_one_out_baseline=False)
    found, _ = targets(recipe, [group("a", [1, 0, 0, 1], parts=parts)])
    assert found.advantages is not None
    of_x, of_y = 3**0.5 / 2, 0.5**0.5  # 1/2 over the std of 4 samples, and of 2
    expected = torch.tensor([of_x + of_y, of_x, -of_x - of_y, -of_x], dtype=torch.float64)
    assert torch.allclose(found.advantages, expected / expected.std(), atol=1e-5)


def test_clipping_is_passed_on_and_reported() -> None:
    found, metrics = targets(config(advantage_clip_low=-0.5, advantage_clip_high=0.25))
    assert found.clip == (-0.5, 0.25)
    assert metrics["advantage_max"] == 0.25 and metrics["advantage_min"] == -0.5


def test_the_greedy_first_sample_is_a_baseline_and_no_part_of_the_loss() -> None:
    found, metrics = targets(config(adv_estimator={"name": "remax"}))
    assert found.advantages is not None and found.advantages.tolist() == [0, -1, -1, -1, 0, 0, 0, -1]
    assert found.weights.tolist() == [0, 1, 1, 1, 0, 1, 0, 1]
    assert metrics["num_trained_samples"] == sum(found.valid_seqs) == 5 and metrics["num_failed_samples"] == 1
    assert metrics["reward"] == metrics["accuracy"] == 1 / 5, "of what the policy draws"


def test_rewards_are_passed_on_if_the_loss_needs_them() -> None:
    found, _ = targets(config({"positive_example_nll_weight": 0.1}))
    assert found.rewards is not None and found.rewards.tolist() == [1, 0, 0, 0, 1, 1, 0, 0]


def test_a_step_without_samples_has_metrics_and_no_counts() -> None:
    recipe = config(
        {"use_kl_in_reward": True}, overlong_filtering=True, seq_logprob_error_threshold=2.0, normalize_rewards=False
    )
    nothing = [group("a", [1, 0, 0, 0], lengths=[0, 0, 0, 0])]
    found, metrics = targets(recipe, nothing)
    assert not any(found.valid_toks) and metrics["num_trained_samples"] == 0


def with_turns(uid: str, scored: list[tuple[float | None, tuple[float | None, ...], str]]) -> Group:
    """Return a group of samples with (reward, rewards of turns, states of turns, a letter each)."""
    plain = group(uid, [reward for reward, _, _ in scored])
    return replace(
        plain,
        samples=tuple(replace(s, turns=len(states)) for s, (_, _, states) in zip(plain.samples, scored, strict=True)),
        scores=tuple(
            replace(
                score,
                turn_rewards=rewards,
                turn_states=tuple(states),
                step_rewards=(*[0.0] * (len(states) - 1), score.reward or 0.0) if score.reward else (),
            )  # fmt: skip
            for score, (_, rewards, states) in zip(plain.scores, scored, strict=True)
        ),
    )


TALKS = [
    with_turns("a", [(1, (0.0, None, 1.0), "abc"), (0, (0.5, 0.0), "ab"), (None, (1.0, 2.0), "ab"), (0, (), "a")]),
    group("b", [1, 1, None, 0]),
]


def test_credit_by_turn_is_added_with_its_weight_and_0_changes_nothing() -> None:
    plain, no_metrics = targets(config(), TALKS)
    none, metrics = targets(config(turn_credit={"weight": 0.0, "mode": "gigpo"}), TALKS)
    assert plain.turn_credits is none.turn_credits is None and metrics == no_metrics
    found, metrics = targets(config(turn_credit={"weight": 2.0, "gamma": 0.5}), TALKS)
    assert found.turn_credits is not None and plain.advantages is not None
    assert found.turn_credits[:2].flatten().tolist() == pytest.approx([0, 2 / 3, 4 / 3, 0, -1, 0])
    assert not found.turn_credits[2:].any() and found.advantages.equal(plain.advantages)  # type: ignore[union-attr]
    turns = [3, 2, 0, 1, 1, 1, 0, 1]
    of_sample = sum(count * abs(a) for count, a in zip(turns, plain.advantages.tolist(), strict=True))
    assert metrics["turn_credit/mean_abs"] == pytest.approx(3 / 9)
    assert metrics["turn_credit/share"] == pytest.approx(3 / (3 + of_sample))
    assert metrics["turn_credit/nonzero_rate"] == pytest.approx(3 / 9)


@pytest.mark.parametrize("normalize", [False, True])
def test_gigpo_compares_turns_of_equal_states_among_the_scored_samples_of_a_group(normalize: bool) -> None:
    recipe = config(turn_credit={"weight": 1.0, "gamma": 0.5, "mode": "gigpo"}, normalize_rewards=normalize)
    found, _ = targets(recipe, TALKS)
    assert found.turn_credits is not None
    first, second = torch.tensor([0.25, 0.0, 0.0]), torch.tensor([0.5, 0.0])  # the third sample failed
    scale = (first.std(), second.std()) if normalize else (1.0, 1.0)
    expected = torch.zeros(8, 3)
    expected[[0, 1, 3], 0] = (first - first.mean()) / scale[0]
    expected[[0, 1], 1] = (second - 0.25) / scale[1]
    assert found.turn_credits.float()[:4].allclose(expected[:4], atol=1e-5)
    assert not found.turn_credits[4:].any()  # their environment names no states
    sparse = [with_turns("a", [(1, (), "ab"), (0, (), "ab")])]
    assert targets(recipe, sparse)[0].turn_credits[:, 0].tolist() == pytest.approx(  # type: ignore[index]
        [0.25, -0.25] if not normalize else [math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5
    )


def test_what_is_wrong_with_a_critics_values_names_the_section_of_the_critic() -> None:
    plain = config().model_dump(mode="json") | {"ppo": {"enabled": True}}
    with pytest.raises(TargetsError, match=r"^ppo.adv_estimator: it reads a critic's values, and there are none"):
        targets(MasterConfig.model_validate(plain))
