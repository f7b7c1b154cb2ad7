"""Which groups are informative, and what a step reports of those that it did not train on."""

import gc
import weakref
from dataclasses import replace

import pytest

from grpo_mcore.driver.record.run_record import schedule_config
from grpo_mcore.rollout.schedule import Train
from grpo_mcore.step.step_groups import StepGroups, is_informative, tail
from tests.unit.step.step_cases import config, group


@pytest.mark.parametrize(
    ("rewards", "informative"),
    [
        ([1, 0, 0, 1], True),
        ([0, 0, 0, 0], False),
        ([1, 1, None, 1], False),
        ([1, 0, None, None], True),
        ([None, None, None, 1], False),  # one scored sample cannot be compared with another
        ([0.1, 0.1 + 1e-9, 0.1, 0.1 - 1e-9], False),  # float32 rounding
        ([-2.0, -2.0, -2.0, -1.9], True),
    ],
)
def test_a_group_is_informative_if_its_rewards_differ(rewards: list[float | None], informative: bool) -> None:
    assert is_informative(group("a", rewards)) == informative


def test_the_range_of_rewards_that_a_group_needs() -> None:
    near, far = group("a", [0.5, 0.6, 0.5]), group("b", [0.5, 0.75, 0.5])
    assert is_informative(near) and not is_informative(near, min_range=0.2) and is_informative(far, min_range=0.2)
    step = StepGroups(config(use_dynamic_sampling=True, dynamic_sampling_min_range=0.2))
    assert [step.add(near), step.add(far)] == [False, True]


def test_named_rewards_count_only_if_the_estimator_uses_them_separately() -> None:
    parts = [{"correct": 1.0, "format": 0.0}, {"correct": 0.0, "format": 1.0}]
    balanced = group("a", [1, 1], parts=parts)
    assert not is_informative(balanced) and is_informative(balanced, by_name=True)
    assert not is_informative(group("a", [1, 1], parts=parts[:1] * 2), by_name=True)
    assert not is_informative(group("a", [1, None], parts=parts), by_name=True)
    only_format = group("a", [1, 2], parts=[{"correct": 1.0, "format": 0.0}, {"correct": 1.0, "format": 1.0}])
    for weights, informative in (({"correct": 1.0, "format": 0.0}, False), ([1.0, 0.5], True), ([0.0, -1.0], True)):
        assert is_informative(only_format, by_name=True, weights=weights) == informative
    unweighted = {"name": "gdpo", "reward_weights": {"correct": 2.0, "format": 0.0}}
    assert not StepGroups(config(use_dynamic_sampling=True, adv_estimator=unweighted)).add(only_format)
    for estimator, kept in (("grpo", False), ("gdpo", True)):
        step = StepGroups(config(use_dynamic_sampling=True, adv_estimator={"name": estimator}))
        assert step.add(balanced) == kept


def test_a_list_of_weights_is_of_the_rewards_that_the_recipe_names() -> None:
    """A rule that does not apply to a group gives it no reward of its name; the list had one entry too many there."""
    recipe = config(use_dynamic_sampling=True, adv_estimator={"name": "gdpo", "reward_weights": [0, 1]})
    recipe.env, recipe.data.train[0].env_name = {"math": {"format_pattern": ".*"}}, "math"
    for name, kept in (("correct", False), ("format", True)):
        assert StepGroups(recipe).add(group("a", [1, 0], parts=[{name: 1.0}, {name: 0.0}])) == kept


def test_a_greedy_first_sample_is_compared_with_and_no_part_of_the_rewards() -> None:
    step = StepGroups(config(use_dynamic_sampling=True, adv_estimator={"name": "remax"}))
    groups = [group("a", [1, 0, 0, 0]), group("b", [None, 1, 0, 0])]
    assert [step.add(each) for each in groups] == [True, False], "without its baseline a group has no gradient"
    _, _, metrics = step.take(Train(1, ("a",), surplus=(), filtered=1), version=1)
    assert metrics["reward"] == metrics["accuracy"] == 1 / 6 and metrics["filtered_reward"] == 0
    assert metrics["num_generated_samples"] == 8 and metrics["num_failed_samples"] == 1


def test_the_metrics_cover_all_generated_samples() -> None:
    step = StepGroups(config(use_dynamic_sampling=True, batch_multiplier=1.5))
    groups = [
        group("a", [0, 0, 0, None]), group("b", [1, 0, 0, 0]), group("c", [1, 1, 1, 1]),
        group("d", [2, 0, None, 0], solved_at=1.0), group("e", [1, 1, 1, 0]),
    ]  # fmt: skip
    assert [step.add(g) for g in groups] == [False, True, False, True, True]
    trained, returned, metrics = step.take(Train(1, ("b", "d"), ("e",), filtered=2), version=1)
    assert trained == [groups[1], groups[3]] and returned == [groups[4]]
    assert metrics == {
        "reward": pytest.approx((0 + 1 + 4 + 2 + 3) / 18),
        "accuracy": pytest.approx((1 + 4 + 1 + 3) / 18),
        "filtered_reward": pytest.approx((1 + 2) / 7),
        "num_failed_samples": 2.0,
        "num_generated_samples": 20.0,
        "num_filtered_prompts": 2.0,
        "num_surplus_prompts": 1.0,
        "num_gen_batches": 2.0,
    }
    step.add(group("f", [1, 0, 1, 0]))  # the next step counts its own samples
    assert step.take(Train(2, ("f",)), version=2)[2]["num_generated_samples"] == 4


def test_with_generation_ahead_it_reports_waiting_and_dropped_groups() -> None:
    corrected = {"use_importance_sampling_correction": True}
    step = StepGroups(config(corrected, use_dynamic_sampling=True, async_grpo={"enabled": True}))
    found = {uid: group(uid, [0, 1, 0, 1], lengths=[2] * 4) for uid in "abcd"}
    for one in found.values():
        step.add(one)
    step.add(group("dull", [1, 1, 1, 1]))
    step.add(group("lost", [None] * 4))
    trained, returned, metrics = step.take(Train(3, ("a", "b"), ("c", "under way"), filtered=1), version=3)
    assert trained == [found["a"], found["b"]] and returned == [found["c"]]
    expected = {"groups": 1, "bytes": 4 * (8 * 6 + 4 * 2), "age_mean": 2, "age_max": 2}
    dropped = {"failed": 1, "too_old_finished": 1, "too_old_under_way": 1, "equal_rewards": 1}
    expected |= {f"dropped_{reason}": count for reason, count in dropped.items()}
    assert {name: metrics[f"buffer/{name}"] for name in expected} == expected
    *_, metrics = step.take(Train(4, ("d",)), version=4)
    assert not any(metrics[f"buffer/{name}"] for name in expected)
    assert (
        "reward" not in metrics
    )  # nothing was generated since the last step: the report uses the trained samples' reward


def test_without_dynamic_sampling_every_group_trains_and_no_metric_is_added() -> None:
    step = StepGroups(config())
    equal = group("a", [1, 1, 1, 1])
    assert step.add(equal)
    assert step.take(Train(1, ("a",)), version=1) == ([equal], [], {})


def test_trajectories_that_are_not_trained_on_are_released() -> None:
    class Object:
        """A trajectory in the store."""

    def with_object(found, thing):
        return replace(found, samples=tuple(replace(sample, ref=thing) for sample in found.samples))

    step = StepGroups(config(use_dynamic_sampling=True))
    dull, extra = Object(), Object()
    seen = [weakref.ref(dull), weakref.ref(extra)]
    step.add(with_object(group("a", [1, 1, 1, 1]), dull))
    step.add(with_object(group("b", [1, 0, 1, 1]), extra))
    step.add(group("c", [1, 0, 1, 1]))
    del dull
    gc.collect()
    assert seen[0]() is None and seen[1]() is not None
    step.take(Train(1, ("c",), ("b",), 1), version=1)
    del extra
    gc.collect()
    assert seen[1]() is None


def test_the_schedule_gets_the_size_of_a_generation_batch() -> None:
    plain = schedule_config(config(), validates=False)
    assert plain.prompts_per_dispatch is None
    grpo = {"use_dynamic_sampling": True, "batch_multiplier": 1.25, "dynamic_sampling_max_gen_batches": 4}
    dynamic = schedule_config(config(**grpo), validates=False)
    assert (dynamic.num_prompts, dynamic.prompts_per_dispatch, dynamic.max_gen_batches) == (2, 3, 4)


def test_the_tail_of_a_step_is_measured_and_its_last_samples_are_named() -> None:
    ends = [float(second) for second in range(1, 20)] + [50.0]
    groups = [replace(group(uid, [1.0] * 10), ended_at=tuple(ends[first::2])) for first, uid in enumerate("ab")]
    metrics, last = tail(groups)
    assert metrics == {"tail/last_1_percent": 31.0, "tail/last_5_percent": 31.0, "tail/last_10_percent": 32.0}
    assert [(sample["uid"], sample["generation"], sample["seconds"]) for sample in last[:2]] == [
        ("b", 9, 32.0),
        ("a", 9, 1.0),
    ]
    assert len(last) == 5 and set(last[0]) == {"uid", "generation", "turns", "tokens", "seconds"}
    assert tail([replace(groups[0], ended_at=())]) == ({}, []), "restored groups do not know"
